"""Make the page about all runs of a storage: a row for each, with filters, and links to their reports.

As on the page about a run, every text may be a stranger's.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from raytune_fsdp.base.untrusted import printable
from raytune_fsdp.plan.run_dir import CONFIG_FILE, METRICS_FILE, report_of
from raytune_fsdp.record.console import took
from raytune_fsdp.record.report.drawn import small_curve
from raytune_fsdp.record.report.facts import shown_value
from raytune_fsdp.record.report.history import config_of, setting
from raytune_fsdp.record.report.overview import Overview, some_losses
from raytune_fsdp.record.report.page import rendered

_SETTINGS = {"model": "model.path", "method": "method.type", "lr": "optim.lr", "batch": "train.global_batch"}
_CHOSEN_BY = ("model", "method")
"""Settings by which runs are chosen."""
_STATES = {"running": "running", "finished": "done", "interrupted": "interrupted", "stale": "stale", "failed": "failed"}


def runs_page(storage: Path, rows: Sequence[tuple[Overview, str]], out: Path) -> str:
    """Return the HTML of the page, which will be at `out`. `rows`: each run, with `running`, `stale` or nothing."""
    runs = [_row(each, state, out) for each, state in sorted(rows, key=lambda row: row[0].began or "", reverse=True)]
    there = Counter(run["state"] for run in runs)
    return rendered(
        "runs.html.jinja",
        "runs.js",
        {},
        title=f"Runs in {printable(str(storage))}",
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
