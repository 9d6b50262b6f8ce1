"""What the driver makes of what ranks report. No Ray is started."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import RayActorError

from raytune_fsdp.errors import Interrupted, TrainingError
from raytune_fsdp.launch.phases import Phases
from raytune_fsdp.launch.ray import follow
from raytune_fsdp.launch.ray.board import Committed, Joined, Lost, Notice
from raytune_fsdp.launch.ray.follow import Follow
from raytune_fsdp.launch.ray.resources import Request
from raytune_fsdp.launch.signals import Signals
from raytune_fsdp.rundir import RunDir
from raytune_fsdp.tracking.jsonl import read_events
from tests.runs import make_config

ASKED = Request(workers=1, per_worker={"CPU": 1.0}, accelerator_type=None, placement="pack", device="cpu")


class Silent:
    """In the place of what asks Ray."""

    def __init__(self, *_: object, **__: object) -> None:
        self.read_raises: BaseException | None = None
        self.notices: list[Notice] = []

    def read(self, seconds: float) -> list[Notice]:
        if self.read_raises is not None:
            raise self.read_raises
        found, self.notices = self.notices, []
        return found

    def look(self) -> tuple[str | None, int]:
        return "CREATED", 0

    def stop(self, reason: object) -> None:
        pass


def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Follow, RunDir, Silent, list[str]]:
    for name in ("Groups", "Exports"):
        monkeypatch.setattr(follow, name, Silent)
    sections = options.pop("sections", {})
    config = make_config(tmp_path, cluster={"launch": "ray", "max_failures": 5}, **sections)
    place = RunDir.of(config)
    place.path.mkdir(parents=True)
    board, said = Silent(), list[str]()
    known = Follow(
        config, place, ASKED, board=board, token=None, step=0, lost=options.pop("lost", lambda: None),  # type: ignore[arg-type]
        signals=options.pop("signals", Signals()), phases=Phases(), say=said.append,
    )  # fmt: skip
    return known, place, board, said


def test_attempts_that_are_lost_before_a_rank_has_joined_are_recorded_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, place, board, said = begin(tmp_path, monkeypatch)
    board.notices = [Joined(0, "here", "1", 7), *(Lost(0, f"cause {number}", again=True) for number in range(3))]
    done: Future[None] = Future()
    done.set_result(None)
    known.until(done)
    causes = [line["fields"]["cause"] for line in read_events(place.events) if line["event"] == "attempt_failed"]
    assert causes == ["cause 0", "cause 1", "cause 2"]
    assert known.failures == 3 and len(said) == 3
    assert all(line.endswith("; the run goes on from there") for line in said)


def test_a_process_of_our_own_ray_that_is_gone_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, place, board, _ = begin(tmp_path, monkeypatch, lost=lambda: "raylet")
    board.read_raises = RayActorError(error_msg="The actor is unavailable")
    with pytest.raises(TrainingError) as ended:
        known.until(Future())
    assert str(ended.value) == (
        "the run failed: Ray's raylet process on this machine died (killed, out of memory, or crashed). No step was "
        "committed yet; the same command continues"
    )
    (failed,) = [line["fields"] for line in read_events(place.events)]
    assert failed["cause"].startswith("Ray's raylet process on this machine died")
    known.end()  # asks nobody: Ray would not answer


def test_a_message_does_not_wait_for_storage_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, _, board, _ = begin(tmp_path, monkeypatch)
    monkeypatch.setattr(follow, "_STORAGE_SECONDS", 0.05)
    monkeypatch.setattr(follow, "committed", lambda root: time.sleep(3))
    monkeypatch.setattr(known.exports, "committed", lambda checkpoint: None, raising=False)
    board.notices = [Committed(40)]
    done: Future[None] = Future()
    done.set_result(None)
    known.until(done)
    started = time.monotonic()
    assert "The last committed step is 40; the same command continues" in known.describe(None, "it failed")
    assert time.monotonic() - started < 1
    monkeypatch.setattr(follow, "committed", lambda root: (_ for _ in ()).throw(OSError("no route to host")))
    assert "The last committed step is 40" in known.describe(None, "it failed")


def test_a_stop_before_the_first_step_ends_within_ten_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signals = Signals()
    known, _, _, said = begin(tmp_path, monkeypatch, signals=signals)
    signals.count = 1
    clock = iter(range(100))
    monkeypatch.setattr(follow.time, "monotonic", lambda: float(next(clock)))
    with pytest.raises(Interrupted, match="the same command continues"):
        known.until(Future())
    assert next(clock) < 15, "the clock is read more than once a second"
    assert said[0].startswith("stopping: no step is being trained")
