"""Find the final answer in a text that a model or a person has written, and compare two such answers."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

import regex

_MOST_CHARACTERS = 20_000
"""How many characters of an answer's end are looked at: some 5,000 tokens."""

_SECONDS = 1.0
"""The time for one expression and one answer: on this length a sound expression takes microseconds."""

# A minus belongs to the number only where it is not an operator, as in 5-3.
_NUMBER = re.compile(r"(?:(?<![\w.)])-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_SPACES = re.compile(r"\s+|\\[,;:! ]|~|\$|\\left(?![a-z])|\\right(?![a-z])")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}")
_BOXED = "\\boxed"


class TooSlowError(Exception):
    """An expression has taken too long for a text."""


def find(text: str, what: str, expression: str | None = None) -> str | None:
    """Return the final answer in a text, or None. `what`: `number`, `boxed` or `regex`, as in `eval.tasks.*.find`."""
    text = text[-_MOST_CHARACTERS:]
    if what == "boxed":
        return _boxed(text)
    if what == "number":
        found = _NUMBER.findall(text)
        return found[-1] if found else None
    assert expression is not None, "a config with find=regex has one"
    try:
        # Not `re`: it has no timeout, and (a+)+$ takes it years for 60 characters.
        groups = [match[1] for match in regex.finditer(expression, text, timeout=_SECONDS)]
    except TimeoutError:
        raise TooSlowError from None
    return groups[-1] if groups else None


def same(left: str, right: str) -> bool:
    """Return whether two final answers are the same: as numbers, or as texts without what only changes their look."""
    left, right = _plain(left), _plain(right)
    if left == right:
        return True
    numbers = _number(left), _number(right)
    return None not in numbers and numbers[0] == numbers[1]


def _boxed(text: str) -> str | None:
    start = text.rfind(_BOXED)
    place = start + len(_BOXED)
    if start < 0:
        return None
    rest = text[place:].lstrip()
    if not rest.startswith("{"):
        return rest.split()[0].strip("$.") if rest else None  # \boxed 5, as TeX allows it
    depth = 0
    for end, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:end]
    return None  # an answer that was cut off


def _plain(text: str) -> str:
    text = _TEXT.sub(r"\1", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    return _SPACES.sub("", text).rstrip(".")


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.replace(",", "").removesuffix("\\%").removesuffix("%"))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
