"""Words and tables of the page about a run: its status, attempts, evaluations, answers, settings and predictions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
from pydantic import ValidationError

from raytune_fsdp.base.redaction import REDACTED, redact_shapes
from raytune_fsdp.base.untrusted import is_count
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.recorded import differing
from raytune_fsdp.record import names
from raytune_fsdp.record.console import gibibytes, short, took
from raytune_fsdp.record.lines import is_number
from raytune_fsdp.record.report.history import History
from raytune_fsdp.record.report.marks import AxisMark
from raytune_fsdp.record.report.overview import ended_as
from raytune_fsdp.record.tracker import flatten

_MOST_ROWS = 300
_QUIET = {
    names.ANSWERED, names.SAVED, names.KERNELS, names.SHARDED, names.RANKS_JOINED, names.SKIPPED_UPDATE,
    names.PREDICTED, names.PREDICTION_CHECKED, names.AUDITED,
}  # fmt: skip
"""Events that are shown elsewhere on the page, or that every attempt has."""
_ANSWER_STEPS, _PROMPTS, _ANSWER = 8, 20, 1000
_VALUE = 300
_RELIABILITIES = 12


Figure = tuple[str, str, str]
"""A key figure: label, value, and a few words about it."""


def key_figures(history: History) -> Iterator[Figure]:
    """Yield the key figures of a run: at most eight, so that they fold into full rows."""
    columns, steps = history.columns, len(history.steps)
    total, last = history.planned("steps"), int(history.steps[-1]) if steps else 0
    yield "step", f"{last:,}", f"of {total:,}" if total else ""
    if steps:
        yield "loss", f"{columns['loss'][-1]:.4f}", f"{columns['loss'][0]:.4f} at first" if steps > 1 else ""
    found = best(history)
    if found is not None:
        yield "best evaluation", f"{found[1]:.4f}", f"at step {found[0]:,}"
    if steps:
        tokens, targets = float(columns["tokens"].sum()), float(columns["target_tokens"].sum())
        yield "tokens", short(tokens), f"{f'{targets / tokens:.0%}' if tokens else 'none'} of them trained on"
        if (samples := samples_seen(history)) is not None:
            yield "samples seen", short(samples), "packed"
    seconds = columns["step_seconds"]
    if np.isfinite(seconds).any():
        yield "training time", took(float(np.nansum(seconds))), f"{took(float(np.nanmedian(seconds)))} a step"
    if history.has("tokens_per_second"):
        mfu = f"{float(np.nanmedian(columns['mfu'])):.1%} MFU" if history.has("mfu") else ""
        yield "tokens a second", short(float(np.nanmedian(columns["tokens_per_second"]))), mfu
    attempts = len(_started(history)) or int(steps > 0)
    tries = f"{attempts} attempt{'s' * (attempts != 1)}"
    if history.has("world_size"):
        sizes = columns["world_size"][np.isfinite(columns["world_size"])]
        low, high = int(sizes.min()), int(sizes.max())
        yield "ranks", str(low) if low == high else f"{low} to {high}", tries


def samples_seen(history: History) -> int | None:
    """Return how many packed samples are trained; None if the plan does not say."""
    batch, total = history.planned("global_batch"), history.planned("total_samples")
    if batch is None or not len(history.steps):
        return None
    samples = int(history.steps[-1]) * batch
    return min(samples, total or samples)


def status(history: History, seen: str = "") -> tuple[str, str]:
    """Return how a run stands: a word for its colour, and a short text.

    `seen`: `running` or `stale`, if a look at its lock has found that; it is not on record.
    """
    total, last = history.planned("steps"), int(history.steps[-1]) if len(history.steps) else 0
    ended = seen or ended_as(history.events, total)
    at = f"at step {last:,}" + (f" of {total:,}" if total else "")
    early = [event["fields"] for event in history.events if event["event"] == names.STOPPED_EARLY]
    if ended in ("finished", "interrupted") and early and early[-1].get("step") == last:
        return "finished", f"done {at}: its evaluations ended it"
    words = {
        "finished": f"done: all {last:,} steps" if last == total else f"done {at}",
        "failed": f"failed {at}",
        "running": f"running, {at}",
        "stale": f"interrupted {at}: its command was killed, or its machine is lost",
    }
    return ended, words.get(ended, f"interrupted {at}" if last else "interrupted before the first step")


def best(history: History) -> tuple[int, float] | None:
    """Return step and value of the best evaluation by `checkpoint.best`; without it, by the lowest mean loss."""
    named = history.setting("checkpoint.best")
    if isinstance(named, str) and named in history.evaluations:
        points = [(step, value) for step, value, _ in history.evaluations[named]]
        sign = -1 if names.highest_is_best(named, history.setting("checkpoint.best_is")) else 1
    else:
        sign = 1
        losses: dict[int, list[float]] = {}
        for metric, values in history.evaluations.items():
            if metric.endswith("/loss"):
                for step, value, _ in values:
                    losses.setdefault(step, []).append(value)
        points = [(step, sum(values) / len(values)) for step, values in losses.items()]
    finite = [point for point in points if math.isfinite(point[1])]
    return min(finite, key=lambda point: (sign * point[1], -point[0]), default=None)


def attempts(history: History) -> list[tuple[int, str, str, str, str, str]]:
    """Return the attempts on record; of very many, the first and the last.

    Of each its number, when it began, its ranks, the step that it went on from, the last step that it trained and no
    later attempt repeated, and its end.
    """
    started = _started(history)
    failed = {event["attempt"]: event["fields"] for event in history.events if event["event"] == names.ATTEMPT_FAILED}
    left = {event["attempt"]: event["fields"] for event in history.events if event["event"] == names.ATTEMPT_ENDED}
    last_step = dict(zip(history.columns["attempt"].tolist(), history.steps.tolist(), strict=True))
    whole = history.planned("steps")
    found = []
    for number, event in sorted(started.items()):
        cause, last = failed.get(number), last_step.get(number)
        ended = "the last step" if last is not None and last == whole else ""
        ended = ended or shown_value(left.get(number, {}).get("status", "")).replace("_", " ")
        if cause is not None:
            where = f"rank {cause['rank']} on {cause.get('node')}, " if cause.get("rank") is not None else ""
            ended = "failed: " + shown_value(f"{where}{cause.get('cause', '')}")
        began = event.get("time")
        found.append((
            number,
            began[:19].replace("T", " ") if isinstance(began, str) else "",
            shown_value(event["fields"].get("world_size", "")),
            shown_value(event["fields"].get("resumed_from", "")),
            "" if last is None else f"{int(last):,}",
            ended,
        ))  # fmt: skip
    return some_rows(found)


def _started(history: History) -> dict[int, Mapping[str, Any]]:
    return {event["attempt"]: event for event in history.events if event["event"] == names.ATTEMPT_STARTED}


def events(marks: Sequence[AxisMark]) -> list[tuple[str, str, str]]:
    """Return time, step and words of events, without those that the page shows elsewhere."""
    loud = some_rows([mark for mark in marks if mark.event not in _QUIET])
    return [(moment(mark.time), f"{mark.step:,}", mark.words) for mark in loud]


def evaluations(history: History) -> list[tuple[str, str, str, str]]:
    """Return metric, first, best and last value. Which is best follows from the metric's name, as on a terminal."""
    rows = []
    for metric, points in history.evaluations.items():
        if names.of_calibration(metric) is not None:
            continue
        finite = [point for point in points if math.isfinite(point[1])]
        sign = -1 if names.higher_is_better(metric) else 1
        top = min(finite, key=lambda point: (sign * point[1], -point[0]), default=points[0])
        first, best_one, last = (f"{value:.4f} (step {step:,})" for step, value, _ in (points[0], top, points[-1]))
        rows.append((metric, first, "" if names.is_neutral(metric) else best_one, last))
    return rows


