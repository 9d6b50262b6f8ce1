"""Tiny sweeps for tests: a spec, its command, and what it leaves."""

from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.record import names
from raytune_fsdp.record.jsonl import append_event, each_event, read_trajectory
from raytune_fsdp.tune.board import SweepBoard
from raytune_fsdp.tune.log import Entry, SweepLog
from raytune_fsdp.tune.place import SweepDir
from raytune_fsdp.tune.running import runner, values
from raytune_fsdp.tune.running.cluster import TrialsRay
from raytune_fsdp.tune.spec import SweepSpec
from raytune_fsdp.tune.sweep import checked
from raytune_fsdp.tune.turn import begun_of
from tests.recorded import Recorded
from tests.runs import make_config, write_tokens

RATES = [1e-3, 1e-2, 3e-4, 3e-3]
SECONDS = 240.0


def spec_of(directory: Path, storage: str, **changes: Any) -> dict[str, Any]:
    """Four rates of learning by rungs at steps 4, 8 and 16: the first is measured where each rung is."""
    if not (directory / "others.jsonl").exists():
        directory.mkdir(exist_ok=True)
        write_tokens(directory / "others.jsonl", rows=20, seed=1)
    base = make_config(directory, train={"max_steps": 16}, eval={"every": 4}).model_dump(exclude_unset=True)
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


class TrialProcess:
    """Stands for the process of a trial: it has trained at once, and writes the record of a run that has."""

    pid = 1

    def __init__(self, config: FinetuneConfig, run: Recorded, does: Callable[[TrialProcess], int | None]) -> None:
        self.config, self.run, self.said = config, run, ""
        self.stops, self.asked, self.ends_when_stopped = 0, False, True
        self._code = does(self)

    def to_its_end(self) -> int:
        """Train as far as a trial does; return its exit code."""
        last = self.config.train.max_steps
        until = self.config.run.stop_after or last
        assert until is not None
        self.run.attempt(self.run.step)
        while self.run.step < until:  # not if only its export is lacking
            self.run.train(4)
            self.run.evaluate(others=abs(math.log10(self.config.optim.lr) + 2) / self.run.step)
        self.run.save()
        self.run.end("interrupted" if until != last else "finished")
        if until == last and self.config.export.at_end:
            self.run.place.export.mkdir()
        return 130 if until != last else 0

    def goes_on_after(self, code: int) -> None:
        """Have done all this, and not have ended."""

    def ends(self, code: int) -> None:
        self._code = code

    def fails(self, error: str, *, itself: str = "", driver: str = "", code: int = 1) -> int:
        """Begin an attempt and fail. `itself`, `driver`: what training itself and the driver on Ray put on record."""
        self.run.attempt(self.run.step)
        self.said = error
        for event, cause in ((names.TRAINING_FAILED, itself), (names.ATTEMPT_FAILED, driver)):
            if cause:
                append_event(self.run.place.events, event, attempt=self.run.number, fields={"rank": 0, "cause": cause})
        self.run.end("failed")
        return code

    def finds_no_room(self) -> int:
        """Wait for `cluster.wait_minutes`, and end without an attempt."""
        append_event(self.run.place.events, names.NO_ROOM, attempt=self.run.number, fields={"missing": "a worker"})
        self.said = "cluster.wait_minutes=30: the workers did not start in that time"
        return 1

    def code(self) -> int | None:
        return self._code

    def error(self) -> str:
        return self.said

    def stop(self) -> None:
        self.stops, self.asked = self.stops + 1, True
        if self._code is None and self.ends_when_stopped:
            self._code = 130

    def kill(self) -> None:
        self._code = -9


class Trials:
    """A sweep whose trials do what a test says, in this process and without torch."""

    def __init__(self, spec: SweepSpec, patch: pytest.MonkeyPatch) -> None:
        self.spec, self.place, self.patch = spec, SweepDir.of(spec), patch
        self.does: dict[str, list[Callable[[TrialProcess], int | None]]] = {}
        """What the processes of a run do, one after the other; the others train as they should."""
        self.started: list[TrialProcess] = []
        self.runs: dict[str, Recorded] = {}
        self.stops: Callable[[], int] = lambda: 0
        self.away = 0
        """How often checkpoints cannot be listed."""
        patch.setattr(runner, "Child", self._start)
        patch.setattr(runner, "_AGAIN_SECONDS", (0.0, 0.0))
        patch.setattr(runner, "_LOOK_SECONDS", 0.001)
        patch.setattr(runner, "_READ_SECONDS", 0.002)
        patch.setattr(values, "committed", self._committed)

    def sweep(self) -> list[Entry]:
        """Sweep on to the end; return the log."""
        configs, scheduler = checked(self.spec)
        self.place.path.mkdir(parents=True, exist_ok=True)
        log = SweepLog(self.place.log)
        if not log.entries:
            log.append([begun_of(self.spec, configs[0])])
        self.runner = runner.Runner(
            self.spec, scheduler, log, stops=self.stops, board=SweepBoard(self.spec),
            cluster=TrialsRay(None, {}), lease=None,
        )  # fmt: skip
        self.runner.run()
        return list(log.entries)

    def _start(
        self, config: FinetuneConfig, output: Path, variables: Mapping[str, str], flags: Sequence[str]
    ) -> TrialProcess:
        name = config.run.name
        if name not in self.runs:
            self.runs[name] = Recorded(self.place.path.parent, name)
            self.runs[name].step = 0 if config.run.fork is None else config.run.fork.step
        does = self.does.get(name, [])
        self.started.append(TrialProcess(config, self.runs[name], does.pop(0) if does else TrialProcess.to_its_end))
        return self.started[-1]

    def _committed(self, location: str) -> list[Any]:
        if self.away:
            self.away -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        saved = [event for event in each_event(Path(location).parent / "events.jsonl") if event["event"] == "saved"]
        return [SimpleNamespace(step=event["fields"]["step"], lasting=True) for event in saved]
