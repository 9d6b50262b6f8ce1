"""When a run that does not get on is given up, and which rank is named. No Ray is started."""

from __future__ import annotations

import pytest

pytest.importorskip("ray")

from raytune_fsdp.launch.ray.board import Beat
from raytune_fsdp.launch.ray.watch import listening
from raytune_fsdp.launch.ray.watch.hangs import Hang, culprit, what_all_do
from raytune_fsdp.launch.ray.watch.listening import Listening
from tests.clock import Clock


class AtOnce(Listening):
    """A driver that is never away: a test sets its clock."""


@pytest.fixture
def clock() -> AtOnce:
    return AtOnce()


def test_the_clock_stands_still_while_the_driver_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Clock()
    monkeypatch.setattr(listening, "time", real)
    known = Listening()
    for _ in range(20):
        real.now += 0.5
        assert known.look() == 0
    assert known.now == 10.0 and not known.drains() and not known.was_away_at(0.0)
    real.now += 401.0
    assert known.look() == 401.0 == known.away
    assert known.now == 12.0 and known.drains(), "what is on the board is heard before anybody is judged"
    for _ in range(6):
        real.now += 0.5
        known.look()
    assert known.now == 15.0 and not known.drains()
    assert known.was_away_at(9.0) and known.was_away_at(14.5) and not known.was_away_at(15.5)
    real.now += 4.0
    assert known.look() == 0 and known.now == 17.0, "a machine that is only busy"


@pytest.mark.parametrize("first", [1, 1001])
def test_nothing_is_too_long_before_the_second_step(clock: AtOnce, first: int) -> None:
    """Of an attempt, wherever it begins: until then another limit holds (`Starting`)."""
    known = Hang(0.1, clock)
    clock.now = 1e6
    assert known.overdue() is None
    known.heard(Beat(step=0, beats=1, patience_seconds=0.0))
    clock.now = 2e6
    assert known.overdue() is None
    known.heard(Beat(step=first, beats=4, patience_seconds=0.0))
    clock.now = 3e6
    assert known.overdue() is None
    known.heard(Beat(step=first + 1, beats=8, patience_seconds=0.0))
    clock.now += 7
    assert known.overdue() == 7


def test_the_limit_is_what_was_asked_for_and_what_a_save_may_take(clock: AtOnce) -> None:
    known = Hang(0.5, clock)
    known.heard(Beat(step=1, beats=3, patience_seconds=0.0))
    known.heard(Beat(step=2, beats=4, patience_seconds=0.0))
    clock.now = 29.0
    known.heard(Beat(step=2, beats=5, patience_seconds=0.0))
    clock.now = 58.0
    known.heard(Beat(step=2, beats=5, patience_seconds=0.0))
    assert known.overdue() is None, "29 s since the last block"
    clock.now = 60.0
    assert known.overdue() == 31.0
    known.heard(Beat(step=2, beats=5, patience_seconds=600.0))
    assert known.overdue() is None


@pytest.mark.parametrize(("seconds", "limit"), [(1.0, 300.0), (60.0, 1200.0)])
def test_the_limit_follows_from_the_steps(clock: AtOnce, seconds: float, limit: float) -> None:
    """An evaluation between two steps is no step of its own length."""
    known = Hang(None, clock)
    for step in range(1, 12):
        known.heard(Beat(step=step, beats=step, patience_seconds=0.0, at=clock.now))
        clock.now += 50 * seconds if step == 5 else seconds
    known.heard(Beat(step=12, beats=12, patience_seconds=0.0, at=clock.now))
    clock.now += limit - 1
    assert known.overdue() is None
    clock.now += 2
    assert known.overdue() == limit + 1


def test_steps_that_are_heard_of_late_took_what_they_took(clock: AtOnce) -> None:
    """Of a minute each, all heard within two seconds: the limit is 20 of them, and not the least there is."""
    known = Hang(None, clock)
    for step in range(1, 12):
        known.heard(Beat(step=step, beats=step, patience_seconds=0.0, at=60.0 * step))
        clock.now += 0.1
    clock.now += 1190.0
    assert known.overdue() is None
    clock.now += 11.0
    assert known.overdue() is not None


TRAINING = """Thread 0x1 (most recent call first):
  File "threading.py", line 1 in wait

Thread 0x2 (most recent call first):
{frames}
  File "/x/raytune_fsdp/step/train_step.py", line 60 in train_step
  File "/x/raytune_fsdp/launch/ray/rank.py", line 99 in train_rank

Current thread 0x3 (most recent call first):
  File "/x/worker.py", line 3 in main_loop
"""
WAITING = TRAINING.format(frames='  File "/torch/distributed/distributed_c10d.py", line 7 in all_gather')
FOR_DEVICE = TRAINING.format(frames='  File "/torch/cuda/streams.py", line 7 in synchronize')
BACKWARD = TRAINING.format(frames='  File "/torch/autograd/graph.py", line 869 in _engine_run_backward')
READING = TRAINING.format(frames='  File "/x/raytune_fsdp/data/cache.py", line 8 in read')
STOPPED = "py-spy is not installed on this node\nState:\tT (stopped)\nwaits in: do_signal_stop\n"


@pytest.mark.parametrize(
    ("stacks", "expected"),
    [
        ({0: WAITING, 1: STOPPED}, (1, "its process takes no signals (T (stopped))")),
        ({0: WAITING, 1: WAITING, 2: READING}, (2, 'it is at File "/x/raytune_fsdp/data/cache.py", line 8 in read')),
        ({0: WAITING, 1: FOR_DEVICE}, None),
        ({0: WAITING, 1: BACKWARD}, (1, 'it is at File "/torch/autograd/graph.py", line 869 in _engine_run_backward')),
        ({0: READING, 1: READING}, None),
        ({0: READING}, (0, 'it is at File "/x/raytune_fsdp/data/cache.py", line 8 in read')),
        ({}, None),
    ],
)
def test_who_is_waited_for(stacks: dict[int, str], expected: tuple[int, str] | None) -> None:
    assert culprit(stacks) == expected


def test_a_rank_on_a_gpu_that_waits_for_its_backward_is_not_known_to_be_busy() -> None:
    assert culprit({0: WAITING, 1: BACKWARD}, on_gpus=True) is None
    assert culprit({0: WAITING, 1: BACKWARD, 2: READING}, on_gpus=True) == culprit({0: WAITING, 2: READING})


@pytest.mark.parametrize(
    ("stacks", "words"),
    [
        ({0: WAITING, 1: WAITING}, "the ranks wait for each other"),
        (
            {0: READING, 1: WAITING, 2: READING},
            '2 of 3 ranks do not wait for others; rank 0 is at File "/x/raytune_fsdp/data/cache.py", line 8 in read',
        ),
        ({}, "no stack of a rank could be had"),
        ({0: "", 1: "Thread 0x1\n"}, "no stack of a rank could be had"),
    ],
)
def test_where_none_stands_out(stacks: dict[int, str], words: str) -> None:
    assert culprit(stacks) is None
    assert what_all_do(stacks) == words
