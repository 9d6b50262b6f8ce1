"""What a source is, and how the rows of several files become the rows of one source."""

from __future__ import annotations

import fnmatch
import json
import os
import re
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

from raytune_fsdp.base.errors import DataError, RaytuneError, RowError
from raytune_fsdp.base.random import derive_key
from raytune_fsdp.base.urls import is_url, split_query, without_secrets
from raytune_fsdp.config.sections.data import DatasetConfig, SourceConfig
from raytune_fsdp.data.mixture import OLDEST_ORDER

Row = dict[str, Any]


class JsonText(str):
    """JSON from a column that says it is JSON."""

    __slots__ = ()


CACHE_GONE = "data.cache.path must be visible to all nodes, and not be cleaned during a run; start again"
_URL = re.compile(r"\w+://[^\s'\"]+")
_WHOLE = "check that it exists, is complete and may be read"


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys that the rows of a file may have."""

    names: frozenset[str] = frozenset()
    """Which of keys.py:NAMES are a key of something: of a row, a message, a tool."""
    texts: frozenset[str] = frozenset()
    """Keys whose value is a list of objects as JSON text; ANY: there are too many to list."""
    json: frozenset[str] = frozenset()
    """Columns that say they have JSON."""

    def to_json(self) -> dict[str, list[str]]:
        return {"names": sorted(self.names), "texts": sorted(self.texts), "json": sorted(self.json)}

    @classmethod
    def from_json(cls, values: Mapping[str, Sequence[str]]) -> Keys:
        return cls(frozenset(values["names"]), frozenset(values["texts"]), frozenset(values.get("json", ())))


@dataclass(frozen=True, slots=True)
class File:
    """A file as it is now."""

    shown: str
    """The name in messages: as the user wrote it."""
    url: str
    """Absolute path or URL: the same from every working directory."""
    size: int
    version: str
    """Changes with the content: mtime of a local file, ETag of an object. Empty until the store is asked for it."""
    fetched: str = ""
    """The path of its decompressed content, if it had to be read to know its version."""

    @property
    def remote(self) -> bool:
        return is_url(self.url)

    @property
    def identity(self) -> dict[str, object]:
        """What distinguishes this file from others, and from itself before a change."""
        # The URL may contain a password, which must not be written to the cache.
        return {
            "url": without_secrets(self.url),
            "whole": xxhash.xxh3_128_hexdigest(self.url.encode("utf-8", "replace")),
            "size": self.size,
            "version": self.version,
        }

    @property
    def fingerprint(self) -> str:
        """A hash of everything known about the file without reading it."""
        return xxhash.xxh3_128_hexdigest(json.dumps([without_secrets(self.url), self.size, self.version]).encode())


class Columns(NamedTuple):
    """The columns to read, in files that allow reading only some."""

    needed: tuple[str, ...]
    optional: tuple[str, ...]
    every: bool = False
    """Whether all columns are read, because nobody knows which are needed."""

    def of(self, names: Sequence[str]) -> list[str] | None:
        """Return which of a file's columns to read. None: all, so that the error for a missing one can list them."""
        if self.every or not set(self.needed) <= set(names):
            return None
        return [name for name in names if self.reads(name)]

    def reads(self, name: str) -> bool:
        return self.every or name in self.needed or name in self.optional


