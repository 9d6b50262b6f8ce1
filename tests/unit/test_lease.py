"""Whoever writes for a run asks whether it still is this command's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytune_fsdp.errors import TransientError
from raytune_fsdp.launch import worker
from raytune_fsdp.lease import Lease, TakenOverError
from raytune_fsdp.run.record import open_run
from raytune_fsdp.rundir import RunDir
from raytune_fsdp.tracking import RunStart
from raytune_fsdp.tracking.jsonl import JsonlTracker, read_events
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
