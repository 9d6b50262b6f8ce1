"""The evidence as a page for people: targets beside what was found, a table of each kind of piece, and what failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.process import DONE, FAILED, NOT_HERE, UNDER_WAY, Piece

NOT_MEASURED = "not measured"
_OTHERWISE = ("began", "command", "date")
"""What is known of a call, besides the machine and the versions on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    what: str
    pieces: str
    """How their names begin; the largest value counts."""
    key: str
    most: bool = False
    """Whether the number is the most it may be, not the least."""
    number: float


TARGETS = [
    Target(what="attention over 8,192 tokens, forward and backward: times faster than with a mask",
           pieces="attention 8192", key="both_times", number=2),
    Target(what="1B at 4,096 tokens: MFU in %, the best way", pieces="train 4096 x 2 of 1b", key="mfu_percent",
           number=40),
    Target(what="8B at 8,192 tokens: MFU in %, the best way (stretch: 52)", pieces="train 8192 x 1 of 8b",
           key="mfu_percent", number=45),
    Target(what="graphs compiled after step 3, in any run", pieces="train", key="graphs_after_step_3", most=True,
           number=0),
    Target(what="a steady step: % of the time in which the GPU is idle", pieces="profile", key="idle_percent",
           most=True, number=3),
    Target(what="what a checkpoint keeps training waiting, over a plain copy of its bytes", pieces="checkpoint",
           key="stall_over_copy", most=True, number=1.5),
    Target(what="8B at 8,192 tokens in fp8, one GPU: times the tokens a second of bf16", pieces="fp8 8192 x 1 of 8b",
           key="tensorwise_times", number=1.2),
    Target(what="stopped and continued with run.deterministic: equal to the bit (1)", pieces="deterministic",
           key="equal", number=1),
]  # fmt: skip

TABLES: dict[str, tuple[str, dict[str, str]]] = {
    "tests": (
        "Tests on the device",
        {"passed": "passed", "failed": "failed", "skipped": "skipped", "failures": "which failed"},
    ),
    "attention": (
        "Attention over a row of documents: ours, and torch's with a mask and repeated keys (ms)",
        {
            "tokens": "tokens", "documents": "documents", "kernel": "kernel", "ours_forward_ms": "forward: ours",
            "mask_forward_ms": "mask", "forward_times": "times faster", "ours_both_ms": "and backward: ours",
            "mask_both_ms": "mask", "both_times": "times faster",
        },
    ),
    "loss": (
        "Hidden states to gradients of the loss",
        {"way": "way", "ms": "ms", "extra_gib": "GiB at the peak, beside the gradients", "note": "note"},
    ),
    "train": (
        "Training steps",
        {
            "tokens_per_second": "tokens/s", "mfu_percent": "MFU %", "mfu_6n_percent": "MFU % (6N)",
            "step_seconds": "s a step", "memory_gib": "GiB", "graphs_after_step_3": "graphs after step 3",
            "attention": "attention", "blocks": "blocks",
        },
    ),
    "fp8": (
        "Training steps in 8 bits, one GPU",
        {
            "way": "way", "tokens_per_second": "tokens/s", "times": "times bf16's", "mfu_percent": "MFU % of bf16's",
            "memory_gib": "GiB", "first_loss": "first loss", "last_loss": "last loss", "blocks": "blocks",
        },
    ),
    "profile": (
        "What takes the time of a steady step",
        {"name": "kernel (on a CPU: operation)", "ms_of_a_step": "ms of a step", "percent": "% of them all"},
    ),
    "checkpoint": (
        "What a checkpoint keeps training waiting, in seconds",
        {
            "gib": "GiB", "copy_seconds": "plain copy", "first_call_seconds": "first save: the call",
            "first_stall_seconds": "this step and the next are longer by", "call_seconds": "second: the call",
            "stall_seconds": "longer by", "stall_over_copy": "that over the plain copy",
        },
    ),
    "deterministic": (
        "run.deterministic",
        {
            "equal": "continued equals whole", "steps": "steps", "first_difference": "first step that differs",
            "tokens_per_second": "tokens/s without", "deterministic_tokens_per_second": "with",
            "price_percent": "price %",
        },
    ),
}  # fmt: skip
"""Titles of the kinds of pieces, and their columns by the keys of results. What is in no column is only in the JSON."""

FACTS = {"idle_percent": "the GPU is idle for {} % of the time", "gpu_ms_of_a_step": "{} ms a step on the GPU"}
"""Of a piece with several rows: what is said once."""


