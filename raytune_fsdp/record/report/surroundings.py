"""What is around the curves of a run: with what and where it was trained, how long each part took, what was audited."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from raytune_fsdp.base.errors import RaytuneError
from raytune_fsdp.base.mark import chosen_by_this_user
from raytune_fsdp.base.redaction import redact_text
from raytune_fsdp.base.untrusted import is_count
from raytune_fsdp.base.urls import is_url
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, committed
from raytune_fsdp.checkpoint.location import storage_at
from raytune_fsdp.checkpoint.manifest import read_manifest
from raytune_fsdp.plan.run_dir import CHECKPOINTS, MARK_FILE, MODEL_FILES, RunDir, checkpoints_of
from raytune_fsdp.record import names
from raytune_fsdp.record.console import took
from raytune_fsdp.record.lines import is_number, seconds_of
from raytune_fsdp.record.report.facts import shown_value
from raytune_fsdp.record.report.history import History

_LEAST_SHARE = 0.0005
"""A part of the time that is less is left out."""
_MOST, _MOST_ATTEMPTS, _COMMAND = 20, 300, 4000


def machines(history: History) -> list[tuple[str, str]]:
    """Return what the attempts were trained with and on: versions, device, git commit, command, host, user."""
    computed = {
        event["attempt"]: event["fields"] for event in history.events if event["event"] == names.ATTEMPT_STARTED
    }
    found: dict[str, dict[int, str]] = {}  # by label, then by attempt
    for words_of, by_attempt in ((_computed, computed), (_started, history.started_by)):
        order = sorted(by_attempt)
        if len(order) > 2 * _MOST_ATTEMPTS:  # few of them are shown, and to redact the words of many takes minutes
            order = order[:_MOST_ATTEMPTS] + order[-_MOST_ATTEMPTS:]
        for attempt in order:
            for label, text in words_of(by_attempt[attempt]):
                found.setdefault(label, {})[attempt] = text
    return [(label, _by_attempt(texts)) for label, texts in found.items()]


def _computed(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for label, key in (("versions", "versions"), ("packages with kernels", "packages")):
        if isinstance(there := fields.get(key), dict) and any(there.values()):
            installed = [(name, each) for name, each in there.items() if each][:_MOST]
            yield label, ", ".join(f"{shown_value(name)} {shown_value(each)}" for name, each in installed)
    if fields.get("device") is not None:
        threads, kind = fields.get("threads"), fields.get("instructions")
        more = f", {kind}" if isinstance(kind, str) else ""
        more += f", {threads} threads a rank" if is_count(threads) else ""
        yield "device", shown_value(f"{fields['device']}{more}")


def _started(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    labels = {"python": "Python", "command": "command", "directory": "started in", "host": "on host", "user": "by user"}
    for key, label in labels.items():
        if isinstance(text := fields.get(key), str):
            if len(text) > 2 * _COMMAND:  # to redact megabytes takes long; cut between words, as secrets are words
                text = text[: 2 * _COMMAND].rpartition(" ")[0]
            yield label, shown_value(redact_text(text), most=_COMMAND)
    if isinstance(commit := fields.get("commit"), str) and len(commit) < _COMMAND:
        changed = fields.get("uncommitted")
        more = ", with changes that are not committed" if changed is True else ", nothing changed"
        yield "git commit", shown_value(commit) + (more if isinstance(changed, bool) else "")


def _by_attempt(texts: Mapping[int, str]) -> str:
    """Return a value that may differ between attempts: as it is, or with the attempts from which on it holds."""
    changes: list[tuple[int, str]] = []
    for attempt, text in sorted(texts.items()):
        if not changes or text != changes[-1][1]:
            changes.append((attempt, text))
    later = changes[1:] if len(changes) <= _MOST else [changes[-1]]
    return "; ".join([changes[0][1], *(f"from attempt {attempt} on {text}" for attempt, text in later)])


# Where the results are, and their digest.


def newest_checkpoint(run: Path) -> tuple[CommittedCheckpoint | None, str]:
    """Return a run's newest checkpoint; None, with the reason, if it has none at a place that may be looked into."""
    place, mark = checkpoints_of(run.absolute()), run / MODEL_FILES / MARK_FILE
    # A run directory may be a stranger's: do not ask addresses that it names, or look into other directories.
    own = place == str(run.absolute() / CHECKPOINTS) or f"checkpoints_at={place}" in chosen_by_this_user(mark)
    if is_url(place) or not own:
        return None, f"its checkpoints are at {place}"
    there = committed(place)
    return (there[-1], "") if there else (None, "it has no checkpoint")


def places(history: History) -> Iterator[tuple[str, str]]:
    """Yield where the results of a run are, and the digest of its newest checkpoint."""
    run = history.path
    yield "run directory", str(run)
    export = RunDir(run, str(run / CHECKPOINTS)).export
    if export.is_dir():
        yield "export", str(export)
    others = [event["fields"].get("path") for event in history.events if event["event"] == names.EXPORTED]
    if others:
        yield "exports during training", ", ".join(shown_value(path) for path in others[-_MOST:])
    with suppress(RaytuneError, OSError, ValueError):  # storage that is away: the page can do without
        newest, why = newest_checkpoint(run)
        if newest is None:
            yield "newest checkpoint", why
            return
        yield "newest checkpoint", newest.path
        digest = read_manifest(storage_at(newest.root), newest.name).digest
        if digest:
            yield f"digest of the weights after step {newest.step:,}", digest["weights"]
            yield "digest with the optimizer's state and the place in the data", digest["everything"]


