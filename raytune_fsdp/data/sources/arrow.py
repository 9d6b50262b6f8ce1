"""Rows of Arrow files (IPC): the user's files, and files in the cache, which are mapped into memory.

Both IPC formats are a sequence of messages, each of which can be read alone; the file format adds a mark in front and a
footer at the end. So random access needs only a table of the messages' places, even if they are compressed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from raytune_fsdp.base.batch import Progress
from raytune_fsdp.base.errors import DataError, RowError
from raytune_fsdp.data.sources.handles import (
    BLOCKS,
    DECODED,
    OPEN,
    ChunkHashes,
    Reader,
    Stored,
    TooLarge,
    content_hash,
    keep_hashes,
)
from raytune_fsdp.data.sources.json_columns import with_json
from raytune_fsdp.data.sources.keys import keys_of_schema
from raytune_fsdp.data.sources.prepared import PreparedRows, prepare_one, touch
from raytune_fsdp.data.sources.remote import write_content
from raytune_fsdp.data.sources.source import (
    CACHE_GONE,
    Columns,
    File,
    Keys,
    Part,
    Row,
    by_part,
    compression_of,
    reading,
    shorten,
    too_large,
)

BATCH_ROWS = 1024
_BATCH = np.dtype([("offset", "<u8"), ("bytes", "<u8"), ("rows", "<u8")])
LARGEST_BATCH = 256 << 20
"""The most bytes of a record batch that is read in place. A batch of the datasets library has 1000 rows."""
_COPY_BYTES = 8 << 20
_FILE_MARK = b"ARROW1\0\0"
# From this many rows on, one take is cheaper than one slice a row: 55 us for 8 chats either way, 110 against 227 for
# 32.
_TAKE_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowRows(Part):
    """The rows of one Arrow file."""

    stored: Stored
    batches: str
    """File in the cache that lists where the record batches are."""
    columns: Columns
    groups: str | None = None
    """File in the cache with the sizes of stretches (`Source.blocks`), if they are not record batches."""

    def blocks(self) -> Iterable[int]:
        if self.groups is not None:
            return read_groups(self.groups)
        return (int(rows) for rows in self._table()[0]["rows"])

    def touch(self) -> None:
        touch(self.batches)

    @property
    def keys(self) -> Keys:
        with reading(self.shown):
            return keys_of_schema(self._schema())

    def rows(self, indices: Sequence[int]) -> list[Row | RowError]:
        return rows_of_groups(indices, of=self, ends=self._table()[1], group=self._batch)

    def _batch(self, number: int) -> Any:
        def make() -> Any:
            offset, length, _ = self._table()[0][number].item()
            with reading(self.shown):
                if self.stored.blocks is None:
                    data = self.stored.map().slice(offset, length)
                else:
                    data = pa.py_buffer(self.stored.open().read(offset, length))
                batch = pa.ipc.read_record_batch(pa.ipc.read_message(pa.BufferReader(data)), self._schema())
            columns = self.columns.of(batch.schema.names)
            return batch if columns is None else batch.select(columns)

        def size(batch: Any) -> int:
            # Columns that are not selected stay in memory with the others, unless they are mapped.
            return int(batch.nbytes if self.stored.blocks is None else self._table()[0][number]["bytes"])

        if self.stored.blocks is not None:
            self.stored.open()  # raises if the file was cut off, also for rows that were decoded before
        return DECODED.get((self.stored, self.columns, number), make, size)

    def _schema(self) -> Any:
        def make() -> Any:
            source = pa.BufferReader(self.stored.map()) if self.stored.blocks is None else in_place(self.stored)
            return pa.ipc.read_schema(_after_mark(source))

        return OPEN.get(("schema", self.stored), make)

    def _table(self) -> tuple[Any, Any]:
        def make() -> tuple[Any, Any]:
            with reading(self.batches, CACHE_GONE):
                table = np.fromfile(self.batches, dtype=_BATCH)
            return table, np.cumsum(table["rows"], dtype=np.int64)

        found: tuple[Any, Any] = OPEN.get(("batches", self.batches), make)
        return found


def open_arrow(file: File, *, cache: Path, columns: Columns, progress: Progress | None, every: int = 1) -> ArrowRows:
    """Find the record batches of a file, unless an earlier run did. `every`: see `Blocks.hold`.

    The file is copied only if it is compressed, is in a store, or must be rewritten to be read in any order.
    """
    foreign = file.remote or compression_of(file.url) is not None

    def make(directory: Path) -> Mapping[str, Any]:
        path = directory / "rows.arrow"
        content = keep_hashes(file, directory, report_of(file, progress))
        if foreign:
            write_content(file, path, progress=progress)
            content = hash_file(path, file=file, progress=progress)
        else:
            stored = Stored(file.shown, file.url, file.size, content, ChunkHashes(str(directory / BLOCKS)))
            if (rows := _index_in_place(stored, directory)) is not None:
                return {"content": content, "rows": rows, "copied": False}
            with open(path, "wb") as target:  # as the file was when it was hashed
                for offset in range(0, stored.size, _COPY_BYTES):
                    target.write(stored.open().read(offset, min(_COPY_BYTES, stored.size - offset)))
        with reading(file.shown):
            schema = pa.ipc.read_schema(_after_mark(mapped(path)))
        check_columns(schema, shown=file.shown)
        plain = plain_schema(schema)
        if plain != schema or not foreign:
            if plain == schema:  # batches that are too large stay the stretches that data.shuffle=blocks shuffles
                write_groups(directory / "groups", [batch.num_rows for batch in _batches(path, file.shown)])
            written = directory / "plain.arrow"
            write_batches(written, plain, _batches(path, file.shown), shown=file.shown)
            path = written.replace(path)
        rows = index_batches(mapped(path), directory, shown=file.shown)
        return {"content": content, "rows": rows, "copied": True}

    how = {"preparation": "arrow"}
    made = prepare_one(file, how, make, cache=cache, every=every, progress=progress, in_place=not foreign)
    if made.meta["copied"]:
        return prepared_rows(made, shown=file.shown, columns=columns)
    return ArrowRows(
        shown=file.shown,
        fingerprint=made.meta["content"],
        count=made.meta["rows"],
        stored=made.in_place(file),
        batches=str(made.path / "batches"),
        columns=columns,
    )


def _index_in_place(stored: Stored, directory: Path) -> int | None:
    """Return the number of rows if they can be read in place; None if they must be rewritten.

    Dictionaries are messages of their own, without which the batches after them cannot be read. And a batch must fit
    into memory, because the user's file is not mapped: pages of it that somebody cuts off would kill the process.
    """
    with reading(stored.shown):
        schema = pa.ipc.read_schema(_after_mark(in_place(stored)))
    check_columns(schema, shown=stored.shown)
    if plain_schema(schema) != schema:
        return None
    try:
        return index_batches(in_place(stored, most=LARGEST_BATCH), directory, shown=stored.shown)
    except TooLarge:
        return None


def prepared_rows(made: PreparedRows, *, shown: str, columns: Columns) -> ArrowRows:
    """Return the rows of `rows.arrow` in a directory of the cache."""
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
    """Write rows as an Arrow file, in batches small enough to be decoded for a single row."""
    # Metadata is not part of the rows, so it must not change the content hash.
    schema = schema.remove_metadata()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            if batch.schema != schema:
                with reading(shown):
                    batch = batch.cast(schema)
            for first in range(0, batch.num_rows, BATCH_ROWS):
                writer.write_batch(batch.slice(first, BATCH_ROWS))


def index_batches(source: Any, directory: Path, *, shown: str) -> int:
    """Write a table of the places of an open file's record batches. Return the number of rows."""
    found = []
    with reading(shown):
        reader = _after_mark(source)
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
            _check_values(batch)
            found.append((start, reader.tell() - start, batch.num_rows))
    (directory / "batches").write_bytes(np.array(found, dtype=_BATCH).tobytes())
    return sum(rows for _, _, rows in found)


