"""What a program is told of a run while `finetune` trains, from the run's record."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from raytune_fsdp.base.batch import StepMetrics
from raytune_fsdp.checkpoint.on_demand import Requests, StopRequest, forget_stops
from raytune_fsdp.launch import callbacks
from raytune_fsdp.launch.callbacks import (
    Answered,
    AttemptStarted,
    CheckpointCommitted,
    Evaluated,
    Happening,
    StepEnded,
    StopHandle,
    calling_back,
)
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record import names
from raytune_fsdp.record.jsonl import append_event
from raytune_fsdp.record.lines import evaluation_line, step_lines, to_bytes


@pytest.fixture
def place(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path, str(tmp_path / "checkpoints"))


def started(place: RunDir, attempt: int, step: int, ranks: int = 1) -> None:
    """What an attempt does first: it cuts the record to the step from which it goes on."""
    lines = place.metrics.read_bytes().splitlines(keepends=True) if place.metrics.exists() else []
    place.metrics.unlink(missing_ok=True)
    place.metrics.write_bytes(b"".join(lines[:step]))
    append_event(
        place.events, names.ATTEMPT_STARTED, attempt=attempt, fields={"resumed_from": step, "world_size": ranks}
    )


def trained(place: RunDir, attempt: int, *steps: int) -> None:
    metrics = [
        StepMetrics(
            step=step, epoch=step / 10, samples="", tokens=100 * step, target_tokens=90, loss=1 / step, grad_norm=1.0,
            lr=0.1, step_seconds=0.5, data_seconds=0.0, tokens_per_second=200.0, skipped=False, mfu=None,
            memory_bytes=0,
        )
        for step in steps
    ]  # fmt: skip
    with place.metrics.open("ab") as file:
        for line in step_lines(metrics, 1, attempt):
            file.write(to_bytes(line))


def saved(place: RunDir, attempt: int, step: int, **more: object) -> None:
    fields = {"step": step, "seconds": 0.1, "bytes": 5, "path": f"at {step}", **more}
    append_event(place.events, names.SAVED, attempt=attempt, fields=fields)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_function_is_told_of_this_call_alone_and_in_order(place: RunDir) -> None:
    started(place, 1, 0)
    trained(place, 1, 1, 2, 3)
    saved(place, 1, 2)
    place.evaluations.write_bytes(to_bytes(evaluation_line(2, {"eval/a/loss": 2.0}, 1)))
    told: list[Happening] = []
    with calling_back(place, [told.append], None):
        started(place, 2, 2, ranks=3)  # step 3 was not saved: it is trained again
        trained(place, 2, 3, 4)
        with place.metrics.open("ab") as file:
            file.write(to_bytes(evaluation_line(4, {"eval/b/loss": 1.5}, 2)))
        append_event(
            place.events, names.ANSWERED, attempt=2, fields={"step": 4, "prompt": "Who?", "answer": "The miller."}
        )
        saved(place, 2, 4, recovery=True, digest="d" * 64)
        until(lambda: len(told) == 6)
        started(place, 3, 4)
        with place.evaluations.open("ab") as file:
            file.write(to_bytes(evaluation_line(4, {"eval/a/loss": 1.0}, 3)))
        trained(place, 3, 5)
    assert [(type(each), each.attempt, each.step) for each in told] == [
        (AttemptStarted, 2, 2), (StepEnded, 2, 3), (StepEnded, 2, 4), (Evaluated, 2, 4), (Answered, 2, 4),
        (CheckpointCommitted, 2, 4), (AttemptStarted, 3, 4), (Evaluated, 3, 4), (StepEnded, 3, 5),
    ]  # fmt: skip
    assert told[0] == AttemptStarted(attempt=2, step=2, ranks=3)
    assert told[1] == StepEnded(
        attempt=2,
        step=3,
        epoch=0.3,
        loss=1 / 3,
        grad_norm=1.0,
        lr=0.1,
        tokens=300,
        seconds=0.5,
        tokens_per_second=200.0,
    )
    assert told[5] == CheckpointCommitted(
        attempt=2, step=4, path="at 4", seconds=0.1, bytes=5, recovery=True, digest="d" * 64
    )


def test_an_exception_is_said_once_and_other_functions_go_on(place: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    told: list[int] = []

    def fails(happening: Happening) -> None:
        if happening.step == 2:
            sys.exit("enough\nof this")
        raise ValueError("no such\ncolumn")

    with calling_back(place, [fails, lambda each: told.append(each.step)], None):
        started(place, 1, 0)
        trained(place, 1, 1, 2, 3)
    assert told == [0, 1, 2, 3]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("a function in on= raised ValueError: no such") and "\n" not in line
    assert "(test_callbacks.py, line " in line and "training goes on" in line


def test_a_function_that_blocks_keeps_the_caller_for_a_while_only(
    place: RunDir, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks, "_LATE_SECONDS", 0.2)
    over, at_two = threading.Event(), threading.Event()

    def blocks(happening: Happening) -> None:
        if happening.step == 2:
            at_two.set()
            over.wait(60)

    handle = StopHandle()
    with calling_back(place, [blocks], handle):
        started(place, 1, 0)
        trained(place, 1, *range(1, 1000))
        assert at_two.wait(30)
        handle.stop()  # heard all the same
        until(lambda: Requests(place.path).stopping())
    over.set()
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line == (f"after 0.2 s the functions in on= have seen the run up to step 1; the rest is in {place.metrics}")
    assert not Requests(place.path).stopping(), "the request is withdrawn"


def test_without_functions_there_is_no_thread(place: RunDir) -> None:
    before = threading.active_count()
    with calling_back(place, [], None):
        assert threading.active_count() == before


def test_requests_to_stop_that_nobody_waits_for_do_not_stop_the_next_command(tmp_path: Path) -> None:
    left = StopRequest(tmp_path)
    left.ask()
    (tmp_path / "stop.sh").touch()  # a user's
    assert Requests(tmp_path).stopping() and not Requests(tmp_path).waiting()
    forget_stops(tmp_path)
    assert not Requests(tmp_path).stopping()
    left.ask()  # whoever still waits asks again
    assert Requests(tmp_path).stopping()
    left.leave()
    left.leave()
    assert [each.name for each in tmp_path.iterdir()] == ["stop.sh"]