# How long each part took.

_ENDS = {names.ATTEMPT_ENDED, names.ATTEMPT_FAILED}
_SIGNS = _ENDS | {names.FIRST_STEP, names.SAVED}
"""Events that an attempt was there for. Others may be put on record later, by another command."""


def wall_time(history: History) -> list[tuple[str, str, str]]:
    """Return each part of the time from the first attempt's start to the last one's end, its duration and its share.

    Empty if the record does not say when steps ended, or of which attempt they are.
    """
    columns, times = history.columns, history.time
    if len(times) and not np.any(np.isfinite(columns["attempt"]) & np.isfinite(times)):
        return []
    spent: dict[str, float] = {}
    began, over, ended = _bounds(history)
    lost = _lost(history)
    ends = -math.inf
    attempts = sorted(began)[:_MOST_ATTEMPTS]
    for attempt, following in zip_longest(attempts, attempts[1:]):
        mine = np.flatnonzero((columns["attempt"] == attempt) & np.isfinite(times))
        if math.isfinite(ends):
            _add(spent, "between attempts", began[attempt] - ends)
        ends = over.get(attempt, began[attempt])
        until = float(times[mine[-1]]) if len(mine) else ends
        if attempt not in ended and following is not None:
            # Killed: its last steps are on record only as what the next attempt has lost.
            ends = max(ends, min(until + lost[following], began[following]))
        if not len(mine):
            _add(spent, "attempts of which no step remains", ends - began[attempt])
            continue
        first = int(mine[0])
        steps = float(np.nansum(columns["step_seconds"][mine]))
        start = float(times[first] - np.nan_to_num(columns["step_seconds"][first]))
        waited = min(steps, float(np.nansum(columns["data_seconds"][mine])))
        ends = max(ends, until)
        _add(spent, "before the first step", start - began[attempt])
        _add(spent, "computing steps", steps - waited)
        _add(spent, "waiting for data", waited)
        _add(spent, "between steps: evaluations, saves, digests", until - start - steps)
        after = "after the last step" if following is None else "steps that were trained again, and ends of attempts"
        _add(spent, after, ends - until)
    whole = sum(spent.values())
    rows = [(part, took(seconds), f"{seconds / whole:.1%}") for part, seconds in spent.items() if
            whole and seconds / whole >= _LEAST_SHARE]  # fmt: skip
    return [*rows, ("all", took(whole), "")] if rows else []


def _bounds(history: History) -> tuple[dict[int, float], dict[int, float], set[int]]:
    """Return when each attempt began, and when its last event was; and those that have said that they ended."""
    began: dict[int, float] = {}
    over: dict[int, float] = {}
    ended: set[int] = set()
    for event in history.events:
        attempt, name, at = event["attempt"], event["event"], seconds_of(event)
        if name == names.ATTEMPT_STARTED:
            began.setdefault(attempt, at)
        if attempt in began and name in _SIGNS and math.isfinite(at):
            over[attempt] = max(over.get(attempt, at), at)
        if name in _ENDS:
            ended.add(attempt)
    return began, over, ended


def _lost(history: History) -> dict[int, float]:
    """Return the seconds of training that the attempt before each had lost, by attempt."""
    found: dict[int, float] = {}
    before: Mapping[str, Any] = {}
    for event in history.events:
        if event["event"] == names.ATTEMPT_STARTED:
            fields = event["fields"]
            # Each event has the sum over all attempts since one checkpoint.
            all_of_them, until_then = (
                max(0.0, value) if is_number(value := each.get(names.LOST_SECONDS, 0.0)) else 0.0
                for each in (fields, before)
            )
            same = before.get("resumed_from") == fields.get("resumed_from")
            found[event["attempt"]] = max(0.0, all_of_them - until_then * same)
            before = fields
    return found


def _add(spent: dict[str, float], part: str, seconds: float) -> None:
    # The clocks of two machines may differ: what would be less than nothing is nothing.
    if math.isfinite(seconds):
        spent[part] = spent.get(part, 0.0) + max(0.0, seconds)


def starts(history: History) -> str:
    """Return a sentence about the phases of the last start; an empty text if they are not on record."""
    for event in reversed(history.events):
        phases = event["fields"].get("phases")
        if event["event"] == names.FIRST_STEP and isinstance(phases, dict):
            said = [f"{shown_value(name)} {took(each)}" for name, each in phases.items() if is_number(each)]
            return f"The last start took {', '.join(said[:_MOST])}." if said else ""
    return ""


def audits(history: History) -> list[tuple[str, str, str]]:
    """Return steps, ranks and outcome of each audit on record."""
    rows = []
    for event in history.events:
        fields = event["fields"]
        if event["event"] == names.AUDITED:
            exact = "to the bit" if fields.get("exact") is True else "within the bounds of rounding"
            cached = ", on rows of the run's cache" if fields.get("cached") is True else ""
            wrong = fields.get("difference")
            said = f"the same {exact}{cached}" if wrong is None else f"not the same{cached}: {shown_value(wrong)}"
            span = " to ".join(f"{n:,}" if is_count(n) else "?" for n in (fields.get("first"), fields.get("step")))
            rows.append((span, shown_value(fields.get("ranks") or "?"), said))
    return rows