def reliability(history: History) -> dict[str, list[tuple[float, float]]]:
    """Return the reliability curve of each dataset at its last evaluation: mean confidence, and the share right."""
    last: dict[str, int] = {}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for metric, points in history.evaluations.items():
        if (place := names.of_calibration(metric)) is not None:
            dataset, tenth, kind = place
            step, value, _ = points[-1]
            if step > last.get(dataset, -1):
                last[dataset], found[dataset] = step, {}
            if step == last[dataset] and 0 <= value <= 1:
                found[dataset].setdefault(tenth, {})[kind] = value
    return {
        dataset: sorted((each["confidence"], each["right"]) for each in tenths.values() if len(each) == 2)
        for dataset, tenths in list(found.items())[:_RELIABILITIES]
    }


def answers(history: History) -> dict[str, Any]:
    """Return the answers to the prompts side by side: of the first step, of the last, and of some steps between."""
    said: dict[str, dict[int, str]] = {}
    for event in history.events:
        fields = event["fields"]
        prompt, answer, step = fields.get("prompt"), fields.get("answer"), fields.get("step")
        known = event["event"] == names.ANSWERED and isinstance(prompt, str) and isinstance(answer, str)
        if known and is_count(step) and (prompt in said or len(said) < _PROMPTS):
            said.setdefault(prompt, {})[step] = answer
    steps = sorted({step for by_step in said.values() for step in by_step})
    if len(steps) > _ANSWER_STEPS:
        steps = [steps[i] for i in np.linspace(0, len(steps) - 1, _ANSWER_STEPS).round().astype(int)]
    rows = [
        (
            shown_value(prompt, _ANSWER),
            # None: it was not asked.
            [shown_value(by_step[step], _ANSWER) if step in by_step else None for step in steps],
        )
        for prompt, by_step in said.items()
    ]
    return {"steps": steps, "rows": rows}


