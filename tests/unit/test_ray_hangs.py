"""When a run that does not get on is given up, and which rank is named. No Ray is started."""

from __future__ import annotations

import pytest

pytest.importorskip("ray")

from raytune_fsdp.launch.ray import hangs
from raytune_fsdp.launch.ray.board import Beat
from raytune_fsdp.launch.ray.hangs import Hang, culprit, what_all_do
from tests.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(hangs, "time", found)
    return found


@pytest.mark.parametrize("first", [1, 1001])
def test_nothing_is_too_long_before_the_second_step(clock: Clock, first: int) -> None:
    """Of an attempt, wherever it begins."""
    known = Hang(0.1)
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


def test_the_limit_is_what_was_asked_for_and_what_a_save_may_take(clock: Clock) -> None:
    known = Hang(0.5)
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
def test_the_limit_follows_from_the_steps(clock: Clock, seconds: float, limit: float) -> None:
    """An evaluation between two steps is no step of its own length."""
    known = Hang(None)
    for step in range(1, 12):
        known.heard(Beat(step=step, beats=step, patience_seconds=0.0))
        clock.now += 50 * seconds if step == 5 else seconds
    known.heard(Beat(step=12, beats=12, patience_seconds=0.0))
    clock.now += limit - 1
    assert known.overdue() is None
    clock.now += 2
    assert known.overdue() == limit + 1


TRAINING = """Thread 0x1 (most recent call first):
  File "threading.py", line 1 in wait

Thread 0x2 (most recent call first):
{frames}
  File "/x/raytune_fsdp/step.py", line 60 in train_step
  File "/x/raytune_fsdp/launch/ray/rank.py", line 99 in train_rank

Current thread 0x3 (most recent call first):
  File "/x/worker.py", line 3 in main_loop
"""
WAITING = TRAINING.format(frames='  File "/torch/distributed/distributed_c10d.py", line 7 in all_gather')
FOR_DEVICE = TRAINING.format(frames='  File "/torch/cuda/streams.py", line 7 in synchronize')
READING = TRAINING.format(frames='  File "/x/raytune_fsdp/data/cache.py", line 8 in read')
STOPPED = "py-spy is not installed on this node\nState:\tT (stopped)\nwaits in: do_signal_stop\n"


@pytest.mark.parametrize(
    ("stacks", "expected"),
    [
        ({0: WAITING, 1: STOPPED}, (1, "its process takes no signals (T (stopped))")),
        ({0: WAITING, 1: WAITING, 2: READING}, (2, 'it is at File "/x/raytune_fsdp/data/cache.py", line 8 in read')),
        ({0: WAITING, 1: FOR_DEVICE}, None),
        ({0: READING, 1: READING}, None),
        ({0: READING}, (0, 'it is at File "/x/raytune_fsdp/data/cache.py", line 8 in read')),
        ({}, None),
    ],
)
def test_who_is_waited_for(stacks: dict[int, str], expected: tuple[int, str] | None) -> None:
    assert culprit(stacks) == expected


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
