"""What a file's name says: its kind, its compression, the name of a dataset. And `shorten`, for error messages."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath

from raytune_fsdp.base.errors import DataError
from raytune_fsdp.base.urls import is_url, split_query, without_secrets
from raytune_fsdp.config.sections.data import DatasetConfig, SourceConfig

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
_WILDCARD = re.compile(r"[*?[]")
# Files that are found next to data but hold no rows.
_NOT_DATA = re.compile(
    r"(readme|licen[sc]e|notice)(\.(md|txt|rst))?|requirements\.txt|(dataset_infos?|dataset_dict|state)\.json",
    re.IGNORECASE,
)


def shorten(value: object, *, limit: int = 80) -> str:
    """`value` as text that is short enough for an error message."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else text[:limit] + "…"


def compression_of(path: str) -> str | None:
    """The codec a file is compressed with, by its ending; None if it is not compressed."""
    return COMPRESSIONS.get(_suffix(_name(path)).lower())


def ending_of(path: str) -> str:
    """The ending that says what is in a file, without the ending of its compression."""
    name = _name(path)
    suffix = _suffix(name)
    return (_suffix(name.removesuffix(suffix)) if suffix.lower() in COMPRESSIONS else suffix).lower()


def _name(path: str) -> str:
    return (split_query(path)[0] if is_url(path) else path).rstrip("/").rpartition("/")[2]


def _suffix(name: str) -> str:
    # PurePosixPath has it too, but takes 20 us, and 10,000 files are asked five times each.
    dot = name.rfind(".")
    return name[dot:] if 0 < dot < len(name) - 1 else ""


def kind_of(path: str) -> str | None:
    """The kind of a file by its ending; None if the ending says nothing."""
    return KINDS.get(ending_of(path))


def has_wildcard(path: str) -> bool:
    """Whether the path is a pattern."""
    return _WILDCARD.search(path) is not None


def data_files(names: list[str], file_type: str) -> list[str]:
    """The names of the files that hold rows, sorted. `names` are relative to a directory."""
    seen = sorted(name for name in names if not is_hidden(name) and not _NOT_DATA.fullmatch(PurePosixPath(name).name))
    known = [name for name in seen if (kind_of(name) == file_type if file_type != "auto" else kind_of(name))]
    if known or file_type == "auto":
        return known
    # The user has said what they are, so files without an ending will do: Spark writes such files.
    return [name for name in seen if not ending_of(name)]


def is_hidden(name: str) -> bool:
    """Whether tools left it next to the data: `.git/x`, `_SUCCESS`, `_temporary/part-0`."""
    return any(part.startswith((".", "_")) for part in PurePosixPath(name).parts)


def is_wanted(path: str, pattern: str) -> bool:
    """Whether a matching path is wanted: `*` does not include _SUCCESS or .part-0.crc, unless the pattern says so."""
    parts = pattern.split("/")
    fixed = next((index for index, part in enumerate(parts) if has_wildcard(part)), len(parts) - 1)
    return parts[-1].startswith((".", "_")) or not is_hidden("/".join(path.split("/")[fixed:]))


def dataset_name(dataset: SourceConfig) -> str:
    """The name in metrics and messages: the given one, otherwise that of the file, directory or hub dataset."""
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
    """The names of several datasets. Raises DataError if two are the same."""
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
    """`**.parquet`, which the hub's documentation uses, means `**/*.parquet`. ValueError for what means nothing."""
    parts: list[str] = []
    for part in pattern.split("/"):
        parts += ["**", part[1:]] if part.startswith("**") and part != "**" else [part]
    if any("**" in part and part != "**" for part in parts):
        raise ValueError("'**' must stand alone between two slashes, as in data/**/*.jsonl")
    return "/".join(parts)
