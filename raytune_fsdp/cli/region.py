"""Rewrite a few lines at the bottom of a terminal in place, while other lines scroll by above them.

Pure text: the lines to show go in, and the text to write to the terminal comes out.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any
from unicodedata import combining, east_asian_width

from raytune_fsdp.record.console import duration

_MARGIN = 3
"""Columns that stay free at the right: a terminal prints ^C where the cursor is, which must not wrap the line."""
_LEAST_BAR = 10
_OURS = re.compile(r"(?:\x1b\[[0-9;]*m)?(?: {5}|eval )")
"""Lines of a run, which are wrapped between words; other lines are left whole, for copying."""
_AGAIN = " " * 7
"""Indent of a continued line."""
_MOST_WORKS = 4
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.?")


class Region:
    """The region's lines on the terminal. The cursor stays at the end of the last line."""

    def __init__(self) -> None:
        self._shown: list[str] = []
        self._columns = 0

    def draw(self, above: Sequence[str], lines: Sequence[str], columns: int) -> str:
        """Return the text that prints the lines `above` for good, and shows `lines` in place of the region's lines."""
        lines = [cut_to(line, columns - _MARGIN) for line in lines]
        changed = [row for row, line in enumerate(lines) if row >= len(self._shown) or line != self._shown[row]]
        same = not above and len(lines) == len(self._shown) and (columns == self._columns or not lines)
        if same and not changed:
            return ""
        if same:
            row, out = len(lines) - 1, ""
            # If others are rewritten, so is the last line: the cursor then stands at its end.
            for each in dict.fromkeys([*changed, len(lines) - 1]):
                out += f"{_down(each - row)}\r{lines[each]}" + "\x1b[K" * (each in changed)
                row = each
        else:
            # A terminal that was made narrower has wrapped the lines into more rows.
            rows = sum(max(1, -(-width_of(line) // max(1, columns))) for line in self._shown)
            out = f"{_down(1 - rows) if rows else ''}\r\x1b[J"
            out += "".join(f"{line}\r\n" for line in above) + "\r\n".join(lines)
        self._shown, self._columns = lines, columns
        return out


def _down(rows: int) -> str:
    return f"\x1b[{rows}B" if rows > 0 else f"\x1b[{-rows}A" if rows < 0 else ""


class View:
    """The contents of the region: the run's progress, and work that takes long."""

    def __init__(self, *, blocks: bool = True) -> None:
        """`blocks`: the terminal can show the block characters of bars."""
        self._full, self._empty = ("█", "░") if blocks else ("#", "-")
        self._main: Mapping[str, Any] = {}
        self._since = 0.0
        self._works: dict[str, tuple[int, int]] = {}

    def take(self, fields: Mapping[str, Any]) -> None:
        """Take a message (record/screen_messages.py). It comes with the output of other programs, so its values may be
        anything."""
        if isinstance(what := fields.get("work"), str):
            done, total = _count(fields.get("done")), _count(fields.get("total"))
            self._works.pop(what, None)
            if done < total:
                self._works[what] = done, total
        else:
            self._main, self._since = fields, time.monotonic()
            self._works = {}

    @property
    def ticks(self) -> bool:
        """Whether the contents change with time alone."""
        return any(_seconds(self._main.get(key)) is not None for key in ("elapsed", "left"))

    def lines(self, columns: int, rows: int) -> list[str]:
        columns -= _MARGIN
        found = self._of_main(columns) if self._main.get("title") else []
        for what, (done, total) in list(self._works.items())[-_MOST_WORKS:]:
            found.append(self._with_bar(_plain(what), done, total, f"{done:,} of {total:,}", columns))
        return found[: max(0, rows - 1)]

    def _of_main(self, columns: int) -> list[str]:
        fields, passed = self._main, time.monotonic() - self._since
        done, total = _count(fields.get("done")), _count(fields.get("total"))
        end = ""
        if (elapsed := _seconds(fields.get("elapsed"))) is not None:
            end = duration(elapsed + passed)
        elif (left := _seconds(fields.get("left"))) is not None:
            end = f"{duration(max(0.0, left - passed))} left"
        first = self._with_bar(_plain(fields["title"]), done, total, end, columns)
        shown: list[str] = []
        for each in fields["fields"] if isinstance(fields.get("fields"), list) else []:
            if width_of("  ".join([*shown, text := _plain(each)])) > columns:
                break
            shown.append(text)
        return [first, "  ".join(shown)] if shown else [first]

    def _with_bar(self, what: str, done: int, total: int, end: str, columns: int) -> str:
        if not total:
            return f"{what}  {end}"
        share = min(1.0, done / total)
        tail = f" {100 * share:3.0f}%  {end}".rstrip()
        cells = columns - width_of(what) - len(tail) - 4
        if cells < _LEAST_BAR:
            return f"{cut_to(what, columns - len(tail) - 1)} {tail}"
        full = int(share * cells)
        return f"{what}  [{self._full * full}{self._empty * (cells - full)}]{tail}"


def _count(value: object) -> int:
    return value if type(value) is int and 0 <= value < 1 << 63 else 0


def _seconds(value: object) -> float | None:
    """Return a number of seconds as a float; None if it is no number, or longer than about a thousand years."""
    return float(value) if isinstance(value, int | float) and -3e10 < value < 3e10 else None


def _plain(text: object) -> str:
    return _COLOUR.sub("", clean(str(text)))


def clean(text: str) -> str:
    """Return a line of any output without what would move the cursor; colours stay.

    Of a line that was rewritten, as progress bars are, only the last text stays.
    """
    text = text.rstrip("\r").rpartition("\r")[2]
    plain = _ESCAPE.sub(lambda found: found[0] if _COLOUR.fullmatch(found[0]) else "", text.expandtabs(8))
    shown = "".join(c for c in plain if c == "\x1b" or c.isprintable())
    return f"{shown}\x1b[0m" if "\x1b" in shown else shown


def broken(line: str, columns: int) -> list[str]:
    """Break a line of a run between words, where a terminal would break it inside of one.

    A word that is longer than the line stays whole.
    """
    if not _OURS.match(line) or width_of(_COLOUR.sub("", line)) <= columns:
        return [line]
    found: list[str] = []
    piece, taken = "", 0
    for word in re.findall(" *[^ ]+", line):  # each is measured once, so that a long line takes no long time
        wide = width_of(_COLOUR.sub("", word))
        if taken > len(_AGAIN) and taken + wide > columns:
            found.append(piece)
            word = word.lstrip(" ")
            piece, taken, wide = _AGAIN, len(_AGAIN), width_of(_COLOUR.sub("", word))
        piece, taken = piece + word, taken + wide
    return [*found, piece]


def width_of(text: str) -> int:
    """Return the columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(2 if east_asian_width(c) in "WF" else 0 if combining(c) else 1 for c in text)


def cut_to(text: str, columns: int) -> str:
    """Return as much of a text as fits."""
    while text and width_of(text) > columns:
        text = text[: max(0, min(len(text) - 1, columns))]
    return text
