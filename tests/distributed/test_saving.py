"""Checkpoints beside training: what they cost the run is time, never its trajectory; a save that fails is told."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.record.jsonl import read_events, read_trajectory
from tests.checkpoints import checkpoints, pieces_of
from tests.ranks import run_ranks
from tests.runs import GPT2, LLAMA, make_config, trajectory, write_tokens

TRAIN = {"global_batch": 10, "micro_batch": 2, "max_steps": 24}
DROPOUT = {**GPT2, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


def run_dir(config: Any) -> Path:
    return Path(config.run.storage) / config.run.name


def events(config: Any, *kinds: str) -> list[dict[str, Any]]:
    found = read_events(run_dir(config) / "events.jsonl")
    return [{"event": e["event"], **e["fields"]} for e in found if e["event"] in kinds]


def train(values: dict[str, Any], pause: float, fault: dict[str, Any] | None) -> None:
    """A run whose steps take a while, so that saves end between them; perhaps with a storage that fails."""
    from raytune_fsdp.launch.worker import work
    from tests.runs import prepare_on_rank0

    config = FinetuneConfig.model_validate(values)
    if fault is not None:
        break_storage(**fault)

    steps = iter(range(1, 10**9))

    def stop() -> None:
        time.sleep(pause if pause < 1 or 12 < next(steps) < 19 else 0.1)  # a long one only while a save stalls

    work(config, *prepare_on_rank0(config), torch.device("cpu"), stop)


def break_storage(kind: str, rank: int, serial: int, seconds: float = 0.0) -> None:
    """This rank's file of one save cannot be written."""
    import torch.distributed as dist

    from raytune_fsdp.checkpoint.storage import PosixDraft

    if dist.get_rank() != rank:
        return
    create = PosixDraft.create

    @contextmanager
    def broken(self: PosixDraft, file: str) -> Iterator[Any]:
        with create(self, file) as sink:
            yield Broken(sink) if file == f"__{rank}_{serial}.distcp" else sink

    class Broken:
        def __init__(self, sink: Any) -> None:
            self._sink = sink
            self._written = 0

        def write(self, piece: Any) -> None:
            self._written += len(piece)
            if self._written > 5000:  # some of it is there already
                match kind:
                    case "ENOSPC" | "EIO":
                        raise OSError(getattr(errno, kind), errno.errorcode[getattr(errno, kind)])
                    case "stall":
                        time.sleep(seconds)
                        self._written = -(10**9)
                    case "killed":
                        raise SystemExit
            self._sink.write(piece)

    PosixDraft.create = broken  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The trajectory of the run without a checkpoint before its end."""
    return trajectory(make_config(tmp_path_factory.mktemp("whole"), DROPOUT, train=TRAIN), 2)


@pytest.mark.slow
def test_training_goes_on_while_checkpoints_are_written(tmp_path: Path, whole: Any) -> None:
    config = make_config(tmp_path, DROPOUT, train=TRAIN, checkpoint={"every": 6, "keep_last": None})
    run_ranks(train, 2, config.model_dump(), 0.1, None)
    assert read_trajectory(run_dir(config) / "metrics.jsonl") == whole
    assert [found.step for found in checkpoints(run_dir(config))] == [6, 12, 18, 24]
    assert [each["step"] for each in events(config, "saved")] == [6, 12, 18, 24]
    # Any of them is the run as it was then: continuing from it is continuing the run.
    for found in checkpoints(run_dir(config))[1:]:
        Path(found.path).rename(tmp_path / found.name)
    assert trajectory(config, 2) == whole


def test_a_save_that_is_due_too_early_waits_for_the_one_before(tmp_path: Path, whole: Any) -> None:
    config = make_config(tmp_path, DROPOUT, train=TRAIN, checkpoint={"every": 2, "keep_last": None})
    run_ranks(train, 2, config.model_dump(), 0.02, {"kind": "stall", "rank": 1, "serial": 2, "seconds": 1.0})
    assert read_trajectory(run_dir(config) / "metrics.jsonl") == whole
    steps = [found.step for found in checkpoints(run_dir(config))]
    assert steps[0] == 2 and steps[-1] == 24
    postponed = [each["step"] for each in events(config, "save_postponed")]
    assert postponed and not set(postponed) & set(steps)
    assert not events(config, "save_failed")


def test_the_best_are_of_the_steps_that_were_scored_where_storage_is_slow(tmp_path: Path) -> None:
    rows = write_tokens(tmp_path / "others.jsonl", rows=12, seed=4)
    config = make_config(
        tmp_path, train={**TRAIN, "max_steps": 8}, eval={"every": 2},
        data={"eval": [{"path": str(rows), "format": {"type": "tokens"}}]},
        checkpoint={"every": 2, "keep_last": None, "keep_best": 1},
    )  # fmt: skip
    run_ranks(train, 2, config.model_dump(), 0.02, {"kind": "stall", "rank": 1, "serial": 1, "seconds": 1.0})
    assert [found.step for found in checkpoints(run_dir(config))] == [2, 4, 6, 8]
    assert not events(config, "save_postponed", "save_failed")


def change_while_writing(root: str, given_up: bool) -> list[tuple[int, bool]]:
    """Save while a writer is held back and the numbers change; then save again. Is what was saved right, by step?"""
    import torch.distributed as dist

    from raytune_fsdp.checkpoint.catalogue import Keep, committed
    from raytune_fsdp.checkpoint.save_in_flight import ENDINGS
    from raytune_fsdp.checkpoint.saver import open_saver
    from raytune_fsdp.checkpoint.state import RunState
    from raytune_fsdp.checkpoint.storage import PosixDraft
    from raytune_fsdp.config import OptimConfig
    from raytune_fsdp.model.pieces.pieces import local_piece
    from raytune_fsdp.step.optim.build import build_optimizer
    from tests.checkpoints import tensors_in
    from tests.loading import draw

    model = draw(LLAMA, 5)
    saver = open_saver(
        root, model, build_optimizer(model, OptimConfig(lr=1e-3)), attempt=1, keep=Keep(last=None),
        seconds=0.3 if given_up else 60, asynchronous=True, scores={},
    )  # fmt: skip
    go, create = threading.Event(), PosixDraft.create

    @contextmanager
    def held_back(self: PosixDraft, file: str) -> Iterator[Any]:
        if dist.get_rank() == 1 and file == "__1_1.distcp":
            go.wait(30)
        with create(self, file) as sink:
            yield sink

    PosixDraft.create = held_back  # type: ignore[method-assign]

    def fill(value: float) -> None:
        with torch.no_grad():
            for tensor in saver.tensors().values():
                local_piece(tensor).fill_(value)

    def ended() -> int:
        """What all know after a step, and whether a rank may not save."""
        ending, busy = saver.status()
        flags = torch.tensor([0 if ending is None else 1 + ENDINGS.index(ending), int(busy)])
        dist.all_reduce(flags)
        if flags[0]:
            saver.report(ENDINGS[int(flags[0]) - 1])
        return int(flags[1])

    fill(1.0)
    saver.begin(RunState(step=1, attempt=1), before=lambda: None)
    for value in range(100, 110):  # training goes on
        fill(float(value))
        time.sleep(0.06)
        assert ended(), "no save may begin while rank 1 reads its copy"
    go.set()
    while ended():
        time.sleep(0.01)
    saver.seconds = 60
    fill(2.0)
    saver.begin(RunState(step=2, attempt=1), before=lambda: None)
    fill(300.0)
    outcome = saver.finish()
    assert outcome is not None and outcome.saved is not None, outcome
    right = []
    for found in committed(root):
        right.append((found.step, all((t == found.step).all() for t in tensors_in(found).values())))
    return right


@pytest.mark.parametrize("given_up", [False, True])
def test_what_is_saved_is_the_state_behind_its_step(tmp_path: Path, given_up: bool) -> None:
    """However long a writer takes, and also if it was given up, while training goes on."""
    expected = [(2, True)] if given_up else [(1, True), (2, True)]
    assert run_ranks(change_while_writing, 2, str(tmp_path / "checkpoints"), given_up) == [expected] * 2
    assert len(list((tmp_path / "checkpoints").iterdir())) == len(expected)


def test_a_run_whose_checkpoints_are_gone_does_not_start_anew(tmp_path: Path, whole: Any) -> None:
    """Its storage may only not be mounted."""
    config = make_config(tmp_path, DROPOUT, train=TRAIN, checkpoint={"storage": str(tmp_path / "elsewhere")})
    assert trajectory(config, 2, stop_after=5)[-1]["step"] == 5
    before = (run_dir(config) / "metrics.jsonl").read_bytes()
    (tmp_path / "elsewhere").rename(tmp_path / "away")
    with pytest.raises(AssertionError, match="has no checkpoint, but this run has saved step 5 as"):
        trajectory(config, 2)
    assert (run_dir(config) / "metrics.jsonl").read_bytes() == before
    (tmp_path / "away").rename(tmp_path / "elsewhere")
    assert trajectory(config, 2) == whole


def test_an_export_finds_checkpoints_that_are_elsewhere(tmp_path: Path) -> None:
    from raytune_fsdp.cli.checkpoint import main as look
    from raytune_fsdp.cli.export import main as export

    config = make_config(tmp_path, GPT2, train={**TRAIN, "max_steps": 2}, checkpoint={"storage": str(tmp_path / "ck")})
    trajectory(config, 1)
    for number, source in enumerate((run_dir(config), tmp_path / "ck" / "run" / "checkpoints" / "step-00000002.a1")):
        assert export([str(source), str(tmp_path / f"export-{number}")]) == 0
        assert (tmp_path / f"export-{number}" / "config.json").is_file()
    assert look(["verify", str(run_dir(config))]) == 0
    pieces_of(committed_at(tmp_path / "ck" / "run" / "checkpoints"))[0].write_bytes(b"")
    assert look(["verify", str(run_dir(config))]) == 2


def committed_at(root: Path) -> Any:
    from raytune_fsdp.checkpoint.catalogue import committed

    return committed(str(root))[-1]


SLOW = pytest.mark.slow
LATE = "checkpoint.timeout_minutes"


@pytest.mark.parametrize(
    ("rank", "kind", "told", "pause", "seconds"),
    [
        pytest.param(0, "ENOSPC", "ENOSPC", 0.1, 0, marks=SLOW),
        (1, "ENOSPC", "ENOSPC", 0.1, 0),
        pytest.param(0, "EIO", "EIO", 0.1, 0, marks=SLOW),
        pytest.param(1, "EIO", "EIO", 0.1, 0, marks=SLOW),
        pytest.param(0, "killed", "its writer", 0.1, 0, marks=SLOW),
        pytest.param(1, "killed", "its writer", 0.1, 0, marks=SLOW),
        pytest.param(0, "stall", LATE, 1.5, 5, marks=SLOW),
        pytest.param(1, "stall", LATE, 1.5, 5, marks=SLOW),
        pytest.param(0, "stall", LATE, 11, 60, marks=SLOW),
        pytest.param(1, "stall", LATE, 11, 60, marks=SLOW),
    ],
)
def test_a_save_that_fails_is_told_and_the_next_one_is_good(
    tmp_path: Path, whole: Any, rank: int, kind: str, told: str, pause: float, seconds: float
) -> None:
    """Nothing is committed for it, training goes on bit by bit, and what was written of it is gone."""
    config = make_config(
        tmp_path, DROPOUT, train=TRAIN,
        checkpoint={"every": 6, "keep_last": None, "timeout_minutes": 3 / 60 if kind == "stall" else 1},
    )  # fmt: skip
    fault = {"kind": kind, "rank": rank, "serial": 2, "seconds": seconds}
    run_ranks(train, 2, config.model_dump(), pause, fault, seconds=400)
    assert read_trajectory(run_dir(config) / "metrics.jsonl") == whole
    assert [found.step for found in checkpoints(run_dir(config))] == [6, 18, 24]
    told_of = events(config, "saved", "save_failed")
    assert [(each["event"], each["step"]) for each in told_of] == [
        ("saved", 6), ("save_failed", 12), ("saved", 18), ("saved", 24),
    ]  # fmt: skip
    assert told in told_of[1]["problem"]
    assert f"rank {rank}" in told_of[1]["problem"]
    assert sorted(p.name for p in (run_dir(config) / "checkpoints").iterdir()) == [
        "step-00000006.a1", "step-00000018.a1", "step-00000024.a1",
    ]  # fmt: skip
    assert trajectory(config, 2) == whole


@pytest.mark.parametrize(
    ("rank", "kind", "told", "pause", "seconds"),
    [
        (3, "killed", "its writer", 0.1, 0),
        (1, "ENOSPC", "ENOSPC", 0.1, 0),
        (2, "stall", LATE, 1.5, 5),
        (3, "stall", LATE, 11, 60),
    ],
)
@SLOW
def test_a_save_for_which_hashes_are_missing_fails_and_the_next_one_has_all(
    tmp_path: Path, rank: int, kind: str, told: str, pause: float, seconds: float
) -> None:
    """On four ranks, of which 2 passes on what 3 has hashed."""
    exact = {"exact": True, "threads": 1}
    minutes = 3 / 60 if kind == "stall" else 1
    config, alone = (
        make_config(
            tmp_path, DROPOUT, train=TRAIN, run={**exact, "name": name},
            checkpoint={"every": 6, "keep_last": None, "timeout_minutes": minutes},
        )
        for name in ("four", "alone")
    )  # fmt: skip
    fault = {"kind": kind, "rank": rank, "serial": 2, "seconds": seconds}
    run_ranks(train, 4, config.model_dump(), pause, fault, seconds=400)
    trajectory(alone, 1)
    told_of = events(config, "saved", "save_failed")
    assert [(each["event"], each["step"]) for each in told_of] == [
        ("saved", 6), ("save_failed", 12), ("saved", 18), ("saved", 24),
    ]  # fmt: skip
    assert told in told_of[1]["problem"] and f"rank {rank}" in told_of[1]["problem"]
    digests = {each["step"]: each["everything"] for each in events(alone, "saved")}
    assert all(each["everything"] == digests[each["step"]] for each in told_of if each["event"] == "saved")


def save_again_and_again(root: str, times: int) -> list[dict[str, int]]:
    """What this rank holds after every tenth part of so many saves."""
    import psutil

    from raytune_fsdp.checkpoint.catalogue import Keep
    from raytune_fsdp.checkpoint.saver import open_saver
    from raytune_fsdp.checkpoint.state import RunState
    from raytune_fsdp.config import OptimConfig
    from raytune_fsdp.step.optim.build import build_optimizer
    from tests.loading import draw

    model = draw(LLAMA, 5)
    saver = open_saver(
        root, model, build_optimizer(model, OptimConfig(lr=1e-3)), attempt=1, keep=Keep(last=3), seconds=60,
        asynchronous=True, scores={},
    )  # fmt: skip
    this, seen = psutil.Process(), []
    for step in range(1, times + 1):
        saver.begin(RunState(step=step, attempt=1), before=lambda: None)
        outcome = saver.finish()
        assert outcome is not None and outcome.saved is not None, outcome
        if step % (times // 10) == 0:
            on_disk = sum(path.stat().st_size for path in Path(root).rglob("*"))
            seen.append(
                {
                    "memory": this.memory_info().rss, "handles": this.num_fds(), "threads": this.num_threads(),
                    "disk": on_disk, "checkpoints": len(list(Path(root).iterdir())),
                }
            )  # fmt: skip
    return seen


@pytest.mark.slow
def test_thousands_of_saves_leave_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_ranks(save_again_and_again, 2, str(tmp_path / "checkpoints"), 3000, seconds=550)
    with capsys.disabled():
        print(f"\nrank 0 after 300 saves: {found[0][0]}\nrank 0 after 3000 saves: {found[0][-1]}")
    for seen in found:
        # Of 4,000 saves the first 2,000 added 4.0 MB, in leaps of the allocator, and the others 0.3.
        early, late = seen[5], seen[-1]
        assert late["handles"] <= early["handles"] and late["threads"] <= early["threads"]
        assert late["memory"] - early["memory"] < 2 << 20, "2 kB a save"
    for each in found[0]:
        assert each["checkpoints"] <= 4 and each["disk"] < 1.5 * found[0][0]["disk"]


def test_the_last_save_must_succeed(tmp_path: Path) -> None:
    config = make_config(tmp_path, GPT2, train={**TRAIN, "max_steps": 3})
    with pytest.raises(AssertionError, match=r"TransientError: the checkpoint of step 3 could not be written: rank 1"):
        run_ranks(train, 2, config.model_dump(), 0.0, {"kind": "ENOSPC", "rank": 1, "serial": 1})
    assert not checkpoints(run_dir(config))
    assert trajectory(config, 2)[-1]["step"] == 3


@pytest.mark.slow
def test_a_checkpoint_on_demand(tmp_path: Path, whole: Any) -> None:
    from raytune_fsdp.cli.checkpoint import main

    config = make_config(tmp_path, DROPOUT, train=TRAIN)
    failed: list[BaseException] = []

    def background() -> None:
        try:
            run_ranks(train, 2, config.model_dump(), 0.2, None)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=background)
    thread.start()
    metrics = run_dir(config) / "metrics.jsonl"
    while thread.is_alive() and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    assert main(["now", str(run_dir(config)), "--wait", "30"]) == 0
    at = checkpoints(run_dir(config))[0].step
    assert 0 < at < 24
    thread.join()
    assert not failed
    assert read_trajectory(metrics) == whole
    assert not list(run_dir(config).glob("checkpoint-now*"))
    assert main(["now", str(run_dir(config)), "--wait", "1.5"]) == 1, "nobody is training any more"
    assert not list(run_dir(config).glob("checkpoint-now*"))


def test_the_best_are_kept(tmp_path: Path) -> None:
    data = {
        **make_config(tmp_path).model_dump()["data"],
        "eval": [{"path": str(tmp_path / "tokens.jsonl"), "format": {"type": "tokens"}}],
    }
    config = make_config(
        tmp_path, GPT2, data=data, eval={"every": 2}, train={**TRAIN, "max_steps": 14},
        checkpoint={"every": 2, "keep_last": 2, "keep_best": 1, "keep_every": 8, "best_is": "highest",
                    "asynchronous": False},
    )  # fmt: skip
    trajectory(config, 1, stop_after=9)
    assert [found.step for found in checkpoints(run_dir(config))] == [2, 8, 9], "the loss only falls: 2 is highest"
    trajectory(config, 1)
    assert [found.step for found in checkpoints(run_dir(config))] == [2, 8, 12, 14], "also after a new start"
