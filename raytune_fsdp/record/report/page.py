"""Make the page about one run or several: one file that needs nothing else, made from run directories alone.

Everything it shows may be a stranger's text. The template escapes it, the script sets it as text, and the page forbids
itself any other script, style or address (Content-Security-Policy).
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from raytune_fsdp.base.durable import make_private, replace_at_once, take_from_others
from raytune_fsdp.base.errors import UserError, in_one_line
from raytune_fsdp.base.untrusted import read_file
from raytune_fsdp.config.text import dump
from raytune_fsdp.plan.run_dir import CONFIG_FILE, curve_of, report_of
from raytune_fsdp.record.report import ancestors, facts, surroundings
from raytune_fsdp.record.report.charts import charts_of
from raytune_fsdp.record.report.curves import can_draw, plot
from raytune_fsdp.record.report.difference import difference
from raytune_fsdp.record.report.drawn import bars, reliability, static_curves
from raytune_fsdp.record.report.history import History, read_history
from raytune_fsdp.record.report.marks import lanes, marks_of, step_command
from raytune_fsdp.record.report.rows import rows_of
from raytune_fsdp.record.report.spikes import DEVIATIONS, WINDOW, spikes
from raytune_fsdp.record.tracker import flatten

logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent
_MOST_RUNS = 8
_MOST_CAUSES, _MOST_SETTINGS = 40, 300
_MOST_BYTES = 1 << 24
_CONFIG = 100_000
"""The most characters of a config that is shown as a whole."""
_MADE = re.compile(r"Page made [0-9: -]+ UTC")


def make_curve(run_dir: Path) -> Path | None:
    """Draw the loss curve in its place. Returns None without matplotlib, or, with a warning, if it cannot be drawn."""
    if not can_draw():
        return None
    try:
        path = curve_of(run_dir)
        make_private(path.parent)
        plot(run_dir, path)
        take_from_others(path)
        return path
    except Exception as error:  # whatever it is, the model is trained
        logger.warning("there is no loss curve of %s: %s", run_dir, in_one_line(error))
        return None


def make_report(run_dir: Path) -> Path | None:
    """Write the page in its place in a run directory. Returns None, with a warning, if it fails: the run goes on."""
    try:
        path, text, there = report_of(run_dir), page([run_dir]), ""
        with suppress(OSError, ValueError):
            there = read_file(path, limit=_MOST_BYTES).decode()
        # The same command on a complete run makes the page again: a new date alone would send it to MLflow once more.
        if _MADE.sub("", text) != _MADE.sub("", there):
            write_page(path, text, private=True)
        return path
    except Exception as error:  # whatever it is, the model is trained
        logger.warning("there is no report of %s: %s", run_dir, in_one_line(error))
        return None


def page(run_dirs: Sequence[Path], seen: Mapping[Path, str] | None = None) -> str:
    """Return the HTML of a page about one run, or one that compares several. UserError if one is no run directory.

    `seen`: the runs that are `running` or `stale` by their locks, which are not looked at here.
    """
    if len(run_dirs) > _MOST_RUNS:
        raise UserError(f"{len(run_dirs)} runs: a page compares {_MOST_RUNS} at most; give fewer")
    histories = [read_history(path.absolute()) for path in run_dirs]
    stands = [facts.status(history, (seen or {}).get(history.path, "")) for history in histories]
    with np.errstate(all="ignore"):  # a record may have numbers whose sum is infinite
        drawn = charts_of(histories)
        said = _of_one(histories[0], stands[0], drawn) if len(histories) == 1 else _of_several(histories, stands, drawn)
    by_id = {chart["id"]: chart for chart in drawn["charts"]}
    return rendered(
        "page.html.jinja",
        "page.js",
        drawn,
        drawn=list(by_id),
        metrics=[name for name in by_id if name.startswith("eval")],
        timed=all(axis["time"] for axis in drawn["axes"]),
        static=static_curves(by_id["loss"], drawn["axes"]) if "loss" in by_id else "",
        **said,
    )


def rendered(template: str, script: str, data: Any, place: Path = _HERE, **said: Any) -> str:
    """Return a page from a template, with its style, its script, and the data that the script reads.

    `place`: the directory of all three.
    """
    style, code = ((place / name).read_text(encoding="utf-8") for name in ("page.css", script))
    environment = Environment(loader=FileSystemLoader(place), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return environment.get_template(template).render(
        made=facts.moment(time.time()),
        style=Markup(style),
        style_hash=hash_of(style),
        script=Markup(code),
        script_hash=hash_of(code),
        # It cannot end the element it is in: `</script>` in a name stays text.
        data=Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")),
        **said,
    )


def write_page(path: Path, text: str, *, private: bool) -> None:
    """Write a page to its place. `private`: that is in a run directory. Raises UserError if it cannot be written."""
    try:
        if private:
            make_private(path.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_at_once(path, text.encode(errors="replace"), private=private)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror or error}; choose another place with --out"
        ) from None


def _of_one(history: History, stands: tuple[str, str], drawn: dict[str, Any]) -> dict[str, Any]:
    found, many = spikes(history.steps, history.columns["loss"])
    marks = marks_of(history)
    data = rows_of(history, marks)
    drawn["lanes"] = lanes(history, marks, found)
    run = {
        "version": history.version,
        "status": stands,
        "problems": history.problems,
        "facts": list(facts.key_figures(history)),
        "spikes": [
            (f"{each.step:,}", f"{each.loss:.4f}", f"{each.before:.4f}", step_command(history, each.step))
            for each in found
        ],
        "spiked": many,
        "evaluations": facts.evaluations(history),
        "reliability": [
            (dataset, reliability(points, dataset)) for dataset, points in facts.reliability(history).items() if points
        ],
        "answers": facts.answers(history),
        "attempts": facts.attempts(history),
        "events": facts.events(marks),
        "predictions": facts.predictions(history),
        "data": data,
        "settings": facts.settings(history),
        "config": dump(history.config) if len(repr(history.config)) <= _CONFIG else f"It is long: see {CONFIG_FILE}.",
        "time": surroundings.time_of(history),
        "starts": surroundings.starts(history),
        "chain": ancestors.rows_of_chain(history.path),
        "audits": surroundings.audits(history),
        "machines": surroundings.machines(history),
        "places": list(surroundings.places(history)),
    }
    return {
        "title": history.name,
        "run": run,
        "lengths": bars(data["bars"], data["ticks"], data["most"]) if data["bars"] else "",
        "deviations": f"{DEVIATIONS:g}",
        "window": WINDOW,
    }


def _of_several(
    histories: Sequence[History], stands: Sequence[tuple[str, str]], drawn: dict[str, Any]
) -> dict[str, Any]:
    drawn["lanes"] = []
    names = [history.name for history in histories]
    if len(set(names)) < len(names):  # runs of two storages: name them by their directories
        names = [str(history.path) for history in histories]
    said = [
        {
            "status": words,
            **{label: f"{value} ({more})" if more else value for label, value, more in facts.key_figures(history)},
        }
        for history, (_, words) in zip(histories, stands, strict=True)
    ]
    labels = dict.fromkeys(label for each in said for label in each)
    flat: list[Mapping[str, object]] = [flatten(history.config) for history in histories]
    rows = [(key, [each.get(key) for each in flat]) for key in dict.fromkeys(key for each in flat for key in each)]
    differing = [row for row in rows if row[0] != "run.name" and any(value != row[1][0] for value in row[1])]
    return {
        "title": " and ".join(names) if len(names) == 2 else ", ".join(names),
        "run": None,
        "names": names,
        "facts": [(label, *(each.get(label, "") for each in said)) for label in labels],
        "differences": [
            _parted(histories[0], other, (names[0], name)) for other, name in zip(histories[1:], names[1:], strict=True)
        ],
        "settings": [(key, *map(facts.shown_value, values)) for key, values in differing[:_MOST_SETTINGS]],
    }


def _parted(a: History, b: History, names: tuple[str, str]) -> dict[str, Any]:
    found = difference(a.path, b.path)
    return {
        "title": f"{names[0]} and {names[1]}",
        "names": names,
        "step": found.step,
        "words": found.words,
        "pairs": [(key, *map(facts.shown_value, values)) for key, values in found.keys.items()],
        "causes": [cause.words for cause in found.causes[:_MOST_CAUSES]],
        "unknown": [*found.unknown, *found.related],
    }


def hash_of(text: str) -> str:
    """Return the hash of a script or a style, by which a Content-Security-Policy allows it and no other."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
