"""Make the page about all runs of a storage: a row for each, with filters, links to their reports, and its sweeps in
parallel coordinates.

As on the page about a run, every text may be a stranger's.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from raytune_fsdp.base.untrusted import printable
from raytune_fsdp.config.recorded import setting
from raytune_fsdp.plan.run_dir import CONFIG_FILE, METRICS_FILE, report_of
from raytune_fsdp.record.console import took
from raytune_fsdp.record.lines import is_number
from raytune_fsdp.record.report.drawn import log_ticks, small_curve, ticks
from raytune_fsdp.record.report.facts import shown_value
from raytune_fsdp.record.report.history import config_of
from raytune_fsdp.record.report.overview import Overview, some_losses
from raytune_fsdp.record.report.page import rendered

_SETTINGS = {"model": "model.path", "method": "method.type", "lr": "optim.lr", "batch": "train.global_batch"}
_CHOSEN_BY = ("model", "method")
"""Settings by which runs are chosen."""
_STATES = {"running": "running", "finished": "done", "interrupted": "interrupted", "stale": "stale", "failed": "failed"}
_MOST_FIELDS, _NAME, _VALUE, _CATEGORY = 12, 100, 60, 40
"""The most fields of a sweep that are drawn, and the most characters of a name, of a value in words, of one on an
axis."""
_GRADES = 6
"""Colours from the best value to the worst one: `.v0` and so on in page.css."""
_DECADES = 100
"""An axis whose values are more than this factor apart is logarithmic."""
_MISSING = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownField:
    """A field that a sweep changes."""

    name: str
    logged: bool = False
    """Whether the sweep draws its values by their logarithms."""
    listed: Sequence[Any] = ()
    """Its values, if the sweep lists them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTrial:
    run: str
    """The name of its run's directory."""
    changes: Mapping[str, Any]
    value: float | None
    """Its last value of the sweep's metric, if that is finite."""
    step: int
    state: str
    best: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSweep:
    name: str
    metric: str = ""
    highest: bool = False
    """Whether the highest value of the metric is the best."""
    fields: Sequence[ShownField] = ()
    trials: Sequence[ShownTrial] = ()
    """The best first."""
    best: str = ""
    """The best trial, in words."""
    wrong: str = ""
    """Why its log cannot be read; then there is nothing else."""


def runs_page(
    storage: Path, rows: Sequence[tuple[Overview, str]], out: Path, sweeps: Sequence[ShownSweep] = (), older: int = 0
) -> str:
    """Return the HTML of the page, which will be at `out`. `rows`: each run, with `running`, `stale` or nothing.

    `older`: how many sweeps there are besides those given.
    """
    ordered = sorted(rows, key=lambda row: row[0].began or "", reverse=True)
    runs = [_row(each, state, out) for each, state in ordered]
    there = Counter(run["state"] for run in runs)
    places = {each.path.name: number for number, (each, _) in enumerate(ordered)}
    return rendered(
        "runs.html.jinja",
        "runs.js",
        {"sweeps": [_drawn(sweep, places) for sweep in sweeps]},
        title=f"Runs in {printable(str(storage))}",
        sweeps=[_said(sweep, places) for sweep in sweeps],
        older=older,
        runs=runs,
        states=[(state, words, there[state]) for state, words in _STATES.items() if there[state]],
        choices=[
            (name, values)
            for name in _CHOSEN_BY
            if len(values := sorted({run["settings"][name] for run in runs if run["settings"][name]})) > 1
        ],
    )


def _row(run: Overview, state: str, out: Path) -> dict[str, Any]:
    state = state or run.ended
    report = report_of(run.path)
    config: Mapping[str, Any] = {}
    with suppress(OSError, ValueError):
        config = config_of(run.path / CONFIG_FILE)
    seconds = _between(run.began, run.last)
    values = {name: setting(config, path) for name, path in _SETTINGS.items()}
    return {
        "name": printable(run.path.name),
        # A relative address, in which a colon is encoded too: it names no scheme. A name may be no text.
        "report": quote(os.fsencode(os.path.relpath(report, out.absolute().parent))) if report.is_file() else None,
        "state": state,
        "status": _STATES.get(state, state),
        "curve": small_curve(some_losses(run.path / METRICS_FILE)),
        "settings": {name: "" if value is None else shown_value(value) for name, value in values.items()},
        # Of each column its label, its text, and the number by which it is sorted.
        "numbers": [
            ("step", f"{run.step:,}" + (f" of {run.steps:,}" if run.steps is not None else ""), run.step),
            ("loss", *_number(run.loss)),
            ("best evaluation", *_number(run.best[0] if run.best else None)),
            ("ranks", str(run.world or ""), run.world or 0),
            ("attempts", str(run.attempt or ""), run.attempt),
            ("took", "" if seconds is None else took(seconds), seconds or 0),
            ("began (UTC)", (run.began or "")[:16].replace("T", " "), run.began or ""),
        ],
    }


def _number(value: float | None) -> tuple[str, float | str]:
    return ("", "") if value is None or not math.isfinite(value) else (f"{value:.4f}", value)


