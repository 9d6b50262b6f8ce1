"""Rows of text files: JSON Lines, JSON, CSV, plain text.

They are read by position: from the file itself, or from a copy in the cache if the file is compressed or in a store.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from raytune_fsdp.base.batch import Progress
from raytune_fsdp.base.errors import DataError, RowError
from raytune_fsdp.base.untrusted import GIT_LFS, IS_POINTER
from raytune_fsdp.data.sources.handles import (
    BLOCKS,
    CHUNK_BYTES,
    OPEN,
    ChunkHashes,
    ChunkHashing,
    Stored,
    check_unchanged,
    keep_hashes,
)
from raytune_fsdp.data.sources.keys import KeySearch, cached_keys, keys_of_columns
from raytune_fsdp.data.sources.prepared import PreparedRows, prepare_file, prepare_one, touch
from raytune_fsdp.data.sources.remote import write_content
from raytune_fsdp.data.sources.scan import SPAN, Scanned, Spans, csv_reader, json_syntax, scan
from raytune_fsdp.data.sources.source import (
    CACHE_GONE,
    File,
    Keys,
    Part,
    Row,
    compression_of,
    ending_of,
    reading,
    shorten,
    too_large,
)

# Rows that follow each other are read together, up to this many bytes.
_TOGETHER_BYTES = 1 << 20
_GAP_BYTES = 64  # a comma and white space between the elements of a JSON array
# Rows in a stretch of a text file (`Source.blocks`), for data.shuffle=blocks.
_BLOCK_ROWS = 1024
_ARRAY = re.compile(rb"\s*\[\s*(?:\{|$)")
_WITHOUT_KEYS = ("csv", "text")
_RULES = {
    "jsonl": "a JSON Lines file is UTF-8 text with one JSON object a line",
    "json": "a JSON file with rows is an array of objects in UTF-8",
    "csv": "a CSV file is UTF-8 text with a header, and every record has as many fields as the header",
    "text": "a text file is UTF-8 with one row a line",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRows(Part):
    """The rows of one text file."""

    stored: Stored
    spans: str
    syntax: str
    columns: tuple[str, ...]
    delimiter: str
    first: int = 0
    """Place of its first row in the file `spans`, which may hold the rows of many files."""
    keys: Keys = Keys()

    def blocks(self) -> Iterable[int]:
        for first in range(0, self.count, _BLOCK_ROWS):
            yield min(_BLOCK_ROWS, self.count - first)

    def touch(self) -> None:
        touch(self.spans)

    def where(self, index: int) -> str:
        if self.syntax == "json":
            return Part.where(self, index)
        return f"{self.shown}:{self._spans()[index]['line']}"

    def rows(self, indices: Sequence[int]) -> list[Row | RowError]:
        spans = self._spans()[np.asarray(indices, dtype=np.int64)]
        if self.most is not None and len(spans) and int(spans["bytes"].max()) > self.most:
            largest = int(spans["bytes"].argmax())
            raise too_large(self.where(indices[largest]), int(spans["bytes"][largest]), self.most)
        file = self.stored.open()
        rows: list[Row | RowError] = [{}] * len(spans)
        # In the order of the file, because storage reads forward fastest, and neighbours together, because each read
        # compares whole chunks with their hashes.
        order = np.argsort(spans["offset"], kind="stable").tolist()
        starts = spans["offset"][order].tolist()
        ends = (spans["offset"] + spans["bytes"])[order].tolist()
        first = 0
        while first < len(order):
            last = first + 1
            end = starts[first] + _TOGETHER_BYTES
            while last < len(order) and starts[last] <= ends[last - 1] + _GAP_BYTES and ends[last] <= end:
                last += 1
            raw = file.read(starts[first], ends[last - 1] - starts[first])
            for place in range(first, last):
                row = raw[starts[place] - starts[first] : ends[place] - starts[first]]
                rows[order[place]] = self._parse(row, indices[order[place]])
            first = last
        return rows

    def _parse(self, raw: bytes, index: int) -> Row | RowError:
        raw = raw.removesuffix(b"\n").removesuffix(b"\r")
        try:
            # -sig: files joined into one may have a byte order mark in front of any line, which JSON refuses.
            text = raw.decode("utf-8-sig" if self.syntax == "jsonl" else "utf-8")
        except UnicodeDecodeError as error:
            piece = "line" if self.syntax in ("jsonl", "text") else "row"
            return self._broken(
                index,
                f"not UTF-8 at byte {error.start} of the {piece}, {raw[error.start : error.start + 8]!r}",
                way_out="convert the file, for example with iconv",
                reason="invalid_utf8",
            )
        if self.syntax == "text":
            return {"text": text}
        if self.syntax == "csv":
            try:
                fields = next(csv_reader(io.StringIO(text, newline="\n"), self.delimiter))
            except csv.Error as error:
                return self._broken(index, f"not a CSV record ({error}) in {shorten(text.strip())!r}")
            if len(fields) != len(self.columns):
                return self._broken(
                    index, f"{len(fields)} fields, the header has {len(self.columns)}, in {shorten(text.strip())!r}"
                )
            return dict(zip(self.columns, fields, strict=True))
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
            return self._broken(index, f"not valid JSON ({error}) in {shorten(text.strip())!r}")
        if not isinstance(row, dict):
            return self._broken(index, f"{shorten(row)!r} is not a JSON object but {type(row).__name__}")
        return row

    def _is_array(self) -> bool:
        """Return whether a JSON Lines file is one JSON array, which other tools write under the same ending."""
        if self.syntax != "jsonl":
            return False
        file, (start, size) = self.stored.open(), (int(self._spans()[0][each]) for each in ("offset", "bytes"))
        if not _ARRAY.match(file.read(start, min(size, 64))):
            return False
        with suppress(ValueError, RecursionError):
            json.loads(file.read(start, min(size, 1 << 20)))
            return self.count == 1  # else each line is a list
        return True

    def _broken(
        self, index: int, what: str, *, way_out: str = "correct or remove the row", reason: str = "broken_row"
    ) -> RowError:
        if self._is_array():
            what, way_out = "the file is one JSON array", "set the dataset's file_type=json"
        return RowError(f"{self.where(index)}: {what}; {_RULES[self.syntax]}: {way_out}", reason)

    def _spans(self) -> Any:
        def make() -> Any:
            with reading(self.spans, CACHE_GONE):
                return np.memmap(self.spans, dtype=SPAN, mode="r").view(np.ndarray)

        return OPEN.get(("spans", self.spans), make)[self.first : self.first + self.count]


def open_text(
    file: File, kind: str, *, cache: Path, progress: Progress | None, every: int = 1, keys: bool = False
) -> TextRows:
    """Find the rows of a file, unless an earlier run did; with `keys`, also which keys they have.

    `every`: see `Blocks.hold`.
    """
    copied = file.remote or compression_of(file.url) is not None

    def make(directory: Path) -> Mapping[str, Any]:
        path = Path(file.url)
        if copied:
            path = directory / "content"
            write_content(file, path, progress=progress)
        with _opened(path, shown=file.shown) as source, open(directory / "spans", "wb") as spans:
            size = os.fstat(source.fileno()).st_size
            meta, hashing = find_rows(source, size, spans, file=file, kind=kind, progress=progress, keys=keys)
        if copied:
            keep_hashes(file, directory)
        else:
            (directory / BLOCKS).write_bytes(hashing.blocks())
            check_unchanged(file)
        return meta

    how = {"preparation": "text", "kind": kind}
    made = prepare_one(file, how, make, cache=cache, every=every, progress=progress, in_place=not copied)
    stored = made.stored("content", shown=file.shown) if copied else made.in_place(file)
    rows = text_rows(file, made.meta, stored=stored, spans=str(made.path / "spans"))
    return with_keys([rows], [made.meta], made)[0] if keys else rows


def text_rows(file: File, meta: Mapping[str, Any], *, stored: Stored, spans: str, first: int = 0) -> TextRows:
    """Return the rows of a file, from what `find_rows` has found."""
    delimiter = delimiter_of(file)
    # The same bytes are different rows if they are read in a different way.
    read_as = [meta["content"], meta["syntax"], delimiter if meta["syntax"] == "csv" else None]
    return TextRows(
        shown=file.shown,
        fingerprint=xxhash.xxh3_128_hexdigest(json.dumps(read_as).encode()),
        count=meta["rows"],
        stored=stored,
        spans=spans,
        syntax=meta["syntax"],
        columns=tuple(meta["columns"]),
        delimiter=delimiter,
        first=first,
    )


def delimiter_of(file: File) -> str:
    """Return the delimiter between the fields of a CSV file."""
    return "\t" if ending_of(file.url) == ".tsv" else ","


def with_keys(texts: Sequence[TextRows], metas: Sequence[Mapping[str, Any]], made: PreparedRows) -> list[TextRows]:
    """Return these with the keys of their rows, from `find_rows`, or from a search now if it did not look for them."""

    def search() -> list[Keys]:
        return [_keys_of(text, meta) for text, meta in zip(texts, metas, strict=True)]

    found = search() if all("keys" in meta for meta in metas) else cached_keys(made, search)
    return [replace(text, keys=each) for text, each in zip(texts, found, strict=True)]


def _keys_of(text: TextRows, meta: Mapping[str, Any]) -> Keys:
    if "keys" in meta:
        return Keys.from_json(meta["keys"])
    if text.syntax in _WITHOUT_KEYS:
        return keys_of_columns(text.columns)
    search, file = KeySearch(), text.stored.open()
    for offset in range(0, text.stored.size, _TOGETHER_BYTES):
        search.update(file.read(offset, min(_TOGETHER_BYTES, text.stored.size - offset)))
    return search.found()


def find_rows(
    source: BinaryIO, size: int, out: BinaryIO, *, file: File, kind: str, progress: Progress | None, keys: bool
) -> tuple[Mapping[str, Any], ChunkHashing]:
    """Write where the rows of an open file are. Return what is known of the file, and the hashes of its content."""
    syntax = json_syntax(source, shown=file.shown) if kind == "json" else kind
    spans, search = Spans(out), KeySearch() if keys and syntax not in _WITHOUT_KEYS else None
    scanned = Scanned(source, shown=file.shown, size=size, progress=progress, search=search)
    columns = scan(scanned, spans, syntax=syntax, delimiter=delimiter_of(file))
    spans.flush()
    if not spans.count:
        raise DataError(
            f"{file.shown}: has no rows ({scanned.offset} bytes); {_RULES[syntax]}: correct the dataset's path, or "
            "remove the file"
        )
    content = scanned.hashing.content
    meta = {"content": content, "rows": spans.count, "syntax": syntax, "columns": columns}
    if keys:
        meta["keys"] = (keys_of_columns(columns) if search is None else search.found()).to_json()
    return meta, scanned.hashing


def _opened(path: Path, *, shown: str) -> BinaryIO:
    with reading(shown):
        return open(path, "rb")


# Many small text files are prepared together: one directory of the cache for thousands of them instead of one for each.
#
# A directory of its own costs a file 8 ms when it is made (four waits for storage) and 2 ms whenever it is opened.

# From this many files on: with few, one that changes should not make the others be read again.
_MANY = 32
_SMALL_BYTES = 1 << 20
# Files in one directory. If one of them changes, all are read again: 4 GB at most.
_TOGETHER = 4096
_TEXTS = "texts.json"


def small_groups(files: Sequence[File]) -> list[list[File]]:
    """Return the small files that are read in place, in groups to be prepared together; none if they are few."""
    small = [file for file in files if not file.remote and file.size <= _SMALL_BYTES and not compression_of(file.url)]
    return [small[n : n + _TOGETHER] for n in range(0, len(small), _TOGETHER)] if len(small) >= _MANY else []


def open_small_texts(
    files: Sequence[File], kind: str, *, cache: Path, progress: Progress | None, every: int = 1, keys: bool = False
) -> list[TextRows]:
    """Find the rows of these small files, unless an earlier run did; see `open_text`."""
    shown = f"{files[0].shown} and {len(files) - 1} more"

    def make(directory: Path) -> Mapping[str, Any]:
        texts = []
        with open(directory / "spans", "wb") as spans, open(directory / BLOCKS, "wb") as hashes:
            for number, file in enumerate(files):
                with reading(file.shown), open(file.url, "rb") as opened:
                    source = io.BytesIO(opened.read(_SMALL_BYTES))  # buffered, or storage might give a part of it
                if source.getbuffer()[: len(GIT_LFS)] == GIT_LFS:
                    raise DataError(f"{file.shown}: {IS_POINTER}")
                meta, hashing = find_rows(source, file.size, spans, file=file, kind=kind, progress=None, keys=keys)
                hashes.write(hashing.blocks())
                check_unchanged(file)
                texts.append(meta)
                if progress is not None:
                    progress(shown, number + 1, len(files))
        (directory / _TEXTS).write_text(json.dumps(texts), encoding="utf-8")
        return {"rows": sum(meta["rows"] for meta in texts)}

    def hashes_of_files(made: PreparedRows) -> Iterator[ChunkHashes]:
        path, first = str(made.path / BLOCKS), 0
        for file in files:
            yield ChunkHashes(path, first)
            first += -(-file.size // CHUNK_BYTES)

    def parts(made: PreparedRows) -> list[TextRows]:
        found: list[TextRows] = []
        row, spans = 0, str(made.path / "spans")
        texts = json.loads((made.path / _TEXTS).read_text(encoding="utf-8"))
        for file, meta, hashes in zip(files, texts, hashes_of_files(made), strict=True):
            stored = Stored(file.shown, file.url, file.size, meta["content"], hashes)
            found.append(text_rows(file, meta, stored=stored, spans=spans, first=row))
            row += meta["rows"]
        return with_keys(found, texts, made) if keys else found

    def holds(made: PreparedRows) -> bool:
        return all(hashes.hold(file, every) for file, hashes in zip(files, hashes_of_files(made), strict=True))

    facts = json.dumps([(file.url, file.size, file.version) for file in files])
    identity = {
        "preparation": "texts",
        "kind": kind,
        "files": len(files),
        "whole": xxhash.xxh3_128_hexdigest(facts.encode("utf-8", "surrogateescape")),
        "blocks": CHUNK_BYTES,
    }
    return parts(prepare_file(cache, identity, make, shown=shown, progress=progress, holds=holds))
