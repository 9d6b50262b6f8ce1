"""What a program is told of a run while `finetune` trains, from the run's record."""

from __future__ import annotations

import errno
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp import finetune
from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.checkpoint.on_demand import Requests, StopRequest, forget_stops, is_asked_to_stop
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
from raytune_fsdp.record.tail import RecordFollower
from tests.recorded import Recorded


async def later(_: Happening) -> None: ...


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
    over, at_two, seen = threading.Event(), threading.Event(), list[int]()

    def blocks(happening: Happening) -> None:
        seen.append(happening.step)
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
    until(lambda: not [each for each in threading.enumerate() if each.name == "on"])
    assert seen == [0, 1, 2], "nothing is called any more"
    assert not handle.asked.is_set(), "it may be given to the next call"
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    rest = f"the rest is in {run.place.metrics}"
    assert line == f"after 0.2 s the functions in on= have seen the run up to step 1; {rest}"
    assert not Requests(run.path).stopping(), "the request is withdrawn"


def test_without_functions_there_is_no_thread(run: Recorded) -> None:
    before = threading.active_count()
    with calling_back(run.place, [], None):
        assert threading.active_count() == before


def test_a_slow_function_sees_what_several_attempts_have_trained(
    run: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And much at once comes in order, in parts."""
    monkeypatch.setattr(callbacks, "_AT_ONCE", 7)
    told: list[Happening] = []
    at_one, over = threading.Event(), threading.Event()

    def slow(happening: Happening) -> None:
        told.append(happening)
        if happening.step == 1 and not over.is_set():
            at_one.set()
            assert over.wait(60)

    with calling_back(run.place, [slow], None):
        run.attempt()
        run.train(2)
        assert at_one.wait(30)
        run.train(48)
        run.save()
        run.train(5)
        run.end("failed")
        run.attempt(resumed_from=50)
        run.train(10)
        over.set()
    steps = [(each.attempt, each.step) for each in told if isinstance(each, StepEnded)]
    assert steps == [*((1, step) for step in range(1, 51)), *((2, step) for step in range(51, 61))]
    kinds = [type(each) for each in told]
    assert kinds.index(CheckpointCommitted) == kinds.index(StepEnded) + 50 and kinds.count(AttemptStarted) == 2


def test_a_file_that_cannot_be_read_loses_nothing_of_the_others(run: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Happening] = []
    fails, real = threading.Event(), RecordFollower.lines

    def lines(self: RecordFollower) -> Iterator[Any]:
        if fails.is_set() and threading.current_thread().name == "on":
            fails.clear()
            raise OSError(errno.ESTALE, "stale")
        return real(self)

    monkeypatch.setattr(RecordFollower, "lines", lines)
    with calling_back(run.place, [told.append], None):
        fails.set()
        run.attempt()
        run.train(3)
    assert [each.step for each in told] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("on", "stop", "said"),
    [
        ("print", None, r"finetune\(on=...\): has 'p', no function"),
        (7, None, r"finetune\(on=...\): has 7, no function"),
        ([None], None, "has None, no function; give a function of one argument, or a list of them"),
        (later, None, "has an async function, which nothing would await"),
        (None, threading.Event(), r"finetune\(stop=.*\): must be a StopHandle"),
    ],
)
def test_what_are_no_functions_and_no_handle_is_refused(on: Any, stop: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        finetune({}, on=on, stop=stop)


def test_a_function_cannot_begin_another_run(run: Recorded, caplog: pytest.LogCaptureFixture) -> None:
    with calling_back(run.place, [lambda _: finetune({})], None):
        run.attempt()
    assert "a function in on= raised finetune was called by a function in on=, while a run trains" in caplog.text


def test_a_request_means_one_command_and_is_removed_by_the_next(tmp_path: Path) -> None:
    left = StopRequest(tmp_path, "theirs")
    left.ask()
    (tmp_path / "stop.sh").touch()  # a user's
    (tmp_path / "stop.x.asked").mkdir()
    assert Requests(tmp_path, "theirs").stopping() and not Requests(tmp_path, "theirs").waiting()
    assert not Requests(tmp_path, "other").stopping() and not Requests(tmp_path).stopping()
    left.ask()
    left.leave()
    left.leave()
    assert not is_asked_to_stop(tmp_path, "theirs")
    (tmp_path / "stop.x.asked").rmdir()
    left.ask()
    forget_stops(tmp_path)
    forget_stops(tmp_path / "nowhere")
    assert [each.name for each in tmp_path.iterdir()] == ["stop.sh"]
