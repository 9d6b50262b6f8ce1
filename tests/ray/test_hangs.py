"""A rank that hangs, in whatever way, is found and named, and the run goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
import time
from datetime import datetime
from pathlib import Path

import pytest

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.record.jsonl import read_trajectory
from tests.ray.jobs import Command, config_of, events
from tests.runs import trajectory

pytestmark = pytest.mark.slow

LIMIT_SECONDS = 6.0
TRAIN = {"global_batch": 10, "micro_batch": 2, "max_steps": 60}
FOUND = {
    "loop": ("in hang", "it is at File"),
    "read": ("in hang", "it is at File"),
    "gil": ("in hang", "it is at File"),
    "stop": ("(stopped)", "its process takes no signals (T (stopped))"),
}
"""What is in the stack of rank 1, and in the cause."""


def config_with(tmp_path: Path, steps: int, **limits: float) -> FinetuneConfig:
    return config_of(
        tmp_path,
        train={**TRAIN, "max_steps": steps},
        cluster={"launch": "ray", "workers": 2, "device": "cpu", "max_failures": 4, **limits},
        tracking={"console": True, "mlflow": {"enabled": False}},
    )


def test_a_driver_that_was_stopped_ends_no_rank_that_got_on(tmp_path: Path) -> None:
    """For twice the limit, four times: a block takes two seconds, so most of what it reads first has no news. Then
    with a rank that hangs when it is back."""
    run = Command(config_with(tmp_path, 40, hang_minutes=LIMIT_SECONDS / 60), tmp_path)
    run.until(lambda: len(events(run.run_dir, "first_step")) == 1)
    (run.faults / "pace").write_text("2.0")
    run.until(lambda: run.steps() >= 3)
    for _ in range(4):
        os.kill(run.process.pid, signal.SIGSTOP)
        time.sleep(2 * LIMIT_SECONDS)
        os.kill(run.process.pid, signal.SIGCONT)
        time.sleep(4.0)
        assert not events(run.run_dir, "attempt_failed")
    (joined,) = (each["fields"]["ranks"] for each in events(run.run_dir, "ranks_joined"))
    os.kill(run.process.pid, signal.SIGSTOP)
    os.kill(next(each["pid"] for each in joined if each["rank"] == 1), signal.SIGSTOP)
    time.sleep(2 * LIMIT_SECONDS)
    os.kill(run.process.pid, signal.SIGCONT)
    back = datetime.now().astimezone()
    run.until(lambda: bool(events(run.run_dir, "attempt_failed")))
    (run.faults / "pace").unlink()
    code, said = run.end()
    (failed,) = events(run.run_dir, "attempt_failed")
    took = (datetime.fromisoformat(failed["time"]) - back).total_seconds()
    print(f"recorded {took:.1f} s after it was back: {failed['fields']['cause']}")
    assert code == 0 and failed["fields"]["rank"] == 1 and took < LIMIT_SECONDS + 10, said
    assert "in which this command listened (before, it was away for 1" in failed["fields"]["cause"]


def test_a_rank_that_is_stopped_before_its_first_step(tmp_path: Path) -> None:
    """Found within the limit and 5 s, which is longer than a minute here, so that a line has named it before."""
    limit = 70.0
    config = config_with(tmp_path, 4, start_hang_minutes=limit / 60)
    whole = trajectory(config_of(tmp_path, run={"name": "whole"}, train={**TRAIN, "max_steps": 4}), 2)
    run = Command(config, tmp_path)
    (run.faults / "stopped-at-weights-1").touch()
    run.until(lambda: not (run.faults / "stopped-at-weights-1").exists())
    struck = datetime.now().astimezone()
    run.until(lambda: bool(events(run.run_dir, "attempt_failed")))
    (failed,) = events(run.run_dir, "attempt_failed")
    took = (datetime.fromisoformat(failed["time"]) - struck).total_seconds()
    print(f"recorded {took:.1f} s after it began: {failed['fields']['cause']}")
    assert failed["fields"]["rank"] == 1 and took < limit + 10  # of which five are for the end of the ranks
    assert "its process takes no signals (T (stopped))" in failed["fields"]["cause"]
    code, said = run.end()
    assert code == 0, said
    (line,) = [line for line in said.splitlines() if "the ranks have been starting for" in line]
    assert "waiting for rank 1 on " in line and " (model; not heard of for " in line
    assert read_trajectory(run.run_dir / "metrics.jsonl") == whole


def test_three_hangs_of_a_start_end_the_run(tmp_path: Path) -> None:
    """The first one before the ranks have logs."""
    run = Command(config_with(tmp_path, 4, start_hang_minutes=20 / 60), tmp_path)
    for number, place in enumerate(["imports", "weights", "weights"], start=1):
        fault = run.faults / f"stopped-at-{place}-1"
        fault.touch()
        if number < 3:
            run.until(lambda: len(events(run.run_dir, "attempt_failed")) == number)  # noqa: B023
            assert not fault.exists()
    code, said = run.end()
    failed = [each["fields"] for each in events(run.run_dir, "attempt_failed")]
    print(*(each["cause"] for each in failed), sep="\n")
    assert [each["rank"] for each in failed] == [1, 1, 1] and code == 3, said
    assert "what comes before the first step has failed 3 times in the same way" in said
    assert all("its process takes no signals (T (stopped))" in each["cause"] for each in failed)


def test_a_rank_that_hangs(tmp_path: Path) -> None:
    whole = trajectory(config_of(tmp_path, run={"name": "whole"}, train=TRAIN), 2)
    config = config_of(
        tmp_path,
        train=TRAIN,
        cluster={"launch": "ray", "workers": 2, "device": "cpu", "max_failures": 4, "hang_minutes": LIMIT_SECONDS / 60},
        tracking={"console": True, "mlflow": {"enabled": False}},
    )
    run = Command(config, tmp_path)
    (run.faults / "pace").write_text("0.2")
    for number, kind in enumerate(FOUND, start=1):
        run.until(lambda: len(events(run.run_dir, "first_step")) == number)  # noqa: B023
        joined = events(run.run_dir, "ranks_joined")[-1]["fields"]["ranks"]
        began = run.steps()
        run.until(lambda: run.steps() > began + 2)  # noqa: B023
        if kind == "stop":
            os.kill(next(each["pid"] for each in joined if each["rank"] == 1), signal.SIGSTOP)
            struck = datetime.now().astimezone()
        else:
            faults = [run.faults / f"{kind}-1-{call}" for call in range(1, 200)]
            for fault in faults:
                fault.touch()
            run.until(lambda: sum(fault.exists() for fault in faults) < len(faults))  # noqa: B023
            struck = datetime.now().astimezone()
            for fault in faults:
                fault.unlink(missing_ok=True)
        run.until(lambda: len(events(run.run_dir, "attempt_failed")) == number)  # noqa: B023
        failed = events(run.run_dir, "attempt_failed")[-1]
        in_stack, in_cause = FOUND[kind]
        stack = (Path(failed["fields"]["logs"]) / "stacks" / "rank-1.txt").read_text()
        assert in_stack in stack and failed["fields"]["rank"] == 1, (failed, stack)
        assert in_cause in failed["fields"]["cause"], failed
        assert (Path(failed["fields"]["logs"]) / "stacks" / "rank-0.txt").exists()
        took = (datetime.fromisoformat(failed["time"]) - struck).total_seconds()
        print(f"{kind}: recorded {took:.1f} s after it began")
        assert took < LIMIT_SECONDS + 10  # of which five are for the end of the ranks
    (run.faults / "pace").unlink()
    code, said = run.end()
    assert code == 0, said
    assert read_trajectory(run.run_dir / "metrics.jsonl") == whole