def _between(began: str | None, last: str | None) -> float | None:
    with suppress(ValueError, TypeError, OverflowError):
        return max(0.0, (datetime.fromisoformat(last or "") - datetime.fromisoformat(began or "")).total_seconds())
    return None


# Sweeps in parallel coordinates.


def _said(sweep: ShownSweep, places: Mapping[str, int]) -> dict[str, Any]:
    """Return what the page says of a sweep in words. `places`: the rows of runs, by their names."""
    return {
        "name": _text(sweep.name, _NAME),
        "wrong": printable(sweep.wrong),
        "metric": _text(sweep.metric, _NAME),
        "order": "highest" if sweep.highest else "lowest",
        "best": printable(sweep.best),
        "left": max(0, len(sweep.fields) - _MOST_FIELDS),
        "trials": [
            (
                places.get(trial.run), printable(trial.run), _changes(sweep, trial),
                "" if trial.value is None else f"{trial.value:.5g}", f"{trial.step:,}", trial.state,
            )
            for trial in sweep.trials
        ],
    }  # fmt: skip


def _drawn(sweep: ShownSweep, places: Mapping[str, int]) -> dict[str, Any]:
    """Return what the page's script draws of a sweep: axes with their ticks, and of each trial its place on every axis,
    from 0 to 1, with its words, its colour and its row."""
    fields, metric = sweep.fields[:_MOST_FIELDS], _text(sweep.metric, _NAME)
    axes: list[dict[str, Any]] = []
    columns: list[list[float | None]] = []
    for field in fields:
        marks, found = _axis([trial.changes.get(field.name, _MISSING) for trial in sweep.trials], field)
        axes.append({"name": _text(field.name, _NAME), "ticks": marks})
        columns.append(found)
    values = [_MISSING if trial.value is None else trial.value for trial in sweep.trials]
    marks, found = _axis(values, ShownField(name=sweep.metric))
    axes.append({"name": metric, "ticks": marks})
    columns.append(found)
    ranked = sorted((trial.value for trial in sweep.trials if trial.value is not None), reverse=sweep.highest)
    first = {value: place for place, value in reversed(list(enumerate(ranked)))}
    lines = [
        {
            "words": _words(sweep, trial, metric),
            "row": places.get(trial.run),
            "at": [column[number] for column in columns],
            "grade": None if trial.value is None else first[trial.value] * _GRADES // len(ranked),
            "best": trial.best,
        }
        for number, trial in enumerate(sweep.trials)
    ]
    return {"name": _text(sweep.name, _NAME), "axes": axes, "lines": lines}


def _axis(values: Sequence[Any], field: ShownField) -> tuple[list[tuple[float, str]], list[float | None]]:
    """Return the ticks of an axis, each with its place, and where the values are on it; None: there is no value."""
    numbers = [value for value in values if value is not _MISSING]
    if all(is_number(value) and math.isfinite(value) for value in numbers):
        low, high = float(min(numbers, default=0)), float(max(numbers, default=0))
        logged = low > 0 and (field.logged or high / _DECADES > low)
        scale: Callable[[float], float] = math.log if logged else float

        def place(value: float) -> float:
            return _part(scale(value), scale(low), scale(high))

        marks = (log_ticks if logged else ticks)(low, high) if numbers else []
        places = [None if value is _MISSING else place(value) for value in values]
        return [(place(mark), _tick(mark)) for mark in marks], places
    texts = [None if value is _MISSING else _text(value, _CATEGORY) for value in values]
    used, listed = set(texts), (_text(value, _CATEGORY) for value in field.listed)
    there = dict.fromkeys(text for text in (*listed, *texts) if text is not None and text in used)
    where = {text: _part(number, 0, len(there) - 1) for number, text in enumerate(there)}
    return [(part, text) for text, part in where.items()], [None if text is None else where[text] for text in texts]


def _tick(value: float) -> str:
    """Return a number as an axis has it: 1e-5, not 1e-05."""
    digits, power, exponent = f"{value:.5g}".partition("e")
    return f"{digits}e{int(exponent)}" if power else digits


def _part(value: float, low: float, high: float) -> float:
    # Halves: a span of the largest floats would be infinite.
    whole = high / 2 - low / 2
    return round((value / 2 - low / 2) / whole, 4) if whole else 0.5


def _changes(sweep: ShownSweep, trial: ShownTrial) -> str:
    names = [field.name for field in sweep.fields[:_MOST_FIELDS] if field.name in trial.changes]
    return ", ".join(f"{_text(name, _NAME)}={_text(trial.changes[name], _VALUE)}" for name in names)


def _words(sweep: ShownSweep, trial: ShownTrial, metric: str) -> str:
    value = f"no {metric} yet" if trial.value is None else f"{metric} {trial.value:.5g} after step {trial.step:,}"
    changes = _changes(sweep, trial)
    words = f"{printable(trial.run)}{f': {changes}' if changes else ''}; {value}, {trial.state}"
    return f"{words}; the best" if trial.best else words


def _text(value: Any, most: int) -> str:
    return printable(shown_value(value, most))