class Source(Protocol):
    """The rows of a dataset, by number. Small to pickle; usable from several threads and after a fork."""

    @property
    def label(self) -> str:
        """What the user wrote: path, pattern, URL or name on the hub."""

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """Each file's name in messages, and a hash of its content and how it is read, in the order of the rows."""

    @property
    def columnar(self) -> bool:
        """Whether the rows come from columns, where a key that one row has is null in all others."""

    @property
    def order_version(self) -> int:
        """The lowest version of the order that finds the same files."""

    @property
    def selection(self) -> Mapping[str, str]:
        """Which rows of the files these are, for the identity of a run; empty if they are all."""

    @property
    def blocks(self) -> Sequence[int]:
        """The sizes of stretches of consecutive rows that are best read together; they add up to all rows."""

    def __len__(self) -> int: ...

    def where(self, index: int) -> str:
        """Return `file:line` of a row, or `file, row 17`; both count from 1."""

    def rows(self, indices: Sequence[int]) -> list[Row | RowError]:
        """Return the rows in the order asked for. In place of a broken row there is a RowError."""

    def keys(self, what: str) -> Iterator[Any]:
        """Yield a 64-bit key of every row for one purpose, in order, some at a time.

        A row's key follows from its file's content and its number in the file.
        """

    def touch(self) -> None:
        """Note in the cache that its files are in use. It can be called often."""

    def with_columns(self, columns: Columns) -> Source:
        """Return these rows with other columns, where files allow reading only some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(ABC):
    """The rows of one file."""

    shown: str
    fingerprint: str
    count: int
    most: int | None = None
    """The most bytes that a row may have."""
    json: bool = False
    """Whether JSON in columns is read (`sources.json_columns`)."""

    @property
    @abstractmethod
    def keys(self) -> Keys:
        """The keys that its rows may have; of most files, only if they were asked for."""

    @abstractmethod
    def blocks(self) -> Iterable[int]: ...

    def where(self, index: int) -> str:
        return f"{self.shown}, row {index + 1}"

    @abstractmethod
    def rows(self, indices: Sequence[int]) -> list[Row | RowError]: ...

    @abstractmethod
    def touch(self) -> None: ...


@dataclass(frozen=True)
class Files:
    """The rows of several files, one file after the other."""

    label: str
    parts: tuple[Part, ...]
    columnar: bool = False
    order_version: int = OLDEST_ORDER

    @property
    def selection(self) -> Mapping[str, str]:
        return {}

    @cached_property
    def _ends(self) -> Any:
        return np.cumsum([part.count for part in self.parts], dtype=np.int64)

    @cached_property
    def fingerprints(self) -> Mapping[str, str]:
        return {part.shown: part.fingerprint for part in self.parts}

    @cached_property
    def blocks(self) -> Sequence[int]:
        # An array takes 8 bytes for each, a list of ints 36.
        return array("Q", (rows for part in self.parts for rows in part.blocks() if rows))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def where(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {self.label}, which has {len(self)}")
        place = int(np.searchsorted(self._ends, index, side="right"))
        part, first = self.parts[place], int(self._ends[place - 1]) if place else 0
        return part.where(index - first)

    def rows(self, indices: Sequence[int]) -> list[Row | RowError]:
        numbers = np.asarray(indices, dtype=np.int64)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < len(self):
            raise IndexError(f"rows {numbers.min()} to {numbers.max()} of {self.label}, which has {len(self)}")
        return by_part(indices, self._ends, lambda place, _, local: self.parts[place].rows(local.tolist()))

    def keys(self, what: str) -> Iterator[Any]:
        for part in self.parts:
            yield from spread_keys(derive_key(what, part.fingerprint), part.count)

    def touch(self) -> None:
        for part in self.parts:
            part.touch()

    def with_columns(self, columns: Columns) -> Files:
        parts: tuple[Any, ...] = self.parts
        return replace(self, parts=tuple(replace(each, columns=columns) for each in parts)) if self.columnar else self

    def __reduce__(self) -> tuple[type[Files], tuple[str, tuple[Part, ...], bool, int]]:
        # Leaves out the cached properties, which follow from the parts.
        return Files, (self.label, self.parts, self.columnar, self.order_version)


def by_part(
    indices: Sequence[int], ends: Any, read: Callable[[int, int, Any], Iterable[Row | RowError]]
) -> list[Row | RowError]:
    """Return rows by number, read part by part. Part k has the rows `ends[k - 1]` to `ends[k]`.

    `read` is given the number of a part, the number of its first row, and which of its rows are wanted.
    """
    numbers = np.asarray(indices, dtype=np.int64)
    places = np.searchsorted(ends, numbers, side="right")
    found: list[Row | RowError] = [{}] * len(numbers)
    for place in np.unique(places).tolist():
        wanted = np.flatnonzero(places == place)
        first = int(ends[place - 1]) if place else 0
        for position, row in zip(wanted.tolist(), read(place, first, numbers[wanted] - first), strict=True):
            found[position] = row
    return found


# How many keys are made at once: 8 MB.
_KEYS = 1 << 20


def spread_keys(key: int, count: int) -> Iterator[Any]:
    """Yield `count` keys of 64 bits, some at a time: the numbers that splitmix64 draws from the seed `key`."""
    for first in range(0, count, _KEYS):
        # Arrays of uint64 wrap around; numbers would warn.
        value = np.arange(first + 1, min(first + _KEYS, count) + 1, dtype=np.uint64)
        value *= np.uint64(0x9E3779B97F4A7C15)
        value += np.uint64(key)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        yield value ^ (value >> np.uint64(31))


def too_large(where: str, size: int, most: int) -> DataError:
    """Return the DataError for a row that would take too much memory.

    Never a RowError: what `data.bad_rows` leaves out changes the order.
    """
    return DataError(
        f"{where}: the row has {size:,} bytes, more than data.max_row_bytes={most}; shorten or remove it, or set "
        f"data.max_row_bytes={size} where about {size * 140 / 1e9:.1f} GB of memory are free"
    )


@contextmanager
def reading(shown: str, way_out: str = _WHOLE) -> Iterator[None]:
    """Turn whatever a file system or decoder raises into a DataError that names the file."""
    try:
        yield
    except (RaytuneError, MemoryError):
        raise
    # Any Exception: fsspec's file systems raise whatever their own libraries raise.
    except Exception as error:
        raise unreadable(shown, error, way_out) from error


def unreadable(shown: str, error: Exception, way_out: str = _WHOLE) -> DataError:
    """Return the DataError for an error of a file system or decoder."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or repr(error)
    reason = _URL.sub(lambda url: without_secrets(url[0]), reason)
    return DataError(f"{shown}: cannot be read ({shorten(' '.join(reason.split()), limit=300)}); {way_out}")


