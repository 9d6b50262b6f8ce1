"""The evidence as a page for people: targets beside what was found, a table of each kind of piece, and what failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.process import CUT_OFF, DONE, FAILED, NOT_HERE, UNDER_WAY, Piece

NOT_MEASURED = "not measured"
_OTHERWISE = ("began", "command", "date")
"""What is known of a call, besides the machine and the versions on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    what: str
    pieces: str
    """How their names begin; the largest value counts."""
    key: str
    over: str = ""
    """The piece whose value each is divided by."""
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
    Target(what="8B at 4,096 tokens with adapters: tokens/s (12,473 on an H100 by NeMo Automodel)",
           pieces="lora 4096 x 2 of 8b", key="tokens_per_second", number=12473),
    Target(what="graphs compiled after step 3, in any run", pieces="train", key="graphs_after_step_3", most=True,
           number=0),
    Target(what="a steady compiled step: % of the time in which the GPU is idle", pieces="train 8192 x 1 of 8b",
           key="idle_percent", most=True, number=3),
    Target(what="what a checkpoint keeps training waiting, over a plain copy of its bytes", pieces="checkpoint",
           key="stall_over_copy", most=True, number=1.5),
    Target(what="8B at 8,192 tokens in fp8, one GPU: times the tokens a second of bf16",
           pieces="fp8 8192 x 1 of 8b, tensorwise", over="fp8 8192 x 1 of 8b, bf16", key="tokens_per_second",
           number=1.2),
    Target(what="two runs with run.deterministic: equal to the bit (1)", pieces="deterministic", key="again_equal",
           number=1),
    Target(what="stopped and continued with run.deterministic: equal to the bit (1)", pieces="deterministic",
           key="equal", number=1),
]  # fmt: skip

TABLES: dict[str, tuple[str, dict[str, str]]] = {
    "tests": (
        "Tests on the device",
        {"passed": "passed", "failed": "failed", "skipped": "skipped", "failures": "which failed"},
    ),
    "ceilings": (
        "What the device reaches at best",
        {"what": "what", "rate": "rate", "unit": "", "sheet": "by its data sheet", "percent": "%"},
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
        "Training steps; what was planned on a machine without a GPU is marked so",
        {
            "tokens_per_second": "tokens/s", "planned_tokens_per_second": "planned", "step_seconds": "s a step",
            "planned_step_seconds": "planned", "memory_gib": "GiB of tensors", "planned_tensors_gib": "planned",
            "mfu_percent": "MFU %", "mfu_6n_percent": "MFU % (6N)", "graphs_after_step_3": "graphs after step 3",
            "attention": "attention", "blocks": "blocks",
        },
    ),
    "fp8": (
        "Training steps in 8 bits, one GPU, with moments in 8 bits",
        {
            "tokens_per_second": "tokens/s", "planned_tokens_per_second": "planned", "mfu_percent": "MFU % of bf16's",
            "memory_gib": "GiB of tensors", "planned_tensors_gib": "planned", "first_loss": "first loss",
            "last_loss": "last loss", "blocks": "blocks",
        },
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
            "again_equal": "two runs are equal", "first_difference": "first step that differs",
            "equal": "continued equals whole", "steps": "steps",
            "tokens_per_second": "tokens/s without", "deterministic_tokens_per_second": "with",
            "price_percent": "price %",
        },
    ),
}  # fmt: skip
"""Titles of the kinds of pieces, and their columns by the keys of results. What is in no column is only in the JSON."""

PROFILE = {
    "name": "kernel (on a CPU: operation)", "times_in_a_step": "times a step", "ms_of_a_step": "ms of a step",
    "percent": "% of them all",
}  # fmt: skip
_SHOWN = 10
"""Kernels of a profile on the page; the JSON has more."""

FACTS = {
    "clocks": "while it multiplied: {}", "idle_percent": "the GPU is idle for {} % of the time",
    "gpu_ms_of_a_step": "{} ms a step on the GPU", "kernels_of_a_step": "{} kernels a step",
}  # fmt: skip
"""What is said once of a piece with several rows, or of a profile."""


