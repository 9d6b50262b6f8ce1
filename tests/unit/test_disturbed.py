"""What tests/chaos.py and tests/kills.py say of memory, and of what they have killed."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime

import psutil
import pytest

from tests.disturbed import Memory, own_bytes

pytest.importorskip("ray")
from tests.kills import Kill, follow

MIB = 1 << 20


def memory(*sizes: float, what: str = "driver", pid: int = 1) -> Memory:
    found = Memory()
    found.found[what, pid, 0.0] = {attempt: int(size * MIB) for attempt, size in enumerate(sizes, start=1)}
    return found


def test_a_process_that_grows_with_each_attempt_is_found() -> None:
    (problem,) = memory(300, 420, 421.5, 423, 424.5, 426).problems()
    assert problem == "driver grows by 1.5 MiB with each attempt"


@pytest.mark.parametrize(
    "sizes",
    [
        (300, 420, 421, 421, 421, 421),  # warm after two
        (300, 420, 421, 470, 421, 421),  # one that is large once
        (300, 420, 430, 440),  # too short a life to tell
    ],
)
def test_what_does_not_grow_is_no_problem(sizes: tuple[float, ...]) -> None:
    assert memory(*sizes).problems() == []


def test_of_several_processes_of_one_kind_the_fastest_counts() -> None:
    found = memory(50, 50, 50, 50, 50, what="_NodeWatch", pid=1)
    found.found |= memory(50, 50, 52, 54, 56, what="_NodeWatch", pid=2).found
    assert found.growth() == {"_NodeWatch": 2 * MIB}


def test_memory_is_what_a_process_keeps_to_itself() -> None:
    program = "kept = b'1' * (80 << 20); print(flush=True); input()"
    found = Memory()
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None and started.stdin is not None
        started.stdout.readline()
        process = psutil.Process(started.pid)
        for attempt in (1, 1, 2):
            found.look(attempt, {"one": [process]})
        assert 80 * MIB < own_bytes(process.pid) < 160 * MIB
        started.stdin.close()
    found.look(3, {"one": [process]})  # it is gone
    (by_attempt,) = found.found.values()
    assert by_attempt.keys() == {1, 2}


def test_what_follows_a_kill_is_told_from_the_record() -> None:
    happened = [
        (10, "attempt_started", {"resumed_from": 0}), (12, "first_step", {}),
        (21, "attempt_failed", {}), (25, "attempt_started", {"resumed_from": 8}),
        (31, "attempt_failed", {}), (36, "attempt_started", {"resumed_from": 8}), (38, "first_step", {}),
    ]  # fmt: skip
    lines = [
        {"time": datetime.fromtimestamp(seconds, UTC).isoformat(), "event": event, "fields": fields}
        for seconds, event, fields in happened
    ]
    kills = [Kill("a rank", "training", time=20, step=11), Kill("a node", "a start", time=30, step=11)]
    first, second = follow(kills, lines)
    assert (first.noticed, first.next_step, first.again) == (1, None, None)
    assert (second.noticed, second.next_step, second.again) == (1, 8, 3)
    assert second.went_on_from == "a commit"
