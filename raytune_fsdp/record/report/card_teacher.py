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


def of_teacher(recipe: Mapping[str, Any], run_dir: Path | None) -> Iterator[str]:
    """Yield the lines about a model's teacher, if it had one. The recipe and the record may be a stranger's."""
    teacher = recipe["config"].get("teacher")
    if not isinstance(teacher, Mapping) or not isinstance(model := teacher.get("model"), str):
        return
    top_k, temperature = teacher.get("top_k", 64), teacher.get("temperature", 1.0)
    where = Path(model).name if model.startswith(_LOCAL) else model
    yield from (
        "",
        "## Teacher",
        "",
        f"It has learned what {_code(where)} predicts, at temperature {_plain(temperature)}: of each token that it was "
        f"trained on, the probabilities of the {_plain(top_k)} most likely ones, and of all others together.",
    )
    if not (kept := _not_kept(run_dir)):
        return
    yield from ("", "How much the others have together:", "", "| | |", "|---|---|")
    yield from (
        f"| {_code(name)} | {mean:.2%} on average, at most {largest:.2%} of one token's |"
        for name, mean, largest in kept[:_MOST]
    )


def _not_kept(run_dir: Path | None) -> list[tuple[str, float, float]]:
    """Return how much is not kept of each dataset, by the last event that says so."""
    if run_dir is None:
        return []
    try:
        said = [event["fields"] for event in each_event(run_dir / EVENTS_FILE) if event["event"] == TEACHER]
        found = said[-1]["not_kept"].items() if said else ()
        shares = [(str(name), float(each["mean"]), float(each["largest"])) for name, each in found]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return [each for each in shares if math.isfinite(each[1]) and math.isfinite(each[2])]


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) else "another"


def _code(text: str) -> str:
    return f"`{printable(redact_shapes(text)).replace('`', chr(39)).replace('|', '/')}`"