def settings(history: History) -> list[tuple[str, str, str]]:
    """Return path, value and default of every setting that differs from its default."""
    tree = dict(history.config)
    cluster = tree.get("cluster")
    if isinstance(cluster, dict) and isinstance(cluster.get("env"), dict):
        # The marks in place of secrets would be looked up in the environment, which may not have them here.
        env = {name: "" if value == REDACTED else value for name, value in cluster["env"].items()}
        tree["cluster"] = {**cluster, "env": env}
    try:
        found = differing(FinetuneConfig.model_validate(tree))
    except ValidationError:  # another version wrote it
        found = {path: (value, "?") for path, value in flatten(history.config).items()}
    rows = [(path[:_VALUE], shown_value(value), shown_value(default)) for path, (value, default) in found.items()]
    return rows[:_MOST_ROWS]


def shown_value(value: object, most: int = _VALUE) -> str:
    """Return a value of a config or an event as a text, without secrets and shortened."""
    if not isinstance(value, str):
        value = json.dumps(value, default=str, ensure_ascii=False)
    text = str(redact_shapes(value))
    return text if len(text) <= most else f"{text[:most]}…"


def moment(seconds: float) -> str:
    """Return a time in UTC, to the second; an empty text if it is not known."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError):  # NaN, or after the year 9999 in UTC
        return ""


def some_rows(rows: list[Any]) -> list[Any]:
    """Shorten a long list to `_MOST_ROWS`: a third of them from its beginning, the rest from its end."""
    first = _MOST_ROWS // 3
    return rows if len(rows) <= _MOST_ROWS else rows[:first] + rows[first - _MOST_ROWS :]


# A table of the page: what was predicted before the run started, compared with what it measured.


def predictions(history: History) -> list[tuple[str, str, str, str]]:
    """Return name, predicted value, measured value and relative error of each prediction, by the last events."""
    predicted = (event["fields"] for event in reversed(history.events) if event["event"] == names.PREDICTED)
    said: Mapping[str, Any] = next(predicted, {})
    measured: dict[str, Any] = {}
    for event in history.events:
        if event["event"] == names.PREDICTION_CHECKED:
            measured |= event["fields"]
        elif event["event"] == names.SAVED:
            measured["checkpoint_bytes"] = event["fields"].get("bytes")
    rows = []
    for key, what in (
        ("kept_bytes", "memory that a rank keeps from step to step"),
        ("peak_bytes", "memory of tensors at the most"),
        ("checkpoint_bytes", "a checkpoint"),
        ("step_seconds", "time of a step"),
    ):
        one, other = said.get(key), measured.get(key)
        if is_number(one) and is_number(other) and other:
            rows.append((what, _shown(key, one), _shown(key, other), _off(one / other - 1)))
        elif is_number(one):
            rows.append((what, _shown(key, one), "not measured", ""))
    return rows


def _shown(key: str, value: Any) -> str:
    return took(value) if key == "step_seconds" else gibibytes(int(value))


def _off(error: float) -> str:
    """Say how far a prediction is off: fewer digits than it has, as no more are to be relied on."""
    if abs(error) < 0.005:
        return "as predicted"
    return f"{abs(error):.0%} {'too much' if error > 0 else 'too little'}"