# What a file's name tells: its kind, its compression, the name of a dataset. And `shorten`, for error messages.

KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_NOT_READ = re.compile(
    r".+\.(bz2|xz|lzma|lz4|snappy|br|zip|7z|rar|tar|tgz|jsonlines|feather|orc|avro|xlsx?|pkl)", re.IGNORECASE
)
_WILDCARD = re.compile(r"[*?[]")
# Files that are found next to data but hold no rows.
_NOT_DATA = re.compile(
    r"(readme|licen[sc]e|notice)(\.(md|txt|rst))?|requirements\.txt|(dataset_infos?|dataset_dict|state)\.json",
    re.IGNORECASE,
)


def shorten(value: object, *, limit: int = 80) -> str:
    """Return `value` as text that is short enough for an error message."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else text[:limit] + "…"


def compression_of(path: str) -> str | None:
    """Return the codec a file is compressed with, by its ending; None if it is not compressed."""
    return COMPRESSIONS.get(_suffix(_name(path)).lower())


def ending_of(path: str) -> str:
    """Return the ending that says what is in a file, without the ending of its compression."""
    name = _name(path)
    suffix = _suffix(name)
    return (_suffix(name.removesuffix(suffix)) if suffix.lower() in COMPRESSIONS else suffix).lower()


def _name(path: str) -> str:
    return (split_query(path)[0] if is_url(path) else path).rstrip("/").rpartition("/")[2]


def _suffix(name: str) -> str:
    # PurePosixPath has this, too, but takes 20 us, and it is called five times for each of perhaps 10,000 files.
    dot = name.rfind(".")
    return name[dot:] if 0 < dot < len(name) - 1 else ""


def kind_of(path: str) -> str | None:
    """Return the kind of a file by its ending; None if the ending says nothing."""
    return KINDS.get(ending_of(path))


def has_wildcard(path: str) -> bool:
    """Return whether the path is a pattern."""
    return _WILDCARD.search(path) is not None


def data_files(names: list[str], file_type: str) -> list[str]:
    """Return the names of the files that hold rows, sorted. `names` are relative to a directory."""
    seen = _seen(names)
    known = [name for name in seen if (kind_of(name) == file_type if file_type != "auto" else kind_of(name))]
    if known or file_type == "auto":
        return known
    # The user has said of which type they are, so files without an ending will do: Spark writes such files.
    return [name for name in seen if not ending_of(name)]


def data_left_out(names: Sequence[str], files: Sequence[str], file_type: str) -> list[str]:
    """Return the names of files that look like data, and are not among those that are read."""
    read = set(files)
    others = [name for name in _seen(names) if name not in read]
    chosen = file_type != "auto"
    return [name for name in others if kind_of(name) or is_not_read(name) or (chosen and not ending_of(name))]


def is_not_read(path: str) -> bool:
    """Return whether a file's ending is one of data that is not read."""
    return _NOT_READ.fullmatch(_name(path)) is not None


def _seen(names: Sequence[str]) -> list[str]:
    return sorted(name for name in names if not is_hidden(name) and not _NOT_DATA.fullmatch(PurePosixPath(name).name))


