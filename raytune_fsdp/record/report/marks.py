"""Show a run's events as marks under the loss curve: attempts, failures, saves, spikes."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from raytune_fsdp.base.redaction import redact
from raytune_fsdp.base.untrusted import is_count
from raytune_fsdp.record import names
from raytune_fsdp.record.console import event_in_words
from raytune_fsdp.record.lines import seconds_of
from raytune_fsdp.record.report.history import History
from raytune_fsdp.record.report.spikes import Spike

_LANES = {
    "attempts": {names.ATTEMPT_STARTED},
    "resizes": {names.RESIZED, names.DRAINED},
    "failures": {
        names.ATTEMPT_FAILED, names.TRAINING_FAILED, names.SAVE_FAILED, names.EXPORT_FAILED, names.EXPORTED_ALONE,
        names.EVALUATION_FAILED,
        names.CHECKPOINT_DAMAGED, names.RECORD_REPAIRED,
        names.REGISTRY_REPAIRED, names.NOT_SENT_TO_MLFLOW,
    },
    "slow ranks": {names.SLOW_RANK},
    "skipped": set(),
    "spikes": set(),
    "evaluations": set(),
    "audits": {names.AUDITED},
    "saves": {names.SAVED, names.SAVE_POSTPONED, names.EXPORTED},
    "changes": {
        names.SETTINGS_CHANGED, names.KERNELS_CHANGED, names.MEMORY_SHORT, names.NO_ROOM_TO_SAVE, names.ROOM_MADE,
        names.NOTICE_SHORT, names.STOPPED_EARLY, names.BITS_MAY_DIFFER,
    },
}  # fmt: skip
"""Rows of marks, from the top, and the events in each."""
_PLACES = 200
"""Places in a row. Marks closer to each other than a 200th of the run are drawn as one."""
_WORDS = 400
_MOST_ATTEMPTS, _MOST_VALUES = 200, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisMark:
    """Something that happened at a step."""

    step: int
    time: float
    """Seconds since 1970; NaN if it is not known."""
    event: str
    fields: Mapping[str, Any]

    @property
    def words(self) -> str:
        """What happened, in a short text without secrets."""
        try:
            text = event_in_words(self.event, redact(dict(self.fields)))
        except (TypeError, ValueError, LookupError, OverflowError):  # fields that no version of ours has written
            text = f"{self.event}, with fields that have no meaning"
        return text if len(text) <= _WORDS else f"{text[:_WORDS]}…"


def marks_of(history: History) -> list[AxisMark]:
    """Return every event of a run, at the step where it belongs."""
    resumed_from = {
        event["attempt"]: event["fields"].get("resumed_from")
        for event in history.events
        if event["event"] == names.ATTEMPT_STARTED
    }
    found = []
    ended = np.nan_to_num(history.time, nan=-math.inf)
    for event in history.events:
        fields, name, time = event["fields"], event["event"], seconds_of(event)
        at = fields.get({names.ATTEMPT_STARTED: "resumed_from", names.ATTEMPT_FAILED: "last_step"}.get(name, "step"))
        if name == names.RESIZED:  # recorded after the first step of the new size
            at = resumed_from.get(event["attempt"])
        if not is_count(at):
            # The last step that had ended then. The times of steps that a resume cut are of their second training.
            index = int(np.searchsorted(ended, time, side="right")) if not math.isnan(time) else 0
            at = int(history.steps[index - 1]) if index else 0
        found.append(AxisMark(step=at, time=time, event=name, fields=fields))
    return found


def lanes(history: History, marks: Iterable[AxisMark], found: Iterable[Spike]) -> list[dict[str, Any]]:
    """Return the rows that have a mark, ready for JSON: the name, and step, time and words of each mark."""
    lane_of = {event: name for name, events in _LANES.items() for event in events}
    rows: dict[str, list[AxisMark]] = {name: [] for name in _LANES}
    for mark in marks:
        if mark.event in lane_of:
            rows[lane_of[mark.event]].append(mark)
    # From the lines, of which every step has one; a step that was trained twice has two events.
    for i in np.flatnonzero(history.columns["skipped"]):
        step = int(history.steps[i])
        fields: dict[str, Any] = {
            "step": step,
            **{key: float(history.columns[key][i]) for key in ("loss", "grad_norm")},
        }
        rows["skipped"].append(
            AxisMark(step=step, time=float(history.time[i]), event=names.SKIPPED_UPDATE, fields=fields)
        )
    for each in found:
        time = float(history.time[np.searchsorted(history.steps, each.step)])
        see = step_command(history, each.step)
        fields = {"step": each.step, "loss": each.loss, "before": each.before, "see": see}
        rows["spikes"].append(AxisMark(step=each.step, time=time, event="loss spike", fields=fields))
    rows["evaluations"] += _evaluations(history)
    last = max([1, *(int(step) for step in history.steps[-1:])])
    drawn: list[dict[str, Any]] = []
    for name, row in rows.items():
        by_step = sorted(row, key=lambda mark: mark.step)
        near = groupby(by_step, key=lambda mark: mark.step * _PLACES // last if last > _PLACES else mark.step)
        if row:
            drawn.append({"name": name, "marks": [_together([*group], history) for _, group in near]})
        if row and name == "attempts":
            drawn[-1]["spans"] = [*_spans(history)]
    return drawn


def _evaluations(history: History) -> Iterator[AxisMark]:
    values: dict[int, dict[str, Any]] = {}
    times: dict[int, float] = {}
    for metric, points in history.evaluations.items():
        for step, value, time in points if not names.is_of_subject(metric) else ():
            if len(there := values.setdefault(step, {"step": step})) <= _MOST_VALUES:
                there[metric] = value
            times[step] = time
    for step, fields in values.items():
        yield AxisMark(step=step, time=times[step], event=names.EVALUATED, fields=fields)


def _spans(history: History) -> Iterator[list[Any]]:
    """Yield the steps of each attempt that were kept, the first and the last, the same in seconds, and its ranks."""
    attempts, ranks = history.columns["attempt"], history.columns["world_size"]
    known = np.flatnonzero(np.isfinite(attempts))
    edges = np.flatnonzero(np.diff(attempts[known])) + 1
    groups = np.split(known, edges) if len(known) else []
    for group in groups if len(groups) <= _MOST_ATTEMPTS else ():
        first, last = int(group[0]), int(group[-1])
        size = ranks[last]
        # The first step began where the one before ended.
        begin = history.start if first == 0 else history.time[first - 1]
        seconds = [
            round(max(0.0, float(at - history.start)), 1) if math.isfinite(at - history.start) else None
            for at in (begin, history.time[last])
        ]
        label = (
            f"{size:.0f} rank{'s' if size != 1 else ''}" if math.isfinite(size) else f"attempt {attempts[first]:.0f}"
        )
        yield [int(history.steps[first]) - 1, int(history.steps[last]), *seconds, label]


def step_command(history: History, step: int) -> str:
    """Return the command that shows what was in a step."""
    return f"raytune-fsdp step {shlex.quote(str(history.path))} {step}"


def _together(marks: list[AxisMark], history: History) -> list[Any]:
    first, last = marks[0], marks[-1]
    start = history.start
    time = None if math.isnan(first.time - start) else max(0, round(first.time - start))
    words = first.words
    if len(marks) > 1:
        more = f" up to step {last.step:,}" if last.step > first.step else ""
        words += f" (and {len(marks) - 1:,} more{more}; the last: {last.words})"
    return [first.step, time, words]
