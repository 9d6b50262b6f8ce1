"""Work on checkpoints beside training: whatever becomes of it, or of the storage, training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from raytune_fsdp.base.errors import RaytuneError, TransientError  # noqa: E402
from raytune_fsdp.base.lease import TakenOverError  # noqa: E402
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint  # noqa: E402
from raytune_fsdp.launch.ray.tasks import after_commit  # noqa: E402
from raytune_fsdp.launch.ray.tasks.after_commit import AfterCommit  # noqa: E402
from raytune_fsdp.plan.run_dir import RunDir  # noqa: E402

ROOT = "checkpoints"


class Work:
    """A chore whose every part may fail."""

    what, minutes, reserves = "evaluation", 1.0, True

    def __init__(self) -> None:
        self.fails: dict[str, BaseException] = {}
        self.room: str | None = None
        self.head = True
        """Whether it answers."""
        self.answers = threading.Event()
        self.answers.set()
        self.begun: list[int] = []
        self.kept: list[int] = []
        self.problems: list[tuple[int, str]] = []

    def _part(self, name: str) -> None:
        self.answers.wait(30)
        if name in self.fails:
            raise self.fails[name]

    def due(self, checkpoint: CommittedCheckpoint, asked: Sequence[CommittedCheckpoint]) -> bool:
        self._part("due")
        return checkpoint.step not in self.kept

    def missing(self, *, during_training: bool) -> str | None:
        assert self.head, "this would wait for the head"
        return self.room

    def begin(self, checkpoint: CommittedCheckpoint) -> Any:
        if "begin" in self.fails:
            raise self.fails["begin"]
        self.begun.append(checkpoint.step)
        return checkpoint.step

    def record(self, checkpoint: CommittedCheckpoint, result: Any) -> None:
        self._part("record")
        self.kept.append(checkpoint.step)

    def done(self, checkpoint: CommittedCheckpoint, result: Any) -> None:
        assert result == f"result of {checkpoint.step}"

    def failed(self, checkpoint: CommittedCheckpoint, problem: str) -> None:
        self.problems.append((checkpoint.step, problem))


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """What tasks return, by step: a value, an exception, or nothing as long as they run."""
    there: dict[int, Any] = {}

    def get(task: int) -> Any:
        if isinstance(there[task], BaseException):
            raise there[task]
        return there[task]

    monkeypatch.setattr(after_commit.ray, "wait", lambda tasks, timeout: ([t for t in tasks if t in there], []))
    monkeypatch.setattr(after_commit.ray, "get", get)
    monkeypatch.setattr(after_commit.ray, "cancel", lambda task, force: None)
    monkeypatch.setattr(after_commit, "committed", lambda root: [at(100), at(200)])
    return there


def at(step: int) -> CommittedCheckpoint:
    return CommittedCheckpoint(step, 1, ROOT)


def recovery(step: int) -> CommittedCheckpoint:
    return CommittedCheckpoint(step, 1, ROOT, lasting=False)


def during_training(work: Work, tmp_path: Path) -> tuple[AfterCommit, list[str]]:
    said: list[str] = []
    return AfterCommit(work, RunDir(tmp_path, ROOT), lambda: work.head, said.append), said


def until(each: AfterCommit, reached: Callable[[], bool]) -> None:
    for _ in range(500):
        before = time.monotonic()
        each.look()
        assert time.monotonic() - before < 5, "the driver waits"
        if reached():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


@pytest.mark.parametrize("part", ["due", "begin", "record"])
@pytest.mark.parametrize("error", [TransientError("no answer"), OSError(5, "Input/output error")])
def test_what_fails_is_a_failed_evaluation_and_no_more(
    tmp_path: Path, results: dict[int, Any], part: str, error: BaseException
) -> None:
    if part == "begin" and isinstance(error, RaytuneError):
        error = ray.exceptions.OutOfDiskError("no room in the object store")
    work = Work()
    work.fails[part] = error
    each, said = during_training(work, tmp_path)
    results[100] = "result of 100"
    each.committed(at(100))
    if part == "due":
        until(each, lambda: each._call is None)
        assert not work.begun
        work.fails.clear()
        each.make_up()  # asked again at the next occasion
    else:
        until(each, lambda: len(work.problems) == 1)
        assert "training goes on" in said[-1]
        work.fails.clear()
        each.committed(at(100))
    until(each, lambda: 100 in work.kept)


def test_a_run_that_was_taken_over_is_not_written_to(tmp_path: Path, results: dict[int, Any]) -> None:
    work = Work()
    work.fails["record"] = TakenOverError("another command works on the run")
    each, _ = during_training(work, tmp_path)
    results[100] = "result of 100"
    each.committed(at(100))
    with pytest.raises(TakenOverError):
        until(each, lambda: False)


def test_storage_that_does_not_answer_keeps_nobody_waiting(tmp_path: Path, results: dict[int, Any]) -> None:
    work = Work()
    work.answers.clear()
    each, _ = during_training(work, tmp_path)
    results[100], results[200] = "result of 100", "result of 200"
    before = time.monotonic()
    each.committed(at(100))
    each.make_up()
    each.look()
    assert time.monotonic() - before < 10 and not work.kept
    work.answers.set()
    until(each, lambda: work.kept == [100, 200])
    assert work.begun == [100, 200], "each once"


def test_what_has_ended_while_the_driver_was_away_is_not_late(tmp_path: Path, results: dict[int, Any]) -> None:
    work = Work()
    each, _ = during_training(work, tmp_path)
    each.committed(at(100))
    until(each, lambda: each._running is not None)
    assert each._running is not None
    task, checkpoint, since = each._running
    each._running = task, checkpoint, since - 2 * 60 * work.minutes
    results[100] = "result of 100"
    until(each, lambda: bool(work.kept or work.problems))
    assert work.kept == [100] and not work.problems


def test_what_fails_again_and_again_is_given_up(tmp_path: Path, results: dict[int, Any]) -> None:
    work = Work()
    each, said = during_training(work, tmp_path)
    results[100], results[200] = ValueError("out of memory"), "result of 200"
    results[100] = OSError("out of memory")
    for _ in range(4):
        each.committed(at(100))
        until(each, lambda: not each._asked() and each._call is None)
    assert [step for step, _ in work.problems] == [100, 100] and work.begun == [100, 100]
    assert each.finish(lambda: False, lambda: None) and work.kept == [200]
    assert not any("step 100" in line for line in said[2:])


def test_the_end_does_not_wait_for_room_that_never_comes_nor_for_a_ray_that_has_gone(
    tmp_path: Path, results: dict[int, Any]
) -> None:
    work = Work()
    work.room, work.minutes = "it needs a node with 4 free CPU(s)", 0.3 / 60
    each, said = during_training(work, tmp_path)
    assert each.finish(lambda: False, lambda: None)
    assert [step for step, _ in work.problems] == [100, 200]
    assert "it needs a node with 4 free CPU(s), and there were not for 0.005 minutes" in said[-1]
    work, work.room = Work(), None
    each, _ = during_training(work, tmp_path)
    assert not each.finish(lambda: False, lambda: "gcs_server" if work.begun else None)
    each, _ = during_training(work, tmp_path)
    assert not each.finish(lambda: bool(work.begun), lambda: None)


def test_nothing_asks_for_room_while_the_head_is_away(tmp_path: Path, results: dict[int, Any]) -> None:
    """The question would wait for it: a stop would not be heard."""
    work = Work()
    work.head = False
    each, _ = during_training(work, tmp_path)
    results |= {100: "result of 100", 200: "result of 200"}
    each.committed(at(100))
    for _ in range(20):
        each.look()
        time.sleep(0.01)
    looks = iter(range(10))
    assert not each.finish(lambda: next(looks) > 5, lambda: None) and not work.begun
    work.head = True
    assert each.finish(lambda: False, lambda: None) and work.kept == [100, 200]


def test_nothing_is_made_of_a_recovery_point(
    tmp_path: Path, results: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither when it is committed nor when it is found: what is measured and exported does not depend on a clock."""
    work = Work()
    each, _ = during_training(work, tmp_path)
    monkeypatch.setattr(after_commit, "committed", lambda root: [recovery(70), at(100), recovery(130), recovery(170)])
    results |= {step: f"result of {step}" for step in (70, 100, 130, 170, 200, 230)}
    each.committed(recovery(70))
    each.make_up()
    until(each, lambda: work.kept == [100])
    for found in (recovery(130), at(200), recovery(230)):
        each.committed(found)
    until(each, lambda: work.kept == [100, 200])
    assert each.finish(lambda: False, lambda: None) and work.begun == [100, 200]
