"""Rows of Parquet files: read in place by row group, or written once as Arrow for random access."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from raytune_fsdp.base.batch import Progress
from raytune_fsdp.base.errors import DataError, RowError
from raytune_fsdp.base.file_systems import file_system
from raytune_fsdp.data.sources.arrow import (
    BATCH_ROWS,
    ArrowRows,
    check_columns,
    hash_file,
    in_place,
    index_batches,
    mapped,
    plain_schema,
    prepared_rows,
    read_groups,
    report_of,
    rows_of_groups,
    write_batches,
    write_groups,
)
from raytune_fsdp.data.sources.handles import (
    BLOCKS,
    DECODED,
    OPEN,
    ChunkHashes,
    Stored,
    check_unchanged,
    keep_hashes,
)
from raytune_fsdp.data.sources.keys import cached_keys, keys_of_schema
from raytune_fsdp.data.sources.prepared import prepare_one, touch
from raytune_fsdp.data.sources.remote import with_version, write_content
from raytune_fsdp.data.sources.source import Columns, File, Keys, Part, Row, compression_of, reading

_BUFFER_BYTES = 1 << 20
# How much of a file is in memory as decoded rows while it is written as Arrow.
_BATCH_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetRows(Part):
    """The rows of one Parquet file, read in place by row group."""

    file: File
    stored: Stored | None
    """The file, if it is local."""
    groups: str
    columns: Columns
    keys: Keys = Keys()

    def blocks(self) -> Iterable[int]:
        return read_groups(self.groups)

    def touch(self) -> None:
        touch(self.groups)

    def rows(self, indices: Sequence[int]) -> list[Row | RowError]:
        ends = OPEN.get(("groups", self.groups), lambda: np.cumsum(read_groups(self.groups), dtype=np.int64))
        return rows_of_groups(indices, of=self, ends=ends, group=self._group)

    def _group(self, number: int) -> Any:
        def make() -> Any:
            opened, lock = OPEN.get(("parquet", self.stored or self.file), self._open)
            try:
                with reading(self.shown), lock:
                    columns = self.columns.of(opened.schema_arrow.names)
                    return opened.read_row_group(number, columns=columns).combine_chunks()
            finally:
                if self.stored is None:  # also where it cannot be read: another object has other bytes there
                    self._check_version()

        if self.stored is not None:
            self.stored.open()  # raises if the file was cut off, also for rows that were decoded before
        return DECODED.get((self.stored or self.file, self.columns, number), make, lambda table: int(table.nbytes))

    def _open(self) -> tuple[Any, Lock]:
        if self.stored is None:
            self._check_version()
        with reading(self.shown):
            return _open(self.file, self.stored), Lock()

    def _check_version(self) -> None:
        """Ask the store whether the object is still the same: before the first row group, and after each."""
        if with_version(File(self.shown, self.file.url, self.file.size, "")).version != self.file.version:
            raise DataError(
                f"{self.shown}: has other content than when it was opened; a dataset must not change during a run: "
                "start again with the final file"
            )


def open_parquet(
    file: File,
    *,
    cache: Path,
    in_place: bool,
    columns: Columns,
    progress: Progress | None,
    every: int = 1,
    keys: bool = False,
) -> ArrowRows | ParquetRows:
    """Open a file in place, or its Arrow copy in the cache.

    Compressed files are always copied. So are files for which a store names no version: nobody could tell whether what
    is read later is still the same. `every`: see `Blocks.hold`. `keys`: also find which keys the rows have.
    """
    if in_place and compression_of(file.url) is None and not file.fetched:
        return _open_in_place(file, cache=cache, columns=columns, progress=progress, every=every, keys=keys)

    def make(directory: Path) -> Mapping[str, Any]:
        path = Path(file.url)
        if copied := file.remote or compression_of(file.url) is not None:
            path = directory / "copy"
            write_content(file, path, progress=progress)
        content = keep_hashes(file, directory)
        if copied:
            content = hash_file(path, file=file, progress=progress)
        with reading(file.shown):
            opened = pq.ParquetFile(str(path), buffer_size=_BUFFER_BYTES, pre_buffer=False)
        groups = _groups(opened, shown=file.shown)
        rows = directory / "rows.arrow"
        batches = _batches(opened, file=file, progress=progress)
        write_batches(rows, plain_schema(opened.schema_arrow), batches, shown=file.shown)
        opened.close()
        if copied:
            path.unlink()
        else:
            check_unchanged(file)
        write_groups(directory / "groups", groups)
        return {"content": content, "rows": index_batches(mapped(rows), directory, shown=file.shown)}

    how = {"preparation": "parquet as arrow"}
    made = prepare_one(file, how, make, cache=cache, every=every, progress=progress, in_place=False)
    return prepared_rows(made, shown=file.shown, columns=columns)


def _open_in_place(
    file: File, *, cache: Path, columns: Columns, progress: Progress | None, every: int, keys: bool
) -> ParquetRows:
    def make(directory: Path) -> Mapping[str, Any]:
        # A file in a store is identified by its ETag: `in_place` is there to avoid reading all of it.
        content = file.fingerprint if file.remote else keep_hashes(file, directory, report_of(file, progress))
        stored = Stored(file.shown, file.url, file.size, content, ChunkHashes(str(directory / BLOCKS)))
        with reading(file.shown):
            opened = _open(file, None if file.remote else stored)
        groups = _groups(opened, shown=file.shown)
        if not file.remote:
            check_unchanged(file)
        write_groups(directory / "groups", groups)
        return {"content": content, "rows": sum(groups)}

    how = {"preparation": "parquet in place"}
    made = prepare_one(file, how, make, cache=cache, every=every, progress=progress, in_place=not file.remote)
    stored = None if file.remote else made.in_place(file)

    def search() -> list[Keys]:
        with reading(file.shown):
            return [keys_of_schema(_open(file, stored).schema_arrow)]

    return ParquetRows(
        shown=file.shown,
        fingerprint=made.meta["content"],
        count=made.meta["rows"],
        file=file,
        stored=stored,
        groups=str(made.path / "groups"),
        columns=columns,
        keys=cached_keys(made, search, note="columns.json")[0] if keys else Keys(),
    )


def _open(file: File, stored: Stored | None) -> Any:
    if stored is not None:
        return pq.ParquetFile(in_place(stored), pre_buffer=False)
    system, path = file_system(file.url)
    # pre_buffer turns many small reads into a few large ones: a request to a store takes milliseconds. For a local file
    # it would only hold the raw bytes of a row group in memory.
    return pq.ParquetFile(system.open_input_file(path), pre_buffer=True)


def _groups(opened: Any, *, shown: str) -> list[int]:
    check_columns(opened.schema_arrow, shown=shown)
    return [opened.metadata.row_group(index).num_rows for index in range(opened.num_row_groups)]


def _batches(opened: Any, *, file: File, progress: Progress | None) -> Iterator[Any]:
    done, total = 0, max(opened.metadata.num_rows, 1)
    with reading(file.shown):
        for group in range(opened.num_row_groups):
            facts = opened.metadata.row_group(group)
            size = _BATCH_BYTES * facts.num_rows // max(facts.total_byte_size, 1)
            # Group by group: no batch spans two groups, so `blocks` are the same as in place.
            for batch in opened.iter_batches(min(max(size, 16), BATCH_ROWS), row_groups=[group]):
                yield batch
                done += batch.num_rows
                if progress is not None:
                    progress(file.shown, file.size * done // total, file.size)
