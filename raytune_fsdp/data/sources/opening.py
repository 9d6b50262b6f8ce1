"""Open whatever a dataset of the config can name, as rows found by number."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock

from raytune_fsdp.base.batch import Progress
from raytune_fsdp.base.errors import DataError
from raytune_fsdp.base.untrusted import GIT_LFS, IS_POINTER
from raytune_fsdp.base.urls import without_secrets
from raytune_fsdp.config.sections.data import DataConfig, DatasetConfig, SourceConfig
from raytune_fsdp.config.sections.formats import (
    COLUMNS,
    FUNCTIONS,
    ChatFormat,
    Format,
    needed_columns,
)
from raytune_fsdp.data.mixture import FOURTH_ORDER, OLDEST_ORDER, ORDER_VERSION, SIXTH_ORDER
from raytune_fsdp.data.sources.arrow import open_arrow
from raytune_fsdp.data.sources.hub import open_hub
from raytune_fsdp.data.sources.keys import lowest_order
from raytune_fsdp.data.sources.parquet import open_parquet
from raytune_fsdp.data.sources.places import find_files, one_kind
from raytune_fsdp.data.sources.remote import with_content
from raytune_fsdp.data.sources.selection import some_rows
from raytune_fsdp.data.sources.source import Columns, File, Files, Part, Source, reading, shorten
from raytune_fsdp.data.sources.texts import TextRows, open_small_texts, open_text, small_groups

# How many files are opened at once: stores and disks answer slowly, but many requests at a time. Only two while rows
# are decoded to be written as Arrow, which takes memory.
_AT_ONCE = 8
_DECODED_AT_ONCE = 2
_DELIMITERS = (";", "\t", "|", ",")
# How much of a dataset that was prepared before is compared with what it was, when it is opened: all of it if it is no
# larger, else chunks spread over it. 0.35 s at 3 GB/s. Whenever a row is read, all that it is read from is compared
# again.
_COMPARED_BYTES = 1 << 30


def open_source(
    dataset: SourceConfig,
    *,
    cache: Path,
    in_place: bool,
    progress: Progress | None = None,
    order: int = ORDER_VERSION,
    max_row_bytes: int | None = None,
    columns: Columns | None = None,
) -> Source:
    """Open a dataset. What is prepared for it is kept in `cache`, for all nodes.

    With `in_place`, Parquet files are read by row group where they are: for data that is too large to copy, in an order
    that keeps row groups together. Otherwise they are written once as Arrow, which can be read in any order. `order`:
    the version by whose rules rows are read. `columns`: the columns to read; None: those that the format names.
    """
    if columns is None:
        assert isinstance(dataset, DatasetConfig), "only a dataset has a format"
        columns = columns_of(dataset.format, order)
    format = dataset.format if isinstance(dataset, DatasetConfig) and order >= FOURTH_ORDER else None
    keys = isinstance(format, ChatFormat)
    # Not of tasks, whose columns are not looked at for the version, nor for functions, which know their columns.
    json = format is not None and order >= SIXTH_ORDER and not columns.every
    cache = Path(cache).absolute()
    columnar, order_version = True, OLDEST_ORDER
    if dataset.hub is not None:
        label = dataset.hub
        parts: tuple[Part, ...] = (open_hub(dataset, cache=cache, columns=columns, progress=progress),)
    else:
        label = without_secrets(dataset.path or "")
        found = find_files(dataset, order=order)
        order_version = found.order_version
        kind = one_kind(found.files, dataset)
        columnar = kind in ("arrow", "parquet")
        keys = keys or (columnar and json)
        parts = _open_files(found.files, kind, columns, cache=cache, in_place=in_place, progress=progress, keys=keys)
    if format is not None:
        order_version = max(order_version, lowest_order(format, (part.keys for part in parts)))
    json = json and any(columns.reads(name) for part in parts for name in part.keys.json)
    order_version = SIXTH_ORDER if json else order_version
    parts = tuple(replace(part, most=max_row_bytes, json=json) for part in parts)
    source = Files(label, parts, columnar, order_version)
    if not len(source):
        raise DataError(f"{label}: has no rows; correct the dataset's path, hub name or split")
    return some_rows(source, dataset.rows)


def open_sources(
    datasets: Sequence[DatasetConfig], data: DataConfig, cache: Path, progress: Progress | None, order: int
) -> list[Source]:
    """Open each dataset, for the order that the data is read in."""
    return [
        open_source(
            dataset, cache=cache, in_place=data.shuffle != "rows", progress=progress, order=order,
            max_row_bytes=data.max_row_bytes,
        )
        for dataset in datasets
    ]  # fmt: skip


def columns_of(format: Format, order: int) -> Columns:
    """Return the columns that a format needs, and those that it also reads if they exist, under version `order`."""
    needed = needed_columns(format)
    if needed is None:
        return Columns((), (), every=True)
    others = COLUMNS[format.type][1] if format.type in COLUMNS else []
    optional = tuple(name for field in others if (name := getattr(format, field)) is not None)
    if isinstance(format, ChatFormat) and order < FOURTH_ORDER:
        optional = tuple(name for name in optional if name == format.tools)
    elif isinstance(format, ChatFormat) and format.tools is not None:
        optional += (FUNCTIONS,)
    return Columns(needed, optional)


def _open_files(
    files: Sequence[File],
    kind: str,
    columns: Columns,
    *,
    cache: Path,
    in_place: bool,
    progress: Progress | None,
    keys: bool,
) -> tuple[Part, ...]:
    lock = Lock()
    every = max(1, -(-sum(file.size for file in files if not file.remote) // _COMPARED_BYTES))

    def report(what: str, done: int, total: int) -> None:
        assert progress is not None
        with lock:  # `progress` expects calls from one thread at a time
            progress(what, done, total)

    def open_file(file: File) -> Part:
        with with_content(file, cache=cache, progress=None if progress is None else report) as found:
            _check_content(found)
            return open_kind(found)

    def open_kind(file: File) -> Part:
        reported = None if progress is None else report
        if kind == "parquet":
            return open_parquet(
                file, cache=cache, in_place=in_place, columns=columns, progress=reported, every=every, keys=keys
            )
        if kind == "arrow":
            return open_arrow(file, cache=cache, columns=columns, progress=reported, every=every)
        text = open_text(file, kind, cache=cache, progress=reported, every=every, keys=keys)
        _check_delimiter(text, columns)
        return text

    decoded = kind in ("arrow", "parquet") and not in_place
    with ThreadPoolExecutor(_DECODED_AT_ONCE if decoded else _AT_ONCE) as threads:
        groups = small_groups(files) if kind not in ("arrow", "parquet") else []
        small = {file.url for group in groups for file in group}
        alone = {file.url: threads.submit(open_file, file) for file in files if file.url not in small}
        parts: dict[str, Part] = {}
        try:
            # In this thread: the work on thousands of small files is Python's own, and threads would only take turns.
            for group in groups:
                found = open_small_texts(
                    group, kind, cache=cache, progress=None if progress is None else report, every=every, keys=keys
                )
                parts.update(zip((file.url for file in group), found, strict=True))
            parts.update((url, future.result()) for url, future in alone.items())
            return tuple(parts[file.url] for file in files)
        finally:
            threads.shutdown(cancel_futures=True)


def _check_content(file: File) -> None:
    if file.remote:
        return
    with reading(file.shown), open(file.url, "rb") as content:
        if content.read(len(GIT_LFS)) == GIT_LFS:
            raise DataError(f"{file.shown}: {IS_POINTER}")


def _check_delimiter(rows: TextRows, columns: Columns) -> None:
    """Refuse a CSV file whose header is one column because its fields are separated by something else."""
    if len(rows.columns) != 1 or rows.columns[0] in columns.needed:
        return
    header = rows.columns[0]
    other = next((each for each in _DELIMITERS if each in header and each != rows.delimiter), None)
    if other is not None:
        named = "tabs" if other == "\t" else repr(other)
        rule = "a .tsv file has tabs" if rows.delimiter == "\t" else "a CSV file has commas"
        way_out = "give it the ending .tsv" if other == "\t" else "convert it"
        raise DataError(
            f"{rows.shown}: its columns seem to be separated by {named} (the header is {shorten(header)!r}); {rule}: "
            f"{way_out}"
        )
