"""Follow a run's record while another process writes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raytune_fsdp.base.errors import ResumeError
from raytune_fsdp.base.untrusted import LINE_BYTES, NULS, UnsoundError, open_regular
from raytune_fsdp.record.copies.following import Position, RecordReader
from raytune_fsdp.record.jsonl import event_of
from raytune_fsdp.record.lines import step_of

_HIGHEST = (1 << 63) - 1


class RecordFollower:
    """Reads each line of a growing `metrics.jsonl` once.

    An attempt that resumes puts another file, often a shorter one, in its place.
    """

    def __init__(self, path: Path, *, after: int = 0) -> None:
        """`after`: lines up to this step are left out."""
        self._path = path
        self._reader: RecordReader | None = None
        self._file: tuple[int, int] | None = None
        self._size = 0
        self._newest = (0, after)
        """Attempt and step of the newest line. The pair only grows: a later attempt trains a step again."""
        self._seen = 0
        """How many lines with this pair were yielded: a step's evaluations have the pair of its own line."""
        self._catching_up = True
        self._passed = 0
        """How many lines with this pair were met since the file was opened again."""

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines written since the last call."""
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return
        if (found.st_dev, found.st_ino) != self._file or found.st_size < self._size:
            _check(self._path)
            self._catching_up, self._passed = True, 0
            self._file = found.st_dev, found.st_ino
            self._reader = RecordReader(self._path)
            # The file of an attempt that went back: its lines of earlier steps have the numbers of earlier attempts.
            self._reader.seek(Position(0 if self._newest[0] else self._newest[1] + 1))
        self._size = found.st_size
        assert self._reader is not None
        for _, line in self._reader.lines(_HIGHEST):
            attempt = line.get("attempt")
            place = (attempt if type(attempt) is int else 1, step_of(line))
            if self._catching_up and place <= self._newest:
                self._passed += place == self._newest
                if place < self._newest or self._passed <= self._seen:
                    continue
            self._seen = self._seen + 1 if place == self._newest else 1
            self._catching_up, self._newest = False, place
            yield line

    def reopen(self) -> None:
        """Reopen the file at the next call, which reads on after the newest line."""
        if self._reader is not None:
            self._reader = RecordReader(self._path)
            self._reader.seek(Position(self._newest[1] + (not self._newest[0])))
            self._catching_up, self._passed = True, 0


class EventFollower:
    """Reads each event of an `events.jsonl` once; the file only ever grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = self._nuls = 0

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events written since the last call."""
        if not self._path.exists():
            return
        _check(self._path)
        with self._path.open("rb") as file:
            file.seek(self._offset)
            while (raw := file.readline(LINE_BYTES)).endswith(b"\n"):
                self._nuls += raw.count(0)
                if self._nuls > NULS:
                    return
                self._offset = file.tell()
                if (event := event_of(raw)) is not None:
                    yield event


def _check(path: Path) -> None:
    """Refuse what is not a regular file: a stranger's may be a pipe, and opening that might never return."""
    try:
        os.close(open_regular(path, links=True))
    except UnsoundError as error:
        raise ResumeError(f"{path} {error}: it is the record of the run, so move away what is there") from error
