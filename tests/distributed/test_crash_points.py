"""A save is ended at every call that changes the file system, before and after it: the run goes on from the state
before the save or behind it, whole, and without help."""

from __future__ import annotations

import multiprocessing as mp
import os
import shutil
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from raytune_fsdp.checkpoint.catalogue import newest
from raytune_fsdp.checkpoint.location import storage_at
from tests.checkpoints import tensors_in
from tests.ranks import PRELOAD
from tests.tracing import Call, Tracer, traceable

if TYPE_CHECKING:
    from raytune_fsdp.step.optim.adamw import AdamW

WORLD = 2
OLD, NEW = 4, 8
"""Steps, and the values of the state behind them. There is an older one, so that the save prunes."""

pytestmark = pytest.mark.skipif(not traceable(), reason="needs Linux and ptrace, on a machine whose calls are known")


def state_of(step: int) -> tuple[torch.nn.Module, AdamW]:
    """A sharded model and optimizer all of whose numbers are the step."""
    from torch.distributed.fsdp import fully_shard

    from raytune_fsdp.config import OptimConfig
    from raytune_fsdp.step.optim.build import build_optimizer

    model = torch.nn.Sequential(torch.nn.Linear(300, 1200), torch.nn.Linear(1200, 3))  # several writes a file
    fully_shard(model)
    optimizer = build_optimizer(model, OptimConfig())
    optimizer.init_state()
    with torch.no_grad():
        for tensor in [*model.parameters(), *optimizer.state_tensors().values()]:
            tensor.fill_(step)
    return model, optimizer


def save(root: str, steps: list[int], ready: Callable[[], None]) -> None:
    """Save the states of these steps, the last one when it is told to."""
    from raytune_fsdp.checkpoint.catalogue import Keep
    from raytune_fsdp.checkpoint.saver import open_saver
    from raytune_fsdp.checkpoint.state import RunState

    for step in steps:
        saver = open_saver(
            root, *state_of(step), attempt=1, keep=Keep(last=2), seconds=30, asynchronous=True, scores={}
        )
        if step == steps[-1]:
            ready()
        saver.begin(RunState(step=step, attempt=1), before=lambda: None)
        outcome = saver.finish()
        assert outcome is not None and outcome.saved is not None, outcome
        saver.leave()  # what is removed after the commit is a part of the save


def rank_main(pipe: Connection, rank: int, meeting: str, root: str, steps: list[int]) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(meeting, WORLD), rank=rank, world_size=WORLD)

    def ready() -> None:
        pipe.send(os.getpid())
        pipe.recv()

    save(root, steps, ready)
    pipe.send("saved")
    os._exit(0)


class Ranks:
    """The ranks of one save, held before it."""

    def __init__(self, directory: Path, root: Path, steps: list[int]) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._pipes, self._processes = [], []
        meeting = directory / "meeting"
        meeting.unlink(missing_ok=True)
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=rank_main, args=(theirs, rank, str(meeting), str(root), steps), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.pids = [pipe.recv() for pipe in self._pipes]

    def go(self) -> None:
        for pipe in self._pipes:
            pipe.send("go")

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def follow(ranks: Ranks, rank: int, root: Path, at: Callable[[Call, bool], bool]) -> bool:
    """Let the save go, with one rank watched; whether it was killed. In a thread of its own, as a tracer has to be."""
    failed: list[BaseException] = []
    killed: list[bool] = []

    def watch() -> None:
        try:
            tracer = Tracer(ranks.pids[rank], root)
            ranks.go()
            killed.append(tracer.run(at))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join(60)
    ranks.end()
    thread.join(60)
    assert not thread.is_alive()
    if failed:
        raise failed[0]
    return killed[0]


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of two steps, as they were before the save."""
    directory = tmp_path_factory.mktemp("before")
    ranks = Ranks(directory, directory / "checkpoints", [2, OLD])
    ranks.go()
    assert [pipe.recv() for pipe in ranks._pipes] == ["saved"] * WORLD
    ranks.end()
    assert sorted(os.listdir(directory / "checkpoints")) == ["step-00000002.a1", "step-00000004.a1"]
    return directory / "checkpoints"


def calls_of(rank: int, before: Path, tmp_path: Path) -> list[Call]:
    """What a rank does to the file system in one save."""
    root = tmp_path / f"counted-{rank}" / "checkpoints"
    shutil.copytree(before, root)
    calls: list[Call] = []

    def note(call: Call, done: bool) -> bool:
        if not done:
            calls.append(call)
        return False

    follow(Ranks(tmp_path, root, [NEW]), rank, root, note)
    assert step_in(root) == NEW
    return calls


def step_in(root: Path) -> int:
    """The step of the state that a run finds here; all of its numbers must be of that step."""
    storage = storage_at(str(root))
    storage.clean()
    found, damaged = newest(str(root), hashes=True)
    assert found is not None and not damaged
    values: dict[str, Any] = {name: set(tensor.flatten().tolist()) for name, tensor in tensors_in(found).items()}
    assert len(values) == 16 and all(each == {float(found.step)} for each in values.values()), values
    assert all(name.startswith("step-") and not name.endswith(".tmp") for name in os.listdir(root))
    return found.step


@pytest.mark.parametrize("behind_too", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_point_of_a_save_leaves_the_old_state_or_the_new_one(
    before: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], behind_too: bool
) -> None:
    """`behind_too`: also behind each call, and not only before the next one. The other rank is elsewhere then."""
    points = old = 0
    counts: dict[str, int] = {}
    for rank in range(WORLD):
        calls = calls_of(rank, before, tmp_path)
        for call in calls:
            counts[call.name] = counts.get(call.name, 0) + 1
        for index in range(len(calls)):
            for after in (False, True) if behind_too or index == len(calls) - 1 else (False,):
                root = tmp_path / "killed" / "checkpoints"
                shutil.rmtree(root.parent, ignore_errors=True)
                shutil.copytree(before, root)
                seen = iter(range(10**9))

                def here(call: Call, done: bool, index: int = index, after: bool = after, seen: Any = seen) -> bool:
                    number = next(seen)
                    return number == 2 * index + after

                assert follow(Ranks(tmp_path, root, [NEW]), rank, root, here), (rank, calls[index], after)
                step = step_in(root)
                assert step in (OLD, NEW), (rank, calls[index], after)
                points += 1
                old += step == OLD
    with capsys.disabled():
        print(f"\n{points} points at {sum(counts.values())} calls ({counts}): {old} old, {points - old} new")
    assert old and points > old
    assert counts["rename"] >= 2 and counts["fsync"] >= 6, "the calls that matter must be among them"
