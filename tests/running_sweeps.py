"""Tiny sweeps for tests: a spec, its command, and what it leaves."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from raytune_fsdp.record.jsonl import read_trajectory
from tests.runs import make_config, write_tokens

RATES = [1e-3, 1e-2, 3e-4, 3e-3]
SECONDS = 240.0


def spec_of(directory: Path, storage: str, **changes: Any) -> dict[str, Any]:
    """Four rates of learning by rungs at steps 4, 8 and 16: the first is measured where each rung is."""
    if not (directory / "others.jsonl").exists():
        directory.mkdir(exist_ok=True)
        write_tokens(directory / "others.jsonl", rows=20, seed=1)
    base = make_config(directory, train={"max_steps": 16}, eval={"every": 4}).model_dump()
    base["data"]["eval"] = [{"name": "others", "path": str(directory / "others.jsonl"), "format": {"type": "tokens"}}]
    base["run"] = {"seed": 3}
    return {
        "name": "rates", "storage": str(directory / storage), "base": base, "space": {"optim.lr": {"grid": RATES}},
        "scheduler": {"type": "rungs", "first": 4, "eta": 2}, "concurrent": 2, **changes,
    }  # fmt: skip


class SweepCommand:
    """The command of a sweep, as a process."""

    def __init__(self, directory: Path, spec: Mapping[str, Any], *arguments: str) -> None:
        self.place = Path(spec["storage"]) / spec["name"]
        file = directory / f"{Path(spec['storage']).name}.yaml"
        file.write_text(yaml.safe_dump(dict(spec)))
        self._arguments = [str(file), *arguments]
        self.said = ""
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "raytune_fsdp.cli.main", "sweep", *self._arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def end(self, seconds: float = SECONDS) -> int:
        """Wait for its end; return the exit code."""
        self.said, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def until(self, condition: Callable[[], bool], seconds: float = SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"it has ended with {self.end()}: {self.said}"
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def kill(self) -> list[psutil.Process]:
        """End it by SIGKILL; return the processes that it has started and that have not ended with it."""
        children = self.children()
        self.process.kill()
        self.process.communicate()
        return children

    @property
    def log(self) -> bytes:
        return (self.place / "log.jsonl").read_bytes() if (self.place / "log.jsonl").exists() else b""

    def trajectories(self) -> dict[str, list[dict[str, Any]]]:
        runs = sorted(self.place.parent.glob(f"{self.place.name}-*"))
        return {run.name: read_trajectory(run / "metrics.jsonl") for run in runs}


def gone(processes: list[psutil.Process], seconds: float) -> bool:
    """Whether they all end by themselves within this time."""
    return not psutil.wait_procs(processes, timeout=seconds)[1]
