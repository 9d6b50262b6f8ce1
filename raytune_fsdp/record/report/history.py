"""Read a run's directory once, for a page: every number of its steps as columns, evaluations, events, the config.

The directory may be of an older version, of a run that is still training, damaged, or a stranger's. What cannot be read
is left out, and named in `History.problems`.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml

from raytune_fsdp.base.errors import UserError, in_one_line
from raytune_fsdp.base.untrusted import MIB, UnsoundError, is_count, read_file, read_json, read_json_object, reason
from raytune_fsdp.config.recorded import recorded, setting
from raytune_fsdp.config.text import parse, problem_line, spelled
from raytune_fsdp.plan.counts import Census
from raytune_fsdp.plan.run_dir import (
    ATTEMPTS_FILE,
    CONFIG_FILE,
    DATA_FILE,
    EVENTS_FILE,
    METRICS_FILE,
    MODEL_FILES,
    PLAN_FILE,
    RECIPE_FILE,
    check_links,
    is_run,
)
from raytune_fsdp.record.jsonl import each_event, each_line_of
from raytune_fsdp.record.lines import is_number, preferences_of, seconds_of
from raytune_fsdp.record.names import NODE_FIGURES, STARTED_BY

T = TypeVar("T")
Numbers = np.ndarray[Any, np.dtype[np.float64]]

TRAJECTORY = ("step", "loss", "grad_norm", "lr", "tokens", "target_tokens")
BESIDE = (
    "accuracy", "step_seconds", "data_seconds", "tokens_per_second", "mfu", "memory_bytes", "host_memory_bytes",
    "gpu_utilization", "world_size", "attempt",
)  # fmt: skip
PREFERENCES = (
    "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "kl",
    "kl/forward", "kl/reverse", "nll",
)  # fmt: skip
"""Of pairs and judged answers; and of what is learned from a teacher."""
RANKS = ("rank_seconds", "rank_data_seconds", "rank_compute_seconds")
"""Each becomes three columns, <name>.0 to <name>.2: the fastest rank, the median, the slowest."""
NODES = NODE_FIGURES
"""So does each of these, now and then: the node with the least, the median, the node with the most."""

_MOST_DATASETS, _MOST_METRICS = 64, 256
"""The most that are drawn: each takes memory for every step, and the names come from a file that may have any."""
_LONGEST_NAME = 300
_LAST_STEP = 1 << 53
"""Integers up to this one are exact as floats, here and in the page's script."""
_MOST_EVENTS, _EVENT_BYTES = 100_000, 64 * MIB
_SMALL_FILE = 4 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A run as its directory describes it."""

    path: Path
    name: str
    columns: Mapping[str, Numbers]
    """A number for every step, by name; NaN where the record has none."""
    time: Numbers
    """When each step ended, in seconds since 1970; never earlier than the step before."""
    datasets: Mapping[str, tuple[Numbers, Numbers]]
    """Loss and target tokens of every step, by dataset, if there are several."""
    evaluations: Mapping[str, list[tuple[int, float, float]]]
    """Step, value and time, by metric."""
    events: list[dict[str, Any]]
    started_by: Mapping[int, Mapping[str, Any]]
    """By attempt, the command that started it; empty in runs of older versions."""
    config: dict[str, Any]
    """The config of the last attempt as a tree, without secrets; empty if it cannot be read."""
    plan: dict[str, Any]
    version: str | None
    census: Census | None
    problems: list[str] = field(default_factory=list)

    @property
    def steps(self) -> Numbers:
        return self.columns["step"]

    @property
    def start(self) -> float:
        """The time at which the first step began, in seconds since 1970; NaN if the record has no times."""
        if not len(self.time):
            return math.nan
        seconds = self.columns["step_seconds"][0]
        return float(self.time[0] - (seconds if math.isfinite(seconds) else 0.0))

    def has(self, name: str) -> bool:
        """Return whether any step has this number."""
        return bool(np.isfinite(self.columns[name]).any())

    def setting(self, path: str) -> Any:
        """Return a value of the config by its dotted path; None if there is none."""
        return setting(self.config, path)

    def planned(self, name: str) -> int | None:
        """Return a number of the plan."""
        value = self.plan.get(name)
        return value if type(value) is int and 0 < value < 1 << 63 else None


def check_run(path: Path) -> None:
    """Refuse what is not a run directory."""
    if not path.is_dir():
        raise UserError(f"{path}: no such directory; give a run directory, <run.storage>/<run.name>")
    check_links(path)
    if not is_run(path):
        raise UserError(
            f"{path} is not a run directory (it has no {PLAN_FILE}); give <run.storage>/<run.name>, as `raytune-fsdp "
            "train` prints it at the end"
        )


def read_history(path: Path) -> History:
    """Read a run's directory. Raises UserError if it is not one."""
    check_run(path)
    problems: list[str] = []
    record = _Record()
    for line in each_line_of(path):
        record.add(line)
    if record.unread:
        problems.append(f"{record.unread:,} lines of {METRICS_FILE} are damaged or out of order, and are left out")
    config = _read(config_of, path / CONFIG_FILE, problems) or {}
    name = config["run"].get("name") if isinstance(config.get("run"), dict) else None
    version = (_read(json_map, path / MODEL_FILES / RECIPE_FILE, problems) or {}).get("version")
    return History(
        path=path,
        name=name if isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME else path.resolve().name,
        columns={name: np.array(values) for name, values in record.columns.items()},
        # A clock that was set back must not make the axis go backwards.
        time=np.fmax.accumulate(np.array(record.time)) if record.time else np.array([]),
        datasets={name: (np.array(loss), np.array(count)) for name, (loss, count) in record.datasets.items()},
        evaluations=record.evaluations,
        events=_events(path / EVENTS_FILE, problems),
        started_by={
            event["attempt"]: event["fields"]
            for event in _events(path / ATTEMPTS_FILE, problems)
            if event["event"] == STARTED_BY
        },
        config=config,
        plan=_read(json_map, path / PLAN_FILE, problems) or {},
        version=version if isinstance(version, str) else None,
        census=_read(census_of, path / DATA_FILE, problems),
        problems=problems,
    )


