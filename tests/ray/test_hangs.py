"""A rank that hangs, in whatever way, is found and named, and the run goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
from datetime import datetime
from pathlib import Path

import pytest

from raytune_fsdp.tracking.jsonl import read_trajectory
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
