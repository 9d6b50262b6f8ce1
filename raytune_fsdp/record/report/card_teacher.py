"""What the card of a model says of its teacher: which model it was, and how much of what it predicted was learned."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from raytune_fsdp.base.redaction import redact_shapes
from raytune_fsdp.base.untrusted import printable
from raytune_fsdp.plan.run_dir import EVENTS_FILE
from raytune_fsdp.record.jsonl import each_event
from raytune_fsdp.record.names import TEACHER

_MOST = 100
_LOCAL = ("/", "~", "./", "../", "file:")
"""Prefixes of paths that exist only on one machine."""


def of_teacher(recipe: Mapping[str, Any], run_dir: Path | None) -> Iterator[str]:
    """Yield the lines about a model's teacher, if it had one. The recipe and the record may be a stranger's."""
    teacher = recipe["config"].get("teacher")
    if not isinstance(teacher, Mapping) or not isinstance(model := teacher.get("model"), str):
        return
    said = _said(run_dir)
    # Where only what it predicted was there, the record knows its name.
    name = said.get("model") if isinstance(said.get("model"), str) else model
    where = without_directory(name)
    top_k, temperature = _plain(teacher.get("top_k", 64)), _plain(teacher.get("temperature", 1.0))
    yield from (
        "",
        "## Teacher",
        "",
        f"It has learned what {_code(where)} predicts, at temperature {temperature}: of each token that it was trained "
        f"on, the probabilities of the {top_k} most likely ones, and of all others together.",
    )
    if kept := list(_not_kept(said)):
        yield from ("", "How much the others have together:", "", "| | |", "|---|---|", *kept[:_MOST])


def _said(run_dir: Path | None) -> Mapping[str, Any]:
    """Return the fields of the last event about the teacher."""
    if run_dir is None:
        return {}
    try:
        events = [event["fields"] for event in each_event(run_dir / EVENTS_FILE) if event["event"] == TEACHER]
    except (OSError, ValueError):
        return {}
    return events[-1] if events else {}


def _not_kept(said: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each dataset."""
    shares = said.get("not_kept")
    for name, share in shares.items() if isinstance(shares, Mapping) else ():
        values = (share.get("mean"), share.get("largest")) if isinstance(share, Mapping) else ()
        if all(isinstance(each, int | float) and math.isfinite(each) for each in values) and values:
            yield f"| {_code(str(name))} | {values[0]:.2%} on average, at most {values[1]:.2%} of one token's |"


def without_directory(path: object) -> str:
    """Reduce a local path to its name; leave a public one unchanged."""
    text = str(path)
    return Path(text).name if text.startswith(_LOCAL) else text


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) else "another"


def _code(text: str) -> str:
    return f"`{printable(redact_shapes(text)).replace('`', chr(39)).replace('|', '/')}`"
