"""Whoever writes for a run asks whether it still is this command's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from raytune_fsdp.base.errors import TransientError
from raytune_fsdp.base.lease import Lease, TakenOverError
from raytune_fsdp.checkpoint import storage as posix
from raytune_fsdp.checkpoint.catalogue import Keep, committed
from raytune_fsdp.checkpoint.location import storage_at
from raytune_fsdp.checkpoint.objects import ObjectStorage
from raytune_fsdp.checkpoint.saver import open_saver
from raytune_fsdp.checkpoint.state import RunState
from raytune_fsdp.checkpoint.storage import PosixStorage
from raytune_fsdp.checkpoint.writing import write_small
from raytune_fsdp.config import OptimConfig
from raytune_fsdp.launch import worker
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record.jsonl import JsonlTracker, read_events
from raytune_fsdp.record.tracker import RunStart
from raytune_fsdp.run.open_record import open_run
from raytune_fsdp.step.optim.build import build_optimizer
from tests.runs import make_config


@pytest.fixture
def lease(tmp_path: Path) -> Lease:
    (tmp_path / "lock").write_text('{"token": "ours"}')
    return Lease(tmp_path / "lock", "ours")


def take_over(lease: Lease) -> None:
    lease.path.write_text('{"token": "theirs"}')


def test_a_refusal_is_for_good(tmp_path: Path, lease: Lease) -> None:
    record = JsonlTracker(tmp_path, lease)
    record.start(RunStart(name="run", attempt=1))
    record.event("ours")
    take_over(lease)
    with pytest.raises(TakenOverError):
        record.sync()
    for _ in range(2):
        with pytest.raises(TakenOverError, match="another one has taken the run over"):
            record.event("not ours")
    assert [line["event"] for line in read_events(tmp_path / "events.jsonl")] == ["ours"]


def test_a_rank_asks_before_it_opens_the_run(tmp_path: Path, lease: Lease) -> None:
    config = make_config(tmp_path)
    place = RunDir.of(config)
    draft = Path(place.checkpoints) / "step-00000010.a2.1.tmp"
    draft.mkdir(parents=True)
    take_over(lease)
    prepared: Any = SimpleNamespace(place=place, lease=lease)
    nothing: Any = None
    with pytest.raises(TakenOverError):
        open_run(config, prepared, nothing)
    assert draft.is_dir(), "it is the newcomer's"


def test_a_run_that_is_taken_over_while_it_commits_gets_no_checkpoint_from_us(
    tmp_path: Path, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(directory: Path) -> None:
        take_over(lease)

    model = torch.nn.Linear(3, 3)
    worker.join(torch.device("cpu"), alone=True)
    try:
        fully_shard(model)
        optimizer = build_optimizer(model, OptimConfig())
        optimizer.init_state()
        root = str(tmp_path / "checkpoints")
        saver = open_saver(
            root, model, optimizer, attempt=1, keep=Keep(last=2), seconds=30, asynchronous=True, scores={}
        )
        saver.begin(RunState(step=1, attempt=1), before=lease.check)
        first = saver.finish()
        assert first is not None and first.saved is not None, first
        monkeypatch.setattr(posix, "sync_directory", slow)
        saver.begin(RunState(step=2, attempt=1), before=lease.check)
        second = saver.finish()
    finally:
        torch.distributed.destroy_process_group()
    assert second is not None and "another one has taken the run over" in str(second.problem), second
    assert [found.step for found in committed(root)] == [1]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_the_last_look_is_right_before_a_checkpoint_becomes_visible(tmp_path: Path, lease: Lease, scheme: str) -> None:
    storage = storage_at(f"{scheme}{tmp_path}/checkpoints")
    assert isinstance(storage, ObjectStorage if scheme else PosixStorage)
    (tmp_path / "checkpoints" / "step-00000001.a1").mkdir(parents=True)  # which stores of objects do not need
    draft = storage.draft("step-00000001.a1", 1)
    write_small(draft, "a", b"1234")
    take_over(lease)
    with pytest.raises(TakenOverError):
        draft.publish({"a": 4}, "{}", lease.check)
    assert not storage.sizes("step-00000001.a1").get("manifest.json")


@pytest.mark.parametrize(("ours", "status"), [(True, "failed"), (False, "handed_over")])
def test_a_rank_whose_run_was_taken_over_does_not_close_it_in_mlflow(
    lease: Lease, monkeypatch: pytest.MonkeyPatch, ours: bool, status: str
) -> None:
    def train(parts: Any, stop: Any) -> None:
        raise TransientError("its last checkpoint could not be written")  # as the refusal of a commit reads

    monkeypatch.setattr(worker, "train", train)
    said: list[str] = []
    parts: Any = SimpleNamespace(
        saves=SimpleNamespace(leave=lambda: None), tracker=SimpleNamespace(finish=said.append)
    )  # fmt: skip
    if not ours:
        take_over(lease)
    with pytest.raises(TransientError):
        worker._work(parts, lambda: None, lease)
    assert said == [status]
