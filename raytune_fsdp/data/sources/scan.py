"""Scan a text file in one pass: where each row is, and the hash of the content.

A row's span is its place in bytes. Its content is parsed only when the row is read; broken rows are found then. Hash
included, one core scans 1.5 GB/s of lines, but 0.2 GB/s of a JSON array and 0.1 GB/s of CSV: only a parser knows where
their rows end.
"""

from __future__ import annotations

import csv
import json
import re
from array import array
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from raytune_fsdp.base.batch import Progress
from raytune_fsdp.base.errors import DataError
from raytune_fsdp.data.sources.handles import ChunkHashing
from raytune_fsdp.data.sources.keys import KeySearch
from raytune_fsdp.data.sources.source import reading, shorten, unreadable

SPAN = np.dtype([("offset", "<u8"), ("bytes", "<u8"), ("line", "<u8")])
# The most bytes read at once, so that a huge file without a line break cannot fill the memory.
_PIECE_BYTES = 1 << 20
# The largest CSV record or JSON element, for the same reason: both are parsed to find their end. Lines of other files
# may be longer.
MAX_RECORD_BYTES = 1 << 28
_START_BYTES = 1 << 16
# Up to this size Python finds line breaks faster than 20 calls of numpy (0.1 ms), which find any number of them.
_FEW_BYTES = 1 << 12
_PROGRESS_BYTES = 64 << 20
_LINE_BREAK = ord("\n")
_IS_SPACE = np.array([not bytes([byte]).strip() for byte in range(256)])
_BOM = b"\xef\xbb\xbf"
_SPACE = re.compile(r"[ \t\r\n]*")


class Scanned:
    """A file that is read once from its start, and hashed on the way."""

    def __init__(
        self, file: BinaryIO, *, shown: str, size: int, progress: Progress | None, search: KeySearch | None = None
    ) -> None:
        """`search`: gets all that is read."""
        self.shown = shown
        self.offset = 0
        self.line = 1
        self._file = file
        self._size = size
        self._progress = progress
        self._search = search
        self.hashing = ChunkHashing()
        self._reported = 0
        with reading(shown):
            start = file.read(len(_BOM))
            file.seek(len(_BOM) if start == _BOM else 0)
        if start == _BOM:
            self._account(start)

    def read(self, limit: int) -> bytes:
        try:
            piece = self._file.read(limit)
        except OSError as error:
            raise unreadable(self.shown, error) from error
        return self._account(piece)

    def readline(self, limit: int) -> bytes:
        try:
            piece = self._file.readline(limit)
        except OSError as error:
            raise unreadable(self.shown, error) from error
        self.line += piece.endswith(b"\n")
        return self._account(piece)

    def _account(self, piece: bytes) -> bytes:
        self.hashing.update(piece)
        if self._search is not None:
            self._search.update(piece)
        self.offset += len(piece)
        if self._progress is not None and (self.offset - self._reported >= _PROGRESS_BYTES or not piece):
            self._reported = self.offset
            self._progress(self.shown, self.offset, self._size)
        return piece


class Spans:
    """Writes spans to a file."""

    def __init__(self, file: BinaryIO) -> None:
        self.count = 0
        self._file = file
        self._waiting = array("Q")

    def add(self, offset: int, length: int, line: int = 0) -> None:
        self._waiting.extend((offset, length, line))
        self.count += 1
        if len(self._waiting) >= 1 << 16:
            self.flush()

    def extend(self, spans: Any) -> None:
        """Add many spans at once: an array with one row for each."""
        self.flush()
        # Not ndarray.tofile: its error does not say why it failed (such as a full disk).
        self._file.write(spans.astype("<u8").tobytes())
        self.count += len(spans)

    def flush(self) -> None:
        self._waiting.tofile(self._file)
        del self._waiting[:]


def scan(file: Scanned, spans: Spans, *, syntax: str, delimiter: str) -> list[str]:
    """Find all rows. Return the columns in a CSV file's header; an empty list for other files."""
    if syntax == "csv":
        return _scan_csv(file, spans, delimiter)
    if syntax == "json":
        _scan_json(file, spans)
    else:
        _scan_lines(file, spans)
    return []


def json_syntax(file: BinaryIO, *, shown: str) -> str:
    """Return the syntax of a .json file: an array, or one object a line. Leaves the file at its start."""
    with reading(shown):
        start = file.read(_START_BYTES).removeprefix(_BOM).lstrip()
        file.seek(0)
    if start.startswith(b"["):
        return "json"
    if start.split(b"\n", 1)[0].strip() == b"{":
        raise DataError(
            f"{shown}: is one JSON object over several lines; a JSON file with rows is an array of objects, or has one "
            "object a line: rewrite it"
        )
    return "jsonl"


def _scan_lines(file: Scanned, spans: Spans) -> None:
    start, line, blank = file.offset, 1, True
    while piece := file.read(_PIECE_BYTES):
        base = file.offset - len(piece)
        if len(piece) <= _FEW_BYTES:
            at = 0
            while end := piece.find(b"\n", at) + 1:
                if not blank or piece[at:end].strip():
                    spans.add(start, base + end - start, line)
                start, line, blank, at = base + end, line + 1, True, end
            blank = blank and not piece[at:].strip()
            continue
        data = np.frombuffer(piece, dtype=np.uint8)
        ends = np.flatnonzero(data == _LINE_BREAK) + 1
        if not len(ends):
            blank = blank and not piece.strip()
            continue
        starts = np.concatenate([[start], base + ends[:-1]])
        kept = np.ones(len(ends), dtype=bool)
        kept[0] = not blank or bool(piece[: ends[0]].strip())
        # Only lines that start with white space can be blank. Few do, so the others need no Python.
        for index in np.flatnonzero(_IS_SPACE[data[ends[:-1]]]).tolist():
            kept[index + 1] = bool(piece[ends[index] : ends[index + 1]].strip())
        lines = np.arange(line, line + len(ends))
        spans.extend(np.stack([starts, base + ends - starts, lines], axis=1)[kept])
        start, line, blank = base + int(ends[-1]), line + len(ends), not piece[ends[-1] :].strip()
    if not blank:
        spans.add(start, file.offset - start, line)


