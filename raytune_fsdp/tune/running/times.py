"""When the parts of a sweep ran, and how long: beside the log, and nothing is decided by it but the budget."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from raytune_fsdp.base.untrusted import UnsoundError, lines_of, parse_json
from raytune_fsdp.plan.run_dir import METRICS_FILE
from raytune_fsdp.record.lines import is_number, now
from raytune_fsdp.record.report.overview import last_step
from raytune_fsdp.tune.log import open_own
from raytune_fsdp.tune.place import SweepDir


class TrialTimes:
    """The file with the times, and the hours that the trials of a sweep have taken."""

    def __init__(self, place: SweepDir) -> None:
        """Read the file. A part of which only the start is there was killed with its command: it took the time until
        the last line of its run's record."""
        self._path, self._storage = place.times, place.path.parent
        self.hours = 0.0
        """Of all ranks of all parts that have ended, together."""
        started: dict[str, dict[str, Any]] = {}
        for line in read_times(self._path):
            if line.get("what") == "started":
                started[str(line.get("run"))] = line
            elif line.get("what") == "trains" and str(line.get("run")) in started:
                started[str(line.get("run"))]["time"] = line.get("time")
            elif line.get("what") == "ended":
                started.pop(str(line.get("run")), None)
                self.hours += _hours(line)
        for run, line in started.items():
            with suppress(OSError, ValueError):
                began = datetime.fromisoformat(str(line["time"])).timestamp()
                last = (self._storage / Path(run).name / METRICS_FILE).stat().st_mtime
                self.ended(line.get("trial"), run, None, max(0.0, last - began))

    def started(self, trial: int, run: str, until: int | None) -> None:
        self._add("started", trial=trial, run=run, until=until)

    def trains(self, run: str) -> None:
        """Note that the ranks of the newest part of a run are there: what it has waited for them costs nothing."""
        self._add("trains", run=run)

    def ended(self, trial: object, run: str, code: int | None, seconds: float) -> None:
        """`code`: the exit code of its process; None: nobody has seen its end."""
        ranks = ranks_of(self._storage / Path(run).name)
        self.hours += seconds * ranks / 3600
        self._add("ended", trial=trial, run=run, code=code, seconds=round(seconds, 2), ranks=ranks)

    def _add(self, what: str, **fields: object) -> None:
        """Append a line. A disk that is full must not end the sweep for it."""
        line = json.dumps({"time": now(), "what": what, **fields})
        with suppress(OSError), open(self._path, "a", encoding="utf-8", opener=open_own) as file:
            file.write(f"{line}\n")


def ranks_of(run: Path) -> int:
    """Return how many ranks a run has, by its newest step; 1 before that."""
    newest = last_step(run / METRICS_FILE)
    ranks = newest.get("world_size") if newest else None
    return ranks if type(ranks) is int and ranks > 0 else 1


def read_times(path: Path) -> Iterator[dict[str, Any]]:
    """Yield what can be read of the lines."""
    with suppress(OSError, UnsoundError):
        for raw in lines_of(path):
            with suppress(ValueError):
                line = parse_json(raw)
                if isinstance(line, dict):
                    yield line


def _hours(line: dict[str, Any]) -> float:
    numbers: list[Any] = [line.get(name) for name in ("seconds", "ranks")]
    if not all(map(is_number, numbers)):
        return 0.0
    hours = math.prod(map(float, numbers)) / 3600
    return hours if math.isfinite(hours) and hours > 0 else 0.0
