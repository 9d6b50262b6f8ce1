"""Rows of Arrow files (IPC), mapped into memory: those of the user, and those that other data was written to.

Both forms of IPC are a row of messages, each of which can be read alone; the file form has a mark before them and a
footer behind. So a table of where the messages are is all that reading at random takes, compressed or not.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from raytune_fsdp.data.sources.file_names import packing_of, shorten
from raytune_fsdp.data.sources.handles import DECODED, OPEN, Stored, check_unchanged, content_hash, local_file
from raytune_fsdp.data.sources.places import copy
from raytune_fsdp.data.sources.prepared import PreparedRows, prepare, touch
from raytune_fsdp.data.sources.source import GONE, Columns, File, Row, reading
from raytune_fsdp.errors import DataError, RowError
from raytune_fsdp.types import Progress

BATCH_ROWS = 1024
_BATCH = np.dtype([("offset", "<u8"), ("bytes", "<u8"), ("rows", "<u8")])
_FILE_MARK = b"ARROW1\0\0"
# From here on one take is cheaper than a slice a row.
_TAKE_ROWS = 8


@dataclass(frozen=True, slots=True)
class ArrowRows:
    """The rows of one Arrow file."""

    shown: str
    fingerprint: str
    count: int
    stored: Stored
    batches: str
    """Where its record batches are."""
    columns: Columns
    groups: str | None = None
    """Rows that belong together where that is not record batches."""

    def blocks(self) -> Iterable[int]:
        if self.groups is not None:
            return read_groups(self.groups)
        return (int(rows) for rows in self._table()[0]["rows"])

    def touch(self) -> None:
        touch(self.batches)

    def where(self, index: int) -> str:
        return f"{self.shown}, row {index + 1}"

    def rows(self, indices: Sequence[int]) -> list[Row | RowError]:
        _, ends = self._table()
        return rows_of_groups(indices, ends=ends, group=self._batch, where=self.where)

    def _batch(self, number: int) -> Any:
        def make() -> Any:
            offset, length, _ = self._table()[0][number].item()
            with reading(self.shown):
                message = pa.ipc.read_message(pa.BufferReader(self.stored.map().slice(offset, length)))
                batch = pa.ipc.read_record_batch(message, self._schema())
            columns = self.columns.of(batch.schema.names)
            return batch if columns is None else batch.select(columns)

        return DECODED.get((self.stored, self.columns, number), make, lambda batch: int(batch.nbytes))

    def _schema(self) -> Any:
        return OPEN.get(("schema", self.stored), lambda: pa.ipc.read_schema(_reader(self.stored.map())))

    def _table(self) -> tuple[Any, Any]:
        def make() -> tuple[Any, Any]:
            with reading(self.batches, GONE):
                table = np.fromfile(self.batches, dtype=_BATCH)
            return table, np.cumsum(table["rows"], dtype=np.int64)

        found: tuple[Any, Any] = OPEN.get(("batches", self.batches), make)
        return found


def open_arrow(file: File, *, cache: Path, columns: Columns, progress: Progress | None) -> ArrowRows:
    """Find the record batches of a file, unless that was done before. Copied only if it is packed or on a store."""
    copied = file.remote or packing_of(file.url) is not None

    def make(directory: Path) -> Mapping[str, Any]:
        path = Path(file.url)
        if copied:
            path = directory / "rows.arrow"
            copy(file, path, progress=progress)
        content = hash_file(path, file=file, progress=progress)
        with reading(file.shown):
            schema = pa.ipc.read_schema(_reader(_map(path)))
        check_columns(schema, shown=file.shown)
        plain = plain_schema(schema)
        if rewritten := plain != schema:
            # Dictionaries stand in messages of their own, which every batch needs that comes after.
            written = directory / "plain.arrow"
            write_batches(written, plain, _batches(path, file.shown), shown=file.shown)
            path = written.replace(directory / "rows.arrow")
        if not copied:
            check_unchanged(file)
        rows = index_batches(path, directory, shown=file.shown)
        return {"content": content, "rows": rows, "copied": copied or rewritten}

    made = prepare(cache, {"preparation": "arrow", **file.identity}, make, shown=file.shown, progress=progress)
    if made.meta["copied"]:
        return prepared_rows(made, shown=file.shown, columns=columns)
    return ArrowRows(
        shown=file.shown,
        fingerprint=made.meta["content"],
        count=made.meta["rows"],
        stored=local_file(file, made.meta["content"]),
        batches=str(made.path / "batches"),
        columns=columns,
    )


def prepared_rows(made: PreparedRows, *, shown: str, columns: Columns) -> ArrowRows:
    """The rows of `rows.arrow` in a directory of the cache."""
    return ArrowRows(
        shown=shown,
        fingerprint=made.meta["content"],
        count=made.meta["rows"],
        stored=made.stored("rows.arrow", shown=shown),
        batches=str(made.path / "batches"),
        columns=columns,
        groups=str(made.path / "groups") if "groups" in made.meta["files"] else None,
    )


def write_batches(path: Path, schema: Any, batches: Iterable[Any], *, shown: str) -> None:
    """Write rows as an Arrow file, in batches that are small enough to be decoded for the sake of one row."""
    # Facts about the schema that are no part of the rows must not change the content.
    schema = schema.remove_metadata()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            if batch.schema != schema:
                with reading(shown):
                    batch = batch.cast(schema)
            for first in range(0, batch.num_rows, BATCH_ROWS):
                writer.write_batch(batch.slice(first, BATCH_ROWS))


def index_batches(path: Path, directory: Path, *, shown: str) -> int:
    """Write down where the record batches of a file are; returns the number of rows."""
    found = []
    with reading(shown):
        reader = _reader(_map(path))
        schema = pa.ipc.read_schema(reader)
        while True:
            start = reader.tell()
            try:
                message = pa.ipc.read_message(reader)
            except EOFError:
                break
            if message.type != "record batch":
                raise ValueError(f"unexpected message: {message.type}")
            batch = pa.ipc.read_record_batch(message, schema)
            batch.validate()
            found.append((start, reader.tell() - start, batch.num_rows))
    (directory / "batches").write_bytes(np.array(found, dtype=_BATCH).tobytes())
    return sum(rows for _, _, rows in found)


def rows_of_groups(indices: Sequence[int], *, ends: Any, group: Any, where: Any) -> list[Row | RowError]:
    """Rows by number, `group(k)` being a table or record batch of those before `ends[k]`."""
    numbers = np.asarray(indices, dtype=np.int64)
    places = np.searchsorted(ends, numbers, side="right")
    rows: list[Row | RowError] = [{}] * len(numbers)
    for place in np.unique(places).tolist():
        wanted = np.flatnonzero(places == place)
        first = int(ends[place - 1]) if place else 0
        for position, row in zip(
            wanted.tolist(), _take(group(place), numbers[wanted] - first, first, where), strict=True
        ):
            rows[position] = row
    return rows


def _take(table: Any, local: Any, first: int, where: Any) -> Iterator[Row | RowError]:
    if len(local) >= _TAKE_ROWS:
        try:
            yield from table.take(pa.array(local)).to_pylist()
            return
        except (ValueError, OverflowError, pa.ArrowNotImplementedError):
            pass  # one of them: found below
    for index in local.tolist():
        try:
            yield table.slice(index, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            text = f"{where(first + index)}: not UTF-8, {shorten(error.object)}; correct or remove the row"
            yield RowError(text, "invalid_utf8")
        except (ValueError, OverflowError) as error:
            text = f"{where(first + index)}: a value that Python cannot hold ({error}); correct or remove the row"
            yield RowError(text, "broken_row")


def read_groups(path: str) -> list[int]:
    """Sizes of groups of rows, as `write_groups` wrote them."""
    with reading(path, GONE):
        return [int(rows) for rows in np.fromfile(path, dtype="<u8")]


def write_groups(path: Path, groups: Sequence[int]) -> None:
    """Write the sizes of groups of rows."""
    path.write_bytes(np.array(groups, dtype="<u8").tobytes())


def hash_file(path: Path, *, file: File, progress: Progress | None) -> str:
    """Hash of what the file holds, in one pass."""
    with reading(file.shown), open(path, "rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        tell = None if progress is None else lambda done: progress(file.shown, done, size)
        return content_hash(opened.fileno(), tell)


def check_columns(schema: Any, *, shown: str) -> None:
    """A row is a dict: two columns of a name would be one."""
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise DataError(f"{shown}: has two columns called {', '.join(twice)}; write the file again without that")


def plain_schema(schema: Any) -> Any:
    """The schema with values in place of dictionaries of them."""
    return pa.schema([field.with_type(_plain(field.type)) for field in schema], metadata=schema.metadata)


def _plain(kind: Any) -> Any:
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_plain(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_plain(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_plain(kind.value_type)))
    return kind


def _batches(path: Path, shown: str) -> Iterator[Any]:
    with reading(shown):
        source = pa.memory_map(str(path))
        if _map(path).slice(0, len(_FILE_MARK)).to_pybytes() == _FILE_MARK:
            opened = pa.ipc.open_file(source)
            yield from (opened.get_batch(index) for index in range(opened.num_record_batches))
        else:
            yield from pa.ipc.open_stream(source)


def _map(path: Path) -> Any:
    return pa.memory_map(str(path)).read_buffer()


def _reader(buffer: Any) -> Any:
    reader = pa.BufferReader(buffer)
    if reader.read(len(_FILE_MARK)) != _FILE_MARK:
        reader.seek(0)
    return reader
