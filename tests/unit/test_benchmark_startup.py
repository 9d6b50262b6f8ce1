"""What benchmarks/startup.py says of processor time, and which of its ratios counts."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from benchmarks.fresh import ProcessorTime
from benchmarks.startup import ratios_of, which_counts

BURNS = "import time\nwhile time.process_time() < {seconds}: pass"
IGNORES = f"""
import signal, subprocess, sys, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as Ray's raylet does: nobody is told what a child has taken
subprocess.Popen([sys.executable, "-c", {BURNS.format(seconds=0.4)!r}])
print("started", flush=True)
sys.stdin.read()
"""


def test_processor_time_has_processes_that_nobody_waited_for() -> None:
    with subprocess.Popen([sys.executable, "-c", IGNORES], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as command:
        assert command.stdout is not None and command.stdin is not None
        taken = ProcessorTime(command.pid)
        taken.start()
        command.stdout.readline()
        deadline = time.monotonic() + 60
        while taken.seconds() < 0.3 and time.monotonic() < deadline:
            time.sleep(0.05)
        command.stdin.close()
        command.wait()
        taken.end()
    assert 0.3 <= taken.seconds() < 3  # the child is gone, and what it took is not


@pytest.mark.parametrize(
    ("loads", "counts"), [([0.1, 0.99], "total"), ([0.1, 1.0, 0.2], "processor"), ([7.0], "processor")]
)
def test_the_clock_counts_only_where_every_round_began_on_a_calm_machine(loads: list[float], counts: str) -> None:
    assert which_counts(loads) == counts


def test_a_ratio_is_the_median_of_its_rounds_and_comes_with_their_spread() -> None:
    def rounds(totals: list[float], processor: list[float]) -> list[dict[str, dict[str, float]]]:
        pairs = zip(totals, processor, strict=True)
        return [{"start": {"total": total, "processor": seconds}} for total, seconds in pairs]

    found = {"ours": rounds([1.0, 8.0, 3.0], [3.0, 3.0, 3.0]), "bare": rounds([2.0, 4.0, 4.0], [3.0, 2.0, 6.0])}
    ratios = ratios_of(found, "start")
    assert ratios["total"] == {"ratio": 0.75, "lowest": 0.5, "highest": 2.0, "rounds": [0.5, 2.0, 0.75]}
    assert ratios["processor"] == {"ratio": 1.0, "lowest": 0.5, "highest": 1.5, "rounds": [1.0, 1.5, 0.5]}