def _scan_csv(file: Scanned, spans: Spans, delimiter: str) -> list[str]:
    records = csv_reader(_lines(file), delimiter)
    columns: list[str] = []
    while True:
        start, line = file.offset, file.line
        try:
            fields = next(records)
        except StopIteration:
            return columns
        except csv.Error as error:
            if not columns:
                raise DataError(f"{file.shown}:{line}: the header is not a CSV record ({error}); correct it") from None
            # It still counts as a row; reading it reports the error.
            spans.add(start, file.offset - start, line)
            continue
        if fields and not columns:
            where = f"{file.shown}:{line}"
            try:
                columns = [field.encode("latin-1").decode() for field in fields]
            except UnicodeDecodeError:
                raise DataError(f"{where}: the header is not UTF-8; convert the file, for example with iconv") from None
            if len(set(columns)) < len(columns):
                raise DataError(
                    f"{where}: the header names a column twice ({shorten(columns)}); correct the first line"
                )
        elif fields:
            spans.add(start, file.offset - start, line)


def csv_reader(lines: Iterator[str], delimiter: str) -> Iterator[list[str]]:
    """Yield the records in lines. Strict: a quote that is never closed is an error, not the rest of the file."""
    # Python's own limit, 128 KiB a field, is less than a long document. It can only be set for the whole process.
    csv.field_size_limit(max(csv.field_size_limit(), MAX_RECORD_BYTES))
    return csv.reader(lines, delimiter=delimiter, strict=True)


def _lines(file: Scanned) -> Iterator[str]:
    # Latin-1 makes any byte one character, so offsets stay byte offsets. Quotes, delimiters and line breaks are ASCII
    # in UTF-8, so they are in the same places.
    while line := file.readline(MAX_RECORD_BYTES):
        if len(line) == MAX_RECORD_BYTES:
            raise DataError(
                f"{file.shown}:{file.line}: the line has more than {len(line) >> 20} MiB, the limit for CSV; correct "
                "the file, or set file_type if it is not a CSV file"
            )
        yield line.decode("latin-1")


def _scan_json(file: Scanned, spans: Spans) -> None:
    text = _Text(file, spans)
    if text.peek() != "[":
        raise text.broken("it does not start with '['")
    text.at += 1
    if text.peek() == "]":
        return
    while True:
        text.peek()
        start, end = text.base + text.at, text.value_end()
        spans.add(start, end - start)
        text.at = end - text.base
        if (mark := text.peek()) not in (",", "]") or not mark:
            raise text.broken(f"{mark!r} follows where ',' or ']' must" if mark else "the file ends in the array")
        text.at += 1
        if mark == "]":
            break
    if mark := text.peek():
        raise text.broken(f"{mark!r} follows after the array")


class _Text:
    """The part of a JSON file that is being scanned, as Latin-1: one character a byte."""

    def __init__(self, file: Scanned, spans: Spans) -> None:
        self.text = ""
        self.base = file.offset
        self.at = 0
        self._file = file
        self._spans = spans
        # Values are only skipped here. Numbers stay text: int() refuses more than 4300 digits, which is an error when
        # the row is read, not for the whole file.
        self._decoder = json.JSONDecoder(strict=False, parse_int=str, parse_float=str)

    def more(self) -> bool:
        """Read on, doubling the text each time, so that the total work for a long element stays linear."""
        self.base, self.text, self.at = self.base + self.at, self.text[self.at :], 0
        if len(self.text) > MAX_RECORD_BYTES:
            raise self.broken(f"it has more than {MAX_RECORD_BYTES >> 20} MiB")
        piece = self._file.read(max(_PIECE_BYTES, len(self.text)))
        self.text += piece.decode("latin-1")
        return bool(piece)

    def peek(self) -> str:
        """Return the next character that is not white space; empty at the end of the file."""
        while True:
            found = _SPACE.match(self.text, self.at)
            assert found is not None
            self.at = found.end()
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""

    def value_end(self) -> int:
        """Return the offset in the file at which the value that starts here ends."""
        while True:
            try:
                _, end = self._decoder.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                # A value that is cut off where the text ends fails near that end (the longest thing that must not be
                # cut is a surrogate pair, \ud83d\ude00, of 12 characters), or as a string without an end.
                cut_off = error.pos > len(self.text) - 16 or error.msg.startswith("Unterminated string")
                if not cut_off or not self.more():
                    raise self.broken(error.msg) from None
            except RecursionError:
                raise self.broken("it is nested too deeply") from None
            else:
                # A number may go on after the end of the text read so far.
                place = self.base + end
                if end < len(self.text) or not self.more():
                    return place

    def broken(self, reason: str) -> DataError:
        seen = shorten(self.text[self.at : self.at + 100].encode("latin-1").decode(errors="replace"))
        return DataError(
            f"{self._file.shown}, row {self._spans.count + 1}: not valid JSON ({reason}) at byte "
            f"{self.base + self.at}, {seen!r}; the file must be an array of objects: correct it, or write JSON Lines"
        )