def config_of(path: Path) -> dict[str, Any]:
    """Read a config.yaml as a tree, and remove the secrets: older versions wrote them."""
    try:
        tree = spelled(parse(read_file(path, limit=_SMALL_FILE).decode())[0])
    except yaml.YAMLError as error:
        raise UnsoundError(f"is not a config: {problem_line(error)}") from error
    if not isinstance(tree, dict):
        raise UnsoundError("is not a config")
    return recorded(tree)


class _Record:
    """The lines of a `metrics.jsonl` as columns: 40 numbers or 320 bytes a step; a dict would take 3,000 bytes."""

    def __init__(self) -> None:
        threes = (f"{name}.{i}" for name in (*RANKS, *NODES) for i in range(3))
        names = (*TRAJECTORY, *BESIDE, *PREFERENCES, "skipped", "expert_load", *threes)
        self.columns = {name: array("d") for name in names}
        self.time = array("d")
        self.datasets: dict[str, tuple[array[float], array[float]]] = {}
        """Loss and target tokens of each step."""
        self.evaluations: dict[str, list[tuple[int, float, float]]] = {}
        self.unread = 0
        self._last = 0

    def add(self, line: dict[str, Any] | None) -> None:
        if line is None or line["kind"] == "eval" and line["step"] > _LAST_STEP:
            self.unread += 1
        elif line["kind"] == "eval":
            for name, value in line["values"].items():
                fits = len(self.evaluations) < _MOST_METRICS and len(name) <= _LONGEST_NAME
                if name in self.evaluations or fits:
                    self.evaluations.setdefault(name, []).append((line["step"], float(value), seconds_of(line)))
        elif not self._last < line["trajectory"]["step"] <= _LAST_STEP:
            self.unread += 1  # two records put together, for example: no step is drawn twice
        else:
            self._last = line["trajectory"]["step"]
            self._add_step(line)

    def _add_step(self, line: dict[str, Any]) -> None:
        columns, trajectory, nan = self.columns, line["trajectory"], math.nan
        for name in TRAJECTORY:
            columns[name].append(trajectory[name])
        for name in BESIDE:
            value = line.get(name)
            columns[name].append(value if value is not None and is_number(value) else nan)
        preferences = dict(preferences_of(line)) if "preferences" in line else {}
        for name in PREFERENCES:
            columns[name].append(preferences.get(name, nan))
        columns["skipped"].append(line.get("skipped") is True)
        load = line.get("expert_load")
        known = load if isinstance(load, list) and all(map(is_number, load)) else []
        columns["expert_load"].append(max(known, default=nan))
        for name in RANKS:
            values = line.get(name)
            if not (isinstance(values, list) and len(values) == 3 and all(map(is_number, values))):
                values = (nan, nan, nan)
            for i in range(3):
                columns[f"{name}.{i}"].append(values[i])
        nodes = line.get("nodes")
        whole = [node for node in nodes if _is_node(node)] if isinstance(nodes, list) else []
        for place, name in enumerate(NODES, start=1):
            values = sorted(node[place] for node in whole if is_number(node[place])) if whole else ()
            for i in range(3):
                columns[f"{name}.{i}"].append(values[i * (len(values) - 1) // 2] if values else nan)
        self._add_datasets(line.get("datasets"), len(self.time))
        self.time.append(seconds_of(line))

    def _add_datasets(self, datasets: Any, before: int) -> None:
        for entry in datasets if isinstance(datasets, list) else ():
            if not (isinstance(entry, list) and len(entry) == 4 and isinstance(entry[0], str)):
                continue
            name, loss, _, targets = entry
            if name not in self.datasets and len(self.datasets) < _MOST_DATASETS and len(name) <= _LONGEST_NAME:
                self.datasets[name] = array("d", [math.nan]) * before, array("d", [0.0]) * before
            if name in self.datasets and len(self.datasets[name][0]) == before:
                self.datasets[name][0].append(loss if is_number(loss) else math.nan)
                self.datasets[name][1].append(targets if is_count(targets) else 0)
        for losses, counts in self.datasets.values():
            if len(losses) == before:  # the step has no token of this dataset
                losses.append(math.nan)
                counts.append(0)


def _is_node(entry: Any) -> bool:  # its name, and its figures
    return isinstance(entry, list) and len(entry) == 1 + len(NODES)


def _events(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Return the events; only the first ones if there are more than any run has."""
    found: list[dict[str, Any]] = []
    size = 0
    for event in each_event(path):
        size += len(str(event["fields"]))
        if len(found) == _MOST_EVENTS or size > _EVENT_BYTES:
            problems.append(f"{path.name} has more than {len(found):,} events; the rest is left out")
            break
        found.append(event)
    return found


json_map = partial(read_json_object, limit=_SMALL_FILE)
"""Reads a JSON object from a small file."""


def _read(read: Callable[[Path], T], path: Path, problems: list[str]) -> T | None:
    """Read a small file; None if it is missing, as in older versions, or, with a problem noted, cannot be read."""
    try:
        return read(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {in_one_line(error)}")
    except ValueError as error:
        problems.append(f"{path.name} is left out: {reason(error)}")
    return None


# `data.json` of a run directory: what became of the rows, for the page about the run.
#
# The cache has the same counts, but all runs share it, it may be elsewhere, and it is cleaned.

_BYTES = 16 * MIB  # 2,000 datasets take 2 MB
_OCTAVES = 63
_COUNTS = ("rows", "documents", "tokens", "target_tokens", "truncated", "cut", "without_targets")


def data_of(census: Census) -> str:
    """Return the text of the file, without the skipped rows: they are events already, and quote what is in them."""
    return replace(census, skipped=(), built=0).to_json()


def census_of(path: Path) -> Census:
    """Read the counts from the file. Raises ValueError if it is not one of ours."""
    values = read_json(path, limit=_BYTES)
    known = (
        isinstance(values, dict)
        and values.keys() == {*Census.__dataclass_fields__}
        and all(isinstance(values[key], list) for key in ("names", "datasets", "epochs"))
        and len(values["names"]) == len(values["datasets"])
        and all(map(is_count, (values["seq_len"], values["windows"], *values["epochs"])))
        and all(isinstance(name, str) and len(name) <= 300 for name in values["names"])
        and all(map(_is_dataset, values["datasets"]))
    )
    if not known:
        raise UnsoundError("is not a count of rows")
    return Census.from_json(json.dumps({**values, "skipped": [], "built": 0}))


def _is_dataset(values: Any) -> bool:
    return (
        isinstance(values, dict)
        and values.keys() - {"groups"} == {*_COUNTS, "dropped", "lengths"}
        and all(is_count(values.get(name, 0)) for name in (*_COUNTS, "groups"))
        and all(isinstance(values[name], dict) for name in ("dropped", "lengths"))
        and all(map(is_count, (*values["dropped"].values(), *values["lengths"].values())))
        and all(each.isascii() and each.isdecimal() and len(each) < 4 for each in values["lengths"])
        and all(int(each) < 4 * _OCTAVES for each in values["lengths"])
    )