def page(values: dict[str, Any], pieces: Sequence[Piece]) -> str:
    return "\n".join([*_head(values), *_targets(values), *_tables(values, pieces), *_failures(values, pieces)]) + "\n"


def summary(record: dict[str, Any]) -> str:
    """A piece in one line."""
    if record["status"] != DONE:
        return f"{record['status']} ({record['seconds']:.0f} s): {record['error']}"
    title, columns = TABLES.get(record["kind"], ("", {}))
    rows = _rows(record["result"])
    said = [f"{column} {_cell(row[key])}" for row in rows[:3] for key, column in columns.items() if row.get(key)]
    return f"done ({record['seconds']:.0f} s): {', '.join([*_facts(record['result']), *said])}"


def _head(values: dict[str, Any]) -> Iterator[str]:
    calls, size = values["calls"], values["settings"]["size"]
    yield f"# Evidence from {' and '.join(sorted({call['device'] for call in calls})) or 'no machine yet'}"
    yield from ("", f"Made by `python -m benchmarks.gpu.evidence`, size {size}; the numbers are in the JSON beside it.")
    yield from ("", "| call | began | machine |", "|---|---|---|")
    for number, call in enumerate(calls, 1):
        known = ", ".join(
            f"{k} {v}" for k, v in call.items() if k not in ("began", "command", "date") and v is not None
        )
        yield f"| {number} | {call['began']} | {known} |"


def _targets(values: dict[str, Any]) -> Iterator[str]:
    yield from ("", "## Targets", "")
    if values["settings"] != {"device": "cuda", "size": "full"}:
        yield "They are for a GPU and whole models: this page shows only that every piece runs."
        return
    yield from ("| target | | found | |", "|---|---|---|---|")
    for target in TARGETS:
        found = [
            record["result"][target.key]
            for name, record in values["pieces"].items()
            if name.startswith(target.pieces) and (record.get("result") or {}).get(target.key) is not None
        ]
        bound = f"{'at most' if target.most else 'at least'} {target.number:g}"
        if not found:
            yield f"| {target.what} | {bound} | {NOT_MEASURED} | |"
            continue
        # Of what must hold each time, the worst: only of speeds may the best one stand for all.
        value = min(found) if target.key == "equal" else max(found)
        reached = value <= target.number if target.most else value >= target.number
        yield f"| {target.what} | {bound} | {_cell(float(value))} | {'reached' if reached else 'missed'} |"


def _tables(values: dict[str, Any], pieces: Sequence[Piece]) -> Iterator[str]:
    for kind in dict.fromkeys(piece.kind for piece in pieces):
        title, columns = TABLES.get(kind, (kind, {}))
        yield from ("", f"## {title}", "")
        yield f"| piece | {' | '.join(columns.values())} | call |"
        yield "|---" * (len(columns) + 2) + "|"
        facts = []
        for piece in pieces:
            if piece.kind != kind:
                continue
            record = values["pieces"].get(piece.name)
            if record is None or record["status"] != DONE:
                yield f"| {piece.name} | {_why_not(record)} |{' |' * len(columns)}"
                continue
            for row in _rows(record["result"]):
                cells = " | ".join(_cell(row.get(key)) for key in columns)
                yield f"| {piece.name} | {cells} | {record['call'] + 1} |"
            facts += [f"{piece.name}: {fact}." for fact in _facts(record["result"])]
        for fact in facts:
            yield from ("", fact)


def _failures(values: dict[str, Any], pieces: Sequence[Piece]) -> Iterator[str]:
    failed = [piece.name for piece in pieces if _status(values, piece) in (FAILED, UNDER_WAY)]
    yield from ("", "## What failed", "")
    if not failed:
        yield "Nothing of what was run."
    for name in failed:
        record = values["pieces"][name]
        error = record.get("error", "its call ended, or is still at it")
        yield f"- {name}, try {record['tries']}: {error[:500]}"


def _status(values: dict[str, Any], piece: Piece) -> str | None:
    status: str | None = values["pieces"].get(piece.name, {}).get("status")
    return status


def _why_not(record: dict[str, Any] | None) -> str:
    if record is None:
        return NOT_MEASURED
    return str(record["error"] if record["status"] == NOT_HERE else record["status"])


def _rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = result.get("rows", [result])
    return rows


def _facts(result: dict[str, Any]) -> list[str]:
    return [words.format(_cell(result[key])) for key, words in FACTS.items() if key in result]


def _cell(value: Any) -> str:
    if value is None or value == []:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return " ".join(str(value).split()).replace("|", "\\|")[:200]
