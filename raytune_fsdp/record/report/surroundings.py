"""What is around the curves of a run: with what and where it was trained, how long each part took, what was audited."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
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
from raytune_fsdp.record.goodput import PHASES, Goodput, StepTime, goodput
from raytune_fsdp.record.lines import is_number
from raytune_fsdp.record.report.facts import shown_value, some_rows
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


# Where the time went.

_SAID = {
    "start": "start", "load": "load", "productive": "steps that stayed", "between": "between steps",
    "lost": "steps in vain", "detect": "noticed after", "stop": "end",
}  # fmt: skip
"""The columns of attempts, by phase."""


def time_of(history: History) -> dict[str, Any]:
    """Return where the time of a run went: in words, by part of it, and by attempt.

    Empty if the record does not say when attempts began, when steps ended, or of which attempt they are.
    """
    found = goodput(history.events, _trained(history))
    if found is None or not found.seconds:
        return {}
    waited = sum(each.waited for each in found.attempts)
    parts = {
        PHASES["start"]: found.of("start"),
        PHASES["load"]: found.of("load"),
        "computing steps": found.of("productive") - waited,
        "waiting for data": waited,
        **{PHASES[phase]: found.of(phase) for phase in ("between", "lost", "detect", "stop")},
    }
    least = _LEAST_SHARE * found.seconds
    rows = [(part, took(each), f"{each / found.seconds:.1%}") for part, each in parts.items() if each >= least]
    head, attempts = _by_phase(found)
    return {
        "words": found.in_words(),
        "parts": [*rows, ("all", took(found.seconds), "")],
        "head": head,
        "attempts": attempts,
    }


def _trained(history: History) -> Iterator[StepTime]:
    columns = history.columns
    names_of = ("step", "attempt", "step_seconds", "data_seconds")
    for step, attempt, seconds, waited, ended in zip(
        *(np.nan_to_num(columns[name]).tolist() for name in names_of), history.time.tolist(), strict=True
    ):
        yield StepTime(int(step), int(attempt), ended, max(0.0, seconds), max(0.0, waited))


def _by_phase(found: Goodput) -> tuple[list[str], list[list[str]]]:
    """Return the heading and the rows of a table of attempts, without columns in which there is nothing."""
    there = [phase for phase in PHASES if found.of(phase)]
    again, pauses = found.steps_again > 0, found.pauses > 0
    head = ["attempt", *(_SAID[phase] for phase in there), *["trained again"] * again, *["paused before"] * pauses]
    rows = [
        [
            "none" if each.number is None else str(each.number),
            *(took(seconds) if (seconds := each.seconds[phase]) else "" for phase in there),
            *[f"{each.steps_again:,} in {took(each.again)}" if each.steps_again else ""] * again,
            *[took(each.pause) if each.pause else ""] * pauses,
        ]
        for each in found.attempts
    ]
    return head, some_rows(rows)


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
