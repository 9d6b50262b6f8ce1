"""The finding of a check: one line, and what to do if it is not good."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from raytune_fsdp.base.errors import RaytuneError, in_one_line
from raytune_fsdp.base.redaction import redact_shapes
from raytune_fsdp.base.untrusted import printable

Status = Literal["ok", "warning", "problem"]
WIDTH = 100
_STATUS, _CHECK = 9, 11
"""Widths of the columns before what was found."""


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    status: Status
    found: str
    fix: str = ""
    """What mends it; empty only if the status is `ok`."""

    def __post_init__(self) -> None:
        assert bool(self.fix) == (self.status != "ok"), f"{self.check}: {self.status} with fix {self.fix!r}"


def ok(check: str, found: str) -> Finding:
    return Finding(check, "ok", found)


def warning(check: str, found: str, fix: str) -> Finding:
    return Finding(check, "warning", found, fix)


def problem(check: str, found: str, fix: str) -> Finding:
    return Finding(check, "problem", found, fix)


def refused(check: str, error: RaytuneError) -> Finding:
    """Return a problem for an error with which a run would end.

    Our messages end with the way out, after the last `; `, `. ` or `: `.
    """
    message = in_one_line(error)
    for mark in ("; ", ". ", ": "):
        found, separator, fix = message.rpartition(mark)
        if separator and fix.count("(") == fix.count(")"):  # not from within brackets
            return problem(check, found, fix)
    return problem(check, message, "correct what the line names")


def failed(check: str, error: BaseException) -> Finding:
    """Return the finding of a check that raised an error."""
    if isinstance(error, RaytuneError):
        return refused(check, error)
    return warning(
        check, f"this check failed itself: {in_one_line(error)}", "report this line; the others hold without it"
    )


SLOW = "this machine is busy, or packages are imported from slow storage"


def not_checked(check: str, seconds: float, why: str, alone: str, part: str = "") -> Finding:
    """Return a warning that there was no time for a check. `alone`: how to make it without the others."""
    return warning(check, f"{part}not checked within {seconds:.0f} s ({why})", alone)


def page(findings: Sequence[Finding], headline: str) -> str:
    """Return the findings as a text at most WIDTH columns wide."""
    lines = [headline]
    indent = " " * (_STATUS + _CHECK)
    for each in findings:
        start = f"{each.status:{_STATUS}}{each.check:{_CHECK}}"
        lines += _wrapped(each.found, start if len(each.check) < _CHECK else f"{start} ", indent)
        if each.fix:
            lines += _wrapped(each.fix, f"{indent}fix: ", f"{indent}     ")
    problems, warnings = (sum(each.status == status for each in findings) for status in ("problem", "warning"))
    good = len(findings) - problems - warnings
    return "\n".join([*lines, f"{many(problems, 'problem')}, {many(warnings, 'warning')}, {good} ok"])


def as_json(findings: Sequence[Finding], headline: str, seconds: float) -> dict[str, Any]:
    """Return the findings for JSON."""
    counts = {status: sum(each.status == status for each in findings) for status in ("problem", "warning", "ok")}
    found: dict[str, Any] = redact_shapes([asdict(each) for each in findings])
    return {"about": headline, "seconds": round(seconds, 1), "counts": counts, "findings": found}


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 0 if there is no problem, else 2, as a run that is refused does."""
    return 2 if any(each.status == "problem" for each in findings) else 0


def many(count: int, what: str) -> str:
    """Count things in words: `1 node`, `2 nodes`, `2 processes`."""
    plural = "es" if what.endswith("s") else "s"
    return f"{count} {what}{plural * (count != 1)}"


def _wrapped(text: str, first: str, others: str) -> list[str]:
    # Libraries quote whole addresses in their errors, secrets included; and nodes may say anything.
    clean = printable(redact_shapes(" ".join(text.split())))
    return textwrap.wrap(
        clean, WIDTH, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )
