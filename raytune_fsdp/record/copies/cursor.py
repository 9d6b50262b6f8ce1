"""A cursor into `metrics.jsonl`: how far a tracker has sent it, and the lines that come next."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from raytune_fsdp.base.untrusted import LINE_BYTES, NULS
from raytune_fsdp.record.lines import is_number, read_line, step_of


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A place between two lines: after all lines of the steps before `step`, and the first `lines` of that step.

    Not a number of bytes: a resume may cut lines that were sent, and they are then written anew.
    """

    step: int = 0
    lines: int = 0


@dataclass(frozen=True, slots=True)
class Sent:
    """How far a record has been sent, as the receiver keeps it."""

    place: Position = Position()
    highest: int = -1
    """The highest step of which the receiver may have something that this cursor does not know of. It has, if a run
    went back beyond what was sent already, or was begun by a version without cursors."""

    def to_text(self) -> str:
        return json.dumps({"step": self.place.step, "lines": self.place.lines, "highest": self.highest})

    @classmethod
    def from_text(cls, text: str | None) -> Sent | None:
        """None if there is none, or if it was not written here."""
        try:
            found = json.loads(text or "")
            numbers = [found[key] for key in ("step", "lines", "highest")]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        return (
            cls(Position(*numbers[:2]), numbers[2]) if all(type(n) is int and is_number(n) for n in numbers) else None
        )


class RecordReader:
    """Reads a record that may still be growing, from a place on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._place = Position()

    def seek(self, place: Position) -> None:
        """Go to a place. Its lines are looked for where they should be: those before it are not read."""
        self._place = place
        if self._file is None:
            if not self._path.exists():
                return
            self._file = self._path.open("rb")
        self._place = Position(place.step)
        self._file.seek(_first_of(self._file, place.step))
        for _ in range(place.lines):
            if next(self.lines(place.step), None) is None:
                break

    def lines(self, last_step: int) -> Iterator[tuple[Position, dict[str, Any]]]:
        """The next finished lines up to a step, each with the place after it. Goes on where the last call stopped."""
        if self._file is None:
            self.seek(self._place)
        if self._file is None:
            return
        nuls = 0
        while True:
            offset = self._file.tell()
            raw = self._file.readline(LINE_BYTES)
            line = read_line(raw) if raw.endswith(b"\n") else None
            if line is None and raw.endswith(b"\n") and (nuls := nuls + raw.count(0)) <= NULS:
                continue  # not one of ours: the repair at the start of the next attempt says so
            if line is None or step_of(line) > last_step:
                self._file.seek(offset)
                return
            step = step_of(line)
            self._place = Position(step, self._place.lines + 1 if step == self._place.step else 1)
            yield self._place, line


def _first_of(file: BinaryIO, step: int) -> int:
    """Where the first line of a step begins, or of the next one: lines are in the order of their steps."""
    low, high = 0, file.seek(0, os.SEEK_END)
    while low < high:  # the line begins between the two
        middle = (low + high) // 2
        after, found = _line_after(file, middle, high)
        if found is not None and found < step:
            low = after
        else:
            high = middle
    return low  # always where a line ends, if `high` may be anywhere in one


def _line_after(file: BinaryIO, offset: int, end: int) -> tuple[int, int | None]:
    """Of the first line of ours that begins at an offset or after it, before the end: where it ends, and its step."""
    file.seek(max(0, offset - 1))
    # First, the rest of the line that the byte before the offset belongs to.
    nuls = file.readline(LINE_BYTES).count(0) if offset > 0 else 0
    while file.tell() < end and nuls <= NULS:
        raw = file.readline(LINE_BYTES)
        line = read_line(raw)
        if line is not None:
            return file.tell(), step_of(line)
        nuls += raw.count(0)
    return end, None
