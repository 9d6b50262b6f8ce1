"""Opens whatever a dataset of the config can name, as rows found by number."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from raytune_fsdp.config.data import DatasetConfig
from raytune_fsdp.config.formats import COLUMNS, Format, PythonFormat, TemplateFormat, parts_of
from raytune_fsdp.data.sources.arrow import open_arrow
from raytune_fsdp.data.sources.hub import open_hub
from raytune_fsdp.data.sources.parquet import open_parquet
from raytune_fsdp.data.sources.places import find_files, one_kind
from raytune_fsdp.data.sources.remote import with_version
from raytune_fsdp.data.sources.source import Columns, File, Files, Part, Source
from raytune_fsdp.data.sources.texts import open_text
from raytune_fsdp.errors import DataError
from raytune_fsdp.types import Progress
from raytune_fsdp.urls import without_secrets

# Files opened at once: stores and disks answer slowly, but many requests at a time. Only two while rows are decoded to
# be written as Arrow, which takes memory.
_AT_ONCE = 8
_DECODED_AT_ONCE = 2


def open_source(dataset: DatasetConfig, *, cache: Path, in_place: bool, progress: Progress | None = None) -> Source:
    """Open a dataset. What is prepared for it is kept in `cache`, for all nodes.

    With `in_place`, Parquet files are read by row group where they are: for data that is too large to copy, in an order
    that keeps blocks together. Otherwise they are written once as Arrow, which can be read in any order.
    """
    cache = Path(cache).absolute()
    columnar = True
    if dataset.hub is not None:
        label = dataset.hub
        parts: tuple[Part, ...] = (open_hub(dataset, cache=cache, columns=_columns(dataset.format), progress=progress),)
    else:
        label = without_secrets(dataset.path or "")
        files = find_files(dataset)
        kind = one_kind(files, dataset)
        columnar = kind in ("arrow", "parquet")
        parts = _open_files(files, kind, dataset, cache=cache, in_place=in_place, progress=progress)
    source = Files(label, parts, columnar)
    if not len(source):
        raise DataError(f"{label}: has no rows; correct the dataset's path, hub name or split")
    return source


def _columns(format: Format) -> Columns:
    if isinstance(format, PythonFormat):
        return Columns((), (), every=True)
    if isinstance(format, TemplateFormat):
        parts = (*parts_of(format.prompt), *parts_of(format.completion))
        return Columns(tuple(dict.fromkeys(name for _, name in parts if name is not None)), ())
    needed, optional = (
        tuple(name for field in fields if (name := getattr(format, field)) is not None)
        for fields in COLUMNS[format.type]
    )
    return Columns(needed, optional)


def _open_files(
    files: Sequence[File],
    kind: str,
    dataset: DatasetConfig,
    *,
    cache: Path,
    in_place: bool,
    progress: Progress | None,
) -> tuple[Part, ...]:
    columns = _columns(dataset.format)
    lock = Lock()

    def report(what: str, done: int, total: int) -> None:
        assert progress is not None
        with lock:  # progress is written for one thread
            progress(what, done, total)

    def open_file(file: File) -> Part:
        file = with_version(file)
        reported = None if progress is None else report
        if kind == "parquet":
            return open_parquet(file, cache=cache, in_place=in_place, columns=columns, progress=reported)
        if kind == "arrow":
            return open_arrow(file, cache=cache, columns=columns, progress=reported)
        return open_text(file, kind, cache=cache, progress=reported)

    decoded = kind in ("arrow", "parquet") and not in_place
    with ThreadPoolExecutor(_DECODED_AT_ONCE if decoded else _AT_ONCE) as threads:
        opened = [threads.submit(open_file, file) for file in files]
        try:
            return tuple(future.result() for future in opened)
        finally:
            threads.shutdown(cancel_futures=True)
