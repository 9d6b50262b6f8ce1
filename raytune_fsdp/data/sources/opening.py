"""Everything that a dataset of the config can name, opened as rows by number."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from raytune_fsdp.config.data import DatasetConfig
from raytune_fsdp.config.formats import Format
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

# Stores and disks answer slowly, but many at a time. What is decoded to be written again takes memory.
_AT_ONCE = 8
_DECODED_AT_ONCE = 2
# The fields of each format that name a column: those that every row must have, and others.
_COLUMNS: dict[str, tuple[list[str], list[str]]] = {
    "chat": (["messages"], ["tools"]),
    "instruction": (["prompt", "completion"], ["input", "system"]),
    "completion": (["text"], []),
    "tokens": (["input_ids"], ["labels", "mask"]),
}


def open_source(dataset: DatasetConfig, *, cache: Path, in_place: bool, progress: Progress | None = None) -> Source:
    """Open a dataset. What is read or copied for that is kept in `cache`, for all nodes.

    With `in_place`, Parquet files are read by row group where they are: for data that is too large to be copied, read
    in the order of its blocks. Without, they are written once as Arrow, which any order may read.
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
    needed, optional = (
        tuple(name for field in fields if (name := getattr(format, field)) is not None)
        for fields in _COLUMNS[format.type]
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

    def tell(what: str, done: int, total: int) -> None:
        assert progress is not None
        with lock:
            progress(what, done, total)

    def open_file(file: File) -> Part:
        file = with_version(file)
        told = None if progress is None else tell
        if kind == "parquet":
            return open_parquet(file, cache=cache, in_place=in_place, columns=columns, progress=told)
        if kind == "arrow":
            return open_arrow(file, cache=cache, columns=columns, progress=told)
        return open_text(file, kind, cache=cache, progress=told)

    decoded = kind in ("arrow", "parquet") and not in_place
    with ThreadPoolExecutor(_DECODED_AT_ONCE if decoded else _AT_ONCE) as threads:
        opened = [threads.submit(open_file, file) for file in files]
        try:
            return tuple(future.result() for future in opened)
        finally:
            threads.shutdown(cancel_futures=True)
