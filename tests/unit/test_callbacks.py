"""What a program is told of a run while `finetune` trains, from the run's record."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

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
from raytune_fsdp.record.lines import evaluation_line, to_bytes
from tests.recorded import Recorded


@pytest.fixture
def run(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_function_is_told_of_this_call_alone_and_in_order(run: Recorded) -> None:
    run.attempt()
    run.train(3)
    run.save()
    run.place.evaluations.write_bytes(to_bytes(evaluation_line(2, {"eval/a/loss": 2.0}, 1)))
    told: list[Happening] = []
    with calling_back(run.place, [told.append], None):
        run.attempt(resumed_from=2)  # step 3 was not saved: it is trained again
        run.train(2)
        run.evaluate(b=1.5)
        run.tracker.event("answered", step=4, prompt="Who?", answer="The miller.")
        run.tracker.event("saved", step=4, seconds=0.5, bytes=7, path="at 4", recovery=True, digest="d" * 64)
        until(lambda: len(told) == 6)
        run.end("failed")
        run.attempt(resumed_from=4)
        with run.place.evaluations.open("ab") as file:
            file.write(to_bytes(evaluation_line(4, {"eval/a/loss": 1.0}, 3)))
        run.train(1)
    assert [(type(each), each.attempt, each.step) for each in told] == [
        (AttemptStarted, 2, 2), (StepEnded, 2, 3), (StepEnded, 2, 4), (Evaluated, 2, 4), (Answered, 2, 4),
        (CheckpointCommitted, 2, 4), (AttemptStarted, 3, 4), (Evaluated, 3, 4), (StepEnded, 3, 5),
    ]  # fmt: skip
    assert told[0] == AttemptStarted(attempt=2, step=2, ranks=4)
    assert told[2] == StepEnded(
        attempt=2, step=4, epoch=0.1, loss=2.5, grad_norm=1.25, lr=1e-4, tokens=4096, seconds=2.0,
        tokens_per_second=12345.0,
    )  # fmt: skip
    assert told[5] == CheckpointCommitted(
        attempt=2, step=4, path="at 4", seconds=0.5, bytes=7, recovery=True, digest="d" * 64
    )


def test_an_exception_is_said_once_and_other_functions_go_on(run: Recorded, caplog: pytest.LogCaptureFixture) -> None:
    told: list[int] = []

    def fails(happening: Happening) -> None:
        if happening.step == 2:
            sys.exit("enough\nof this")
        raise ValueError("no such\ncolumn")

    with calling_back(run.place, [fails, lambda each: told.append(each.step)], None):
        run.attempt()
        run.train(3)
    assert told == [0, 1, 2, 3]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("a function in on= raised ValueError: no such") and "\n" not in line
    assert "(test_callbacks.py, line " in line and "training goes on" in line


def test_a_function_that_blocks_keeps_the_caller_for_a_while_only(
    run: Recorded, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks, "_LATE_SECONDS", 0.2)
    over, at_two = threading.Event(), threading.Event()

    def blocks(happening: Happening) -> None:
        if happening.step == 2:
            at_two.set()
            over.wait(60)

    handle = StopHandle()
    with calling_back(run.place, [blocks], handle):
        run.attempt()
        run.train(90)
        assert at_two.wait(30)
        handle.stop()  # heard all the same
        until(lambda: Requests(run.path).stopping())
    over.set()
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    rest = f"the rest is in {run.place.metrics}"
    assert line == f"after 0.2 s the functions in on= have seen the run up to step 1; {rest}"
    assert not Requests(run.path).stopping(), "the request is withdrawn"


def test_without_functions_there_is_no_thread(run: Recorded) -> None:
    before = threading.active_count()
    with calling_back(run.place, [], None):
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