def page(values: dict[str, Any], pieces: Sequence[Piece]) -> str:
    parts = (
        _head(values),
        _targets(values),
        _tables(values, pieces),
        _profiles(values, pieces),
        _failures(values, pieces),
    )
    return "\n".join(line for part in parts for line in part) + "\n"


def summary(record: dict[str, Any]) -> str:
    """A piece in one line."""
    ended = f"{record['status']} ({record['seconds']:.0f} s)"
    error = [record["error"]] if record["status"] != DONE else []
    if "result" not in record:
        return f"{ended}: {', '.join(error)}"
    _, columns = TABLES.get(record["kind"], ("", {}))
    rows = _rows(record)
    said = [f"{column} {_cell(row[key])}" for row in rows[:3] for key, column in columns.items() if row.get(key)]
    return f"{ended}: {', '.join([*error, *_facts(record['result']), *said])}"


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
        found = _values(values, target)
        bound = f"{'at most' if target.most else 'at least'} {target.number:g}"
        if not found:
            yield f"| {target.what} | {bound} | {NOT_MEASURED} | |"
            continue
        # Of what must hold each time, the worst: only of speeds may the best one stand for all.
        value = min(found) if target.key.endswith("equal") else max(found)
        reached = value <= target.number if target.most else value >= target.number
        yield f"| {target.what} | {bound} | {_cell(float(value))} | {'reached' if reached else 'missed'} |"


def _values(values: dict[str, Any], target: Target) -> list[float]:
    """What the pieces of a target have found."""
    known = {name: record.get("result") or {} for name, record in values["pieces"].items()}
    known = {name: {**result.get("profile", {}), **result} for name, result in known.items()}
    base = known.get(target.over, {}).get(target.key) if target.over else 1.0
    found = [result.get(target.key) for name, result in known.items() if name.startswith(target.pieces)]
    return [each / base for each in found if each is not None and base]


def _tables(values: dict[str, Any], pieces: Sequence[Piece]) -> Iterator[str]:
    for kind in dict.fromkeys(piece.kind for piece in pieces):
        title, columns = TABLES.get(kind, (kind, {}))
        yield from ("", f"## {title}", "")
        yield f"| piece | {' | '.join(columns.values())} | seconds | call |"
        yield "|---" * (len(columns) + 3) + "|"
        facts = []
        for piece in pieces:
            if piece.kind != kind:
                continue
            record = values["pieces"].get(piece.name)
            if record is None or "result" not in record:
                yield f"| {piece.name} | {_why_not(record)} |{' |' * (len(columns) + 1)}"
                continue
            name = piece.name if record["status"] == DONE else f"{piece.name} ({record['status']})"
            for row in _rows(record):
                cells = " | ".join(_cell(row.get(key)) for key in columns)
                yield f"| {name} | {cells} | {_cell(record.get('seconds'))} | {record['call'] + 1} |"
            facts += [f"{piece.name}: {fact}." for fact in _facts(record["result"])]
        for fact in facts:
            yield from ("", fact)


def _profiles(values: dict[str, Any], pieces: Sequence[Piece]) -> Iterator[str]:
    for piece in pieces:
        profile = values["pieces"].get(piece.name, {}).get("result", {}).get("profile")
        if profile is None:
            continue
        yield from ("", f"## What takes the time of a steady step: {piece.name}", "")
        yield f"| {' | '.join(PROFILE.values())} |"
        yield "|---" * len(PROFILE) + "|"
        for row in profile["rows"][:_SHOWN]:
            yield f"| {' | '.join(_cell(row.get(key)) for key in PROFILE)} |"
        for fact in _facts(profile):
            yield from ("", f"{fact}.")


def _failures(values: dict[str, Any], pieces: Sequence[Piece]) -> Iterator[str]:
    failed = [piece.name for piece in pieces if _status(values, piece) in (FAILED, CUT_OFF, UNDER_WAY)]
    yield from ("", "## What failed, or was cut off", "")
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


def _rows(record: dict[str, Any]) -> list[dict[str, Any]]:
    planned = {f"planned_{key}": value for key, value in record.get("planned", {}).items()}
    result = record["result"]
    return [{**planned, **row} for row in result.get("rows", [result])]


def _facts(result: dict[str, Any]) -> list[str]:
    return [words.format(_cell(result[key])) for key, words in FACTS.items() if result.get(key) is not None]


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
