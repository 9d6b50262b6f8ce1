"""Where rows come from: a JSON Lines file, opened once for its line offsets and fingerprint, then read row by row.

A file is never held in memory: opening keeps 16 bytes a row, and `row` reads that row only.
"""

from __future__ import annotations

import json
import os
from array import array
from pathlib import Path
from typing import Any

import xxhash

from raytune_fsdp.errors import DataError

# Also the most that is read at once while scanning, so that a huge file without a line break cannot fill the memory.
_PIECE_BYTES = 1 << 20
_WAY_OUT = "a dataset is a JSON Lines file: UTF-8 text, one JSON object a line"


def shorten(value: object, *, limit: int = 80) -> str:
    """`value` as it can stand in an error message."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else text[:limit] + "…"


class JsonLines:
    """The rows of a JSON Lines file. Opening reads the file once; blank lines are no rows.

    Can be pickled, forked and used from several threads: rows are read by position, without a shared file offset.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._offsets = array("Q")
        self._lines = array("Q")
        self._file_bytes = 0
        self._fd: int | None = None
        self.fingerprint = self._scan()
        """xxh3_128 of the file's bytes, in hex."""

    def __len__(self) -> int:
        return len(self._offsets)

    def where(self, index: int) -> str:
        """`file:line` of a row, for messages; lines count from 1."""
        return f"{self.path}:{self._lines[index]}"

    def row(self, index: int) -> dict[str, Any]:
        """Read one row from disk."""
        end = self._offsets[index + 1] if index + 1 < len(self) else self._file_bytes
        raw = self._read(self._offsets[index], end).strip()
        try:
            row = json.loads(raw.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.where(index)}: not UTF-8 at byte {error.start} of the line, "
                f"{raw[error.start : error.start + 8]!r}; {_WAY_OUT}: convert the file, for example with iconv"
            ) from None
        except (ValueError, RecursionError) as error:
            text = shorten(raw.decode("utf-8-sig"))
            raise DataError(f"{self.where(index)}: not valid JSON ({error}) in {text!r}; {_WAY_OUT}") from None
        if not isinstance(row, dict):
            raise DataError(
                f"{self.where(index)}: {shorten(row)!r} is a {type(row).__name__}, not a JSON object; {_WAY_OUT}"
            )
        return row

    def _scan(self) -> str:
        if not Path(self.path).exists():
            raise DataError(f"{self.path}: no such file; correct the dataset's path (relative to {Path.cwd()})")
        if Path(self.path).is_dir():
            raise DataError(f"{self.path}: is a directory; {_WAY_OUT}: name the file in it")
        digest = xxhash.xxh3_128()
        offset, start, line, blank = 0, 0, 1, True
        try:
            with open(self.path, "rb") as file:
                while piece := file.readline(_PIECE_BYTES):
                    digest.update(piece)
                    offset += len(piece)
                    if blank and not piece.isspace():
                        self._offsets.append(start)
                        self._lines.append(line)
                        blank = False
                    if piece.endswith(b"\n"):
                        start, line, blank = offset, line + 1, True
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror}); check its permissions") from None
        self._file_bytes = offset
        if not self._offsets:
            raise DataError(f"{self.path}: has no rows ({offset} bytes); {_WAY_OUT}")
        return digest.hexdigest()

    def _read(self, start: int, end: int) -> bytes:
        if self._fd is None:
            self._fd = os.open(self.path, os.O_RDONLY)
            size = os.fstat(self._fd).st_size
            if size != self._file_bytes:
                raise DataError(
                    f"{self.path}: has {size} bytes, had {self._file_bytes} when it was opened; "
                    "a dataset must not change during a run: start again with the final file"
                )
        return os.pread(self._fd, end - start, start)

    def __getstate__(self) -> dict[str, Any]:
        # A file descriptor means nothing in another process: it is opened again at the first row.
        return {**self.__dict__, "_fd": None}

    def __del__(self) -> None:
        if self.__dict__.get("_fd") is not None:
            os.close(self.__dict__["_fd"])