def is_hidden(name: str) -> bool:
    """Return whether tools left this file next to the data: `.git/x`, `_SUCCESS`, `_temporary/part-0`."""
    return any(part.startswith((".", "_")) for part in PurePosixPath(name).parts)


def is_wanted(path: str, pattern: str) -> bool:
    """Return whether a matching path is wanted: not _SUCCESS or .part-0.crc, unless the pattern itself says so."""
    parts = pattern.split("/")
    fixed = next((index for index, part in enumerate(parts) if has_wildcard(part)), len(parts) - 1)
    return parts[-1].startswith((".", "_")) or not is_hidden("/".join(path.split("/")[fixed:]))


def dataset_name(dataset: SourceConfig) -> str:
    """Return the name in metrics and messages: the given one, otherwise that of the file, directory or hub dataset."""
    if dataset.name is not None:
        return dataset.name
    if dataset.hub is not None:
        return _safe(dataset.hub.rstrip("/").rpartition("/")[2])
    assert dataset.path is not None, dataset
    path = without_secrets(dataset.path).rpartition("://")[2]
    if not is_url(dataset.path) and not has_wildcard(path):
        path = os.path.abspath(os.path.expanduser(path))
    parts = [part for part in path.split("/") if part not in ("", ".", "..", "~")]
    fixed = next((index for index, part in enumerate(parts) if has_wildcard(part)), None)
    if fixed is not None:
        # `data/train-*.jsonl` is called data, `train-*.jsonl` train.
        return _safe(parts[fixed - 1] if fixed else _WILDCARD.split(parts[0])[0].rstrip("-_."))
    name = parts[-1] if parts else ""
    for endings in (COMPRESSIONS, KINDS):
        stem, dot, ending = name.rpartition(".")
        name = stem if stem and dot + ending.lower() in endings else name
    return _safe(name)


def _safe(name: str) -> str:
    # By the rules of config.rules.safe_name, which the config applies to a name that the user gives.
    kept = re.sub(r"\.{2,}", ".", re.sub(r"[^A-Za-z0-9._-]+", "-", name))
    return re.sub(r"^[^A-Za-z0-9]+", "", kept)[:128] or "dataset"


def dataset_names(datasets: Sequence[DatasetConfig]) -> tuple[str, ...]:
    """Return the names of several datasets. Raises DataError if two are the same."""
    if not datasets:
        raise DataError("data.train has no dataset; it needs at least one")
    names = tuple(dataset_name(dataset) for dataset in datasets)
    for name, count in Counter(names).items():
        if count > 1:
            paths = ", ".join(
                without_secrets(d.path or d.hub or "") for d, n in zip(datasets, names, strict=True) if n == name
            )
            raise DataError(f"{count} datasets are called {name!r} ({paths}); give each its own name in data.*.name")
    return names


def expand_stars(pattern: str) -> str:
    """Expand `**.parquet`, which the hub's documentation uses for `**/*.parquet`. ValueError if `**` has no meaning."""
    parts: list[str] = []
    for part in pattern.split("/"):
        parts += ["**", part[1:]] if part.startswith("**") and part != "**" else [part]
    if any("**" in part and part != "**" for part in parts):
        raise ValueError("'**' must stand alone between two slashes, as in data/**/*.jsonl")
    return "/".join(parts)


def matcher(pattern: str) -> Callable[[str], bool]:
    """Return what says whether a path matches a pattern of `expand_stars`.

    Patterns may be a stranger's. One regular expression for a whole path goes back and forth between its stars: a name
    of 60 letters takes minutes against `*a*a*a*a*a*a*b`. Part by part, and as fnmatch translates them, it is immediate.
    """
    parts = [None if part == "**" else re.compile(fnmatch.translate(part)).match for part in pattern.split("/")]
    end = len(parts)

    def matches(path: str) -> bool:
        reached = {0}
        for name in path.split("/"):
            at = set(reached)
            for place in sorted(reached):  # `**` may stand for no directory
                while place < end - 1 and parts[place] is None:
                    place += 1
                    at.add(place)
            stays = {place for place in at if place < end and parts[place] is None}
            goes_on = {place + 1 for place in at if place < end and (part := parts[place]) is not None and part(name)}
            reached = stays | goes_on
            if end - 1 in stays:
                return True
        return end in reached

    return matches
