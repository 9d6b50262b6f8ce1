"""Whatever is killed, in whatever phase of a run: it goes on, and learns the same. Prints a table of times."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from statistics import median

import psutil
import pytest

from raytune_fsdp.record.jsonl import read_trajectory
from tests.ray.jobs import Command, config_of, events
from tests.runs import trajectory, write_tokens

pytestmark = pytest.mark.slow

TRAIN = {"global_batch": 10, "micro_batch": 2, "max_steps": 400}
STARTING = ("imports", "network", "weights", "optimizer")
"""Where rank 1 is killed before the first step, in one attempt after another."""
TRAINING = (
    ("batch", 1), ("backward", 1), ("update", 0), ("evaluation", 1), ("write", 1), ("commit", 0), ("prune", 0),
)  # fmt: skip
PACE = 0.15
NOTICED_SECONDS = 1.0
"""The median of the times until a failure is on record, on a machine that has no more to do than this run."""


class Story:
    """What was killed when, and when the run went on."""

    def __init__(self, run: Command) -> None:
        self.run = run
        self.attempts = 0
        self.noticed: list[float] = []
        """For each kill, the seconds until the failure was on record."""

    def fails(self, what: str, faults: list[str], strike: Callable[[], object] = lambda: None) -> None:
        """Arm one fault after another, each for the next attempt; the attempt after the last one trains."""
        trained = len(events(self.run.run_dir, "first_step"))
        for fault in faults:
            (self.run.faults / fault).touch()
            self.run.until(lambda: not (self.run.faults / fault).exists())  # noqa: B023
            killed = datetime.now().astimezone()
            self.attempts += 1
            self.run.until(lambda: len(events(self.run.run_dir, "attempt_failed")) == self.attempts)
            failed = events(self.run.run_dir, "attempt_failed")[-1]
            self.noticed.append(self.line(fault.removeprefix("at-"), killed, failed["time"]))
        if not faults:
            strike()
            killed = datetime.now().astimezone()
            self.attempts += 1
            self.run.until(lambda: len(events(self.run.run_dir, "attempt_failed")) == self.attempts)
            self.line(what, killed, events(self.run.run_dir, "attempt_failed")[-1]["time"])
        self.run.until(lambda: len(events(self.run.run_dir, "first_step")) > trained)
        self.line("  next step", killed, events(self.run.run_dir, "first_step")[-1]["time"])
        saved = len(events(self.run.run_dir, "saved"))
        self.run.until(lambda: len(events(self.run.run_dir, "saved")) > saved)  # else nothing is ever saved

    def line(self, what: str, since: datetime, until: str) -> float:
        seconds = (datetime.fromisoformat(until) - since).total_seconds()
        print(f"{what:30} {seconds:6.2f} s", flush=True)
        return seconds


def killed(run: Command, name: str) -> int:
    """Kill the processes of Ray's with this name."""
    found = []
    for process in run.all():
        with suppress(psutil.NoSuchProcess):  # it may end by itself meanwhile
            if "".join(process.cmdline()[:1]).startswith(f"ray::{name}"):
                process.kill()
                found.append(process)
    psutil.wait_procs(found, timeout=5)
    return len(found)


@pytest.mark.timeout(1800)
def test_a_kill_in_every_phase(tmp_path: Path) -> None:
    held_out = write_tokens(tmp_path / "held-out.jsonl", rows=8, seed=5)
    sections = {
        "train": TRAIN,
        "eval": {"every": 8},
        "data": {"eval": [{"path": str(held_out), "format": {"type": "tokens"}}]},
        "checkpoint": {"every": 4, "keep_last": 2},
    }
    config = config_of(
        tmp_path,
        **sections,
        cluster={"launch": "ray", "workers": 2, "device": "cpu", "max_failures": -1},
        tracking={"console": True, "mlflow": {"enabled": False}},
        export={"at_end": True, "every": 400},
    )
    run = Command(config, tmp_path)
    (run.faults / "pace").write_text(str(PACE))
    story = Story(run)
    story.fails("", [f"at-{phase}-1" for phase in STARTING])
    for phase, rank in TRAINING:
        later = ["at-checkpoint-1"] if phase == "backward" else []
        story.fails("", [f"at-{phase}-{rank}", *later])
    for process in ("ReadStream", "_NodeWatch"):
        before = run.steps()
        assert killed(run, process) >= 1, process
        run.until(lambda: run.steps() > before + 20)  # noqa: B023
        story.attempts = len(events(run.run_dir, "attempt_failed"))
        print(f"{process} killed: {story.attempts} attempts failed until then", flush=True)
    (run.faults / "pace").unlink()
    run.until(lambda: killed(run, "_export") > 0)  # the driver waits for it when all steps are done
    code, said = run.end()
    assert code == 0, said
    whole = trajectory(config_of(tmp_path, run={"name": "whole"}, **sections), 2)
    assert read_trajectory(run.run_dir / "metrics.jsonl") == whole
    assert (run.run_dir / "exports" / "step-00000400").exists() and (run.run_dir / "export").exists()
    assert not list(run.faults.iterdir())
    busy = max(1.0, os.getloadavg()[2] / (2 * (os.cpu_count() or 1)))
    assert median(story.noticed) < NOTICED_SECONDS * busy, (story.noticed, busy)
