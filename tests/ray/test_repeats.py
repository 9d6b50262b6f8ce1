"""What fails again and again at the same step ends the run; what is killed from outside does not."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from raytune_fsdp.cli.main import main
from raytune_fsdp.config import FinetuneConfig
from tests.checkpoints import checkpoints
from tests.control_groups import limited
from tests.ray.jobs import TRAIN, Command, config_of, events

pytestmark = pytest.mark.slow


def config_for(directory: Path) -> FinetuneConfig:
    """A run that goes on after any number of failures."""
    return config_of(
        directory,
        train={**TRAIN, "max_steps": 40},
        cluster={"launch": "ray", "workers": 2, "device": "cpu", "max_failures": -1},
        checkpoint={"every": 16},
        tracking={"console": True, "mlflow": {"enabled": False}},
    )


def test_a_step_that_fails_three_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After three kills from outside between two commits, which end nothing."""
    run = Command(config_for(tmp_path), tmp_path)
    (run.faults / "pace").write_text("0.1")
    for number in range(1, 4):
        run.until(lambda: len(events(run.run_dir, "first_step")) == number)  # noqa: B023
        os.kill(events(run.run_dir, "ranks_joined")[-1]["fields"]["ranks"][-1]["pid"], signal.SIGKILL)
        run.until(lambda: len(events(run.run_dir, "attempt_failed")) == number)  # noqa: B023
    assert not checkpoints(run.run_dir)
    (run.faults / "poison-21").touch()
    code, said = run.end()
    assert code == 3, said
    (error,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert error.startswith(
        "error: step 21 has failed 3 times in the same way, with no checkpoint in between: rank "
    ), said
    assert "ArithmeticError: step 21 cannot be computed. The last committed step is 16" in error
    assert len(events(run.run_dir, "attempt_failed")) == 6
    named = re.search(r"\(raytune-fsdp (step .*) shows its rows\)", error)
    assert named and main(named[1].split()) == 0
    assert capsys.readouterr().out.startswith("step 21 is not on record: these ")


def test_a_process_that_the_kernel_ends_for_its_memory_each_time(tmp_path: Path) -> None:
    with limited("raytune-rank", 100 << 20) as group:
        if group is None:
            pytest.skip("no control group can be made here")
        run = Command(config_for(tmp_path), tmp_path)
        (run.faults / "pace").write_text("0.4")
        (run.faults / "eat-11-1").touch()
        for number in range(1, 4):
            run.until(lambda: len(events(run.run_dir, "ranks_joined")) == number)  # noqa: B023
            joined = events(run.run_dir, "ranks_joined")[-1]["fields"]["ranks"]
            pid = next(each["pid"] for each in joined if each["rank"] == 1)
            (group / "cgroup.procs").write_text(str(pid))  # what it takes from now on is limited
            run.until(lambda: len(events(run.run_dir, "attempt_failed")) == number)  # noqa: B023
        code, said = run.end()
    assert code == 3, said
    (error,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert "step 11 has failed 3 times in the same way" in error, error
    assert "the kernel ended its process for its memory: it had 0." in error
    assert "and its control group may have 0.10 GB. Give the workers more" in error