def rows_of_groups(indices: Sequence[int], *, of: Part, ends: Any, group: Any) -> list[Row | RowError]:
    """Return rows of a file by number. `group(k)`: the table or record batch with rows `ends[k - 1]` to `ends[k]`."""

    def read(place: int, first: int, local: Any) -> Iterator[Row | RowError]:
        table = group(place)
        if of.most is not None and table.nbytes > of.most:
            for index in local.tolist():
                if (size := table.slice(index, 1).nbytes) > of.most:
                    raise too_large(of.where(first + index), size, of.most)
        rows = _take(table, local, first, of.where)
        return with_json(rows, table.schema) if of.json else rows

    return by_part(indices, ends, read)


def _take(table: Any, local: Any, first: int, where: Any) -> Iterator[Row | RowError]:
    if len(local) >= _TAKE_ROWS and table.num_columns:  # pyarrow cannot take rows without columns
        try:
            yield from table.take(pa.array(local)).to_pylist()
            return
        # One row with broken text, or a date that Python does not have, makes all of them fail.
        except (ValueError, OverflowError, pa.ArrowNotImplementedError):
            pass
    for index in local.tolist():
        try:
            yield table.slice(index, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            text = f"{where(first + index)}: not UTF-8, {shorten(error.object)}; correct or remove the row"
            yield RowError(text, "invalid_utf8")
        except (ValueError, OverflowError) as error:
            text = f"{where(first + index)}: has a value that Python cannot hold ({error}); correct or remove the row"
            yield RowError(text, "broken_row")


def read_groups(path: str) -> list[int]:
    """Return the sizes of groups of rows that `write_groups` wrote."""
    with reading(path, CACHE_GONE):
        return [int(rows) for rows in np.fromfile(path, dtype="<u8")]


def write_groups(path: Path, groups: Sequence[int]) -> None:
    """Write the sizes of groups of rows."""
    path.write_bytes(np.array(groups, dtype="<u8").tobytes())


def hash_file(path: Path, *, file: File, progress: Progress | None) -> str:
    """Return the hash of the file's content."""
    with reading(file.shown), open(path, "rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        report = None if progress is None else lambda done: progress(file.shown, done, size)
        return content_hash(opened.fileno(), report)


def check_columns(schema: Any, *, shown: str) -> None:
    """Refuse two columns of the same name: a row is a dict, so one of them would be lost."""
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise DataError(f"{shown}: has two columns called {', '.join(twice)}; rename one and write the file again")


def plain_schema(schema: Any) -> Any:
    """Return the schema with dictionary types replaced by the types of their values."""
    return pa.schema([field.with_type(_plain(field.type)) for field in schema], metadata=schema.metadata)


def _plain(kind: Any) -> Any:
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    return _of_parts(kind, _plain)


def _of_parts(kind: Any, change: Callable[[Any], Any]) -> Any:
    """Return a nested type with the types of its parts changed; any other type as it is."""
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(change(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(change(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(change(kind.value_type)))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(change(kind.value_type)), kind.list_size)
    if pa.types.is_map(kind):
        key, item = (field.with_type(change(field.type)) for field in (kind.key_field, kind.item_field))
        return pa.map_(key, item, keys_sorted=kind.keys_sorted)
    return kind


def _check_values(batch: Any) -> None:
    """Raise ArrowInvalid for lengths and offsets that lead out of a stranger's file: using them crashes the process.

    Not for values that are only wrong in themselves, such as text that is not UTF-8: their rows are bad rows.
    """
    batch.validate()
    for column in batch.columns:
        shape = _shape(column.type)
        (column if shape == column.type else column.view(shape)).validate(full=True)


def _shape(kind: Any) -> Any:
    """Return a type of the same bytes, of which every value is allowed."""
    for is_kind, shape in (
        (pa.types.is_string, pa.binary()), (pa.types.is_large_string, pa.large_binary()),
        (pa.types.is_string_view, pa.binary_view()), (pa.types.is_time32, pa.int32()), (pa.types.is_time64, pa.int64()),
        (pa.types.is_date64, pa.int64()),
    ):  # fmt: skip
        if is_kind(kind):
            return shape
    return pa.binary(kind.byte_width) if pa.types.is_decimal(kind) else _of_parts(kind, _shape)


def _batches(path: Path, shown: str) -> Iterator[Any]:
    """Yield the record batches of a file in the cache."""
    with reading(shown):
        source = pa.memory_map(str(path))
        if _map(path).slice(0, len(_FILE_MARK)).to_pybytes() == _FILE_MARK:
            opened = pa.ipc.open_file(source)
            found = (opened.get_batch(index) for index in range(opened.num_record_batches))
        else:
            found = iter(pa.ipc.open_stream(source))
        for batch in found:
            _check_values(batch)
            yield batch


def _map(path: Path) -> Any:
    return pa.memory_map(str(path)).read_buffer()


def mapped(path: Path) -> Any:
    """Open a file in the cache for pyarrow, mapped into memory."""
    return pa.BufferReader(_map(path))


def in_place(stored: Stored, most: int | None = None) -> Any:
    """Open one of the user's files for pyarrow."""
    return pa.PythonFile(Reader(stored, most), mode="r")


def _after_mark(source: Any) -> Any:
    if source.read(len(_FILE_MARK)) != _FILE_MARK:
        source.seek(0)
    return source


def report_of(file: File, progress: Progress | None) -> Callable[[int], None] | None:
    """Return a function that reports progress in reading a file, by the bytes that have been read."""
    return None if progress is None else lambda done: progress(file.shown, done, file.size)
