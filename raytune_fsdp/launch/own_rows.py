"""Rows that a program has in memory: written once below `run.storage`, and from then on a file like any other.

So ranks on other machines find them, the run is identified by their content, and it goes on without the program's
object. They are beside the cache, not in it: `raytune-fsdp data clean` leaves them, as nothing could make them again.
"""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import date, datetime
from pathlib import Path, PurePath
from typing import Any

import xxhash

from raytune_fsdp.base.errors import ConfigError, in_one_line

DIRECTORY = "own-rows"
"""Below `run.storage`."""


def with_files(sections: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the sections of a config in which each `path` that is rows has become that of the file with these rows."""
    data = sections.get("data")
    if not isinstance(data, Mapping):
        return sections
    run = sections.get("run")
    storage = run.get("storage", "runs") if isinstance(run, Mapping) else "runs"
    place = Path(os.path.expanduser(storage)).absolute() / DIRECTORY
    changed = {}
    for use in ("train", "eval"):
        sources = data.get(use)
        if isinstance(sources, list | tuple):
            changed[use] = [_with_file(each, use, number, place) for number, each in enumerate(sources)]
    return {**sections, "data": {**data, **changed}}


def _with_file(source: Any, use: str, number: int, place: Path) -> Any:
    rows = source.get("path") if isinstance(source, Mapping) else None
    if rows is None or isinstance(rows, str | PurePath):
        return source
    field = f"data.{use}.{number}.path"
    name = use if number == 0 else f"{use}-{number}"
    return {"name": name, **source, "path": str(_written(_rows_of(rows, field), field, place))}


def _rows_of(value: Any, field: str) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a table (pandas, polars, Arrow), of a Dataset, or of anything else that yields maps."""
    if hasattr(value, "itertuples") and hasattr(value, "columns"):
        names = [str(name) for name in value.columns]
        return (dict(zip(names, row, strict=True)) for row in value.itertuples(index=False, name=None))
    if hasattr(value, "iter_rows"):
        named: Iterator[Mapping[str, Any]] = value.iter_rows(named=True)
        return named
    if hasattr(value, "to_batches") and hasattr(value, "schema"):
        return (row for batch in value.to_batches() for row in batch.to_pylist())
    if isinstance(value, Mapping):
        raise ConfigError(
            f"{field}: is a map of {', '.join(map(str, list(value)[:5])) or 'nothing'}, not rows: give one of its "
            "values (of a DatasetDict, a split), or a list of maps"
        )
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        raise ConfigError(
            f"{field}: a {type(value).__name__} is neither a path nor rows: give a path, a Dataset, a table of pandas, "
            "polars or Arrow, or an iterable of maps"
        )
    return iter(value)


def _written(rows: Iterator[Mapping[str, Any]], field: str, place: Path) -> Path:
    """Write the rows into a file that is named after its content; return its path."""
    draft = place / f".{uuid.uuid4().hex}.tmp"
    digest, count = xxhash.xxh3_128(), 0
    try:
        place.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640), "wb") as file:
            for row in rows:
                line = _line_of(row, f"{field}: row {count}")
                digest.update(line)
                file.write(line)
                count += 1
            file.flush()
            os.fsync(file.fileno())
        if not count:
            raise ConfigError(f"{field}: has no rows; an iterator has them once only: give what can be iterated again")
        final = place / f"{digest.hexdigest()}.jsonl"
        # What is there already keeps its date, by which the cache knows it.
        if not final.exists() or _digest_of(final) != digest.hexdigest():
            os.replace(draft, final)
        return final
    except OSError as error:
        raise ConfigError(
            f"{field}: its rows cannot be written to {place}: {in_one_line(error)}; set run.storage to a directory "
            "where you may write"
        ) from error
    finally:
        with suppress(OSError):
            draft.unlink()


def _line_of(row: Any, where: str) -> bytes:
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where}: is a {type(row).__name__}, must be a map of columns, such as {{'text': ...}}")
    try:
        return json.dumps(_plain(row), ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: column {_unfit(row)} holds what JSON cannot ({in_one_line(error)}): leave it out, or make "
            "texts, numbers, lists and maps of it"
        ) from None


def _unfit(row: Mapping[Any, Any]) -> str:
    for name, value in row.items():
        try:
            json.dumps(_plain(value), allow_nan=False, ensure_ascii=False).encode()
        except (TypeError, ValueError):
            return str(name)
    return "?"


def _plain(value: Any) -> Any:
    """Return a value as JSON has it. NaN is how tables write that there is none."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, datetime | date):
        return value.isoformat()
    for name in ("tolist", "item"):  # arrays and their numbers
        convert: Callable[[], Any] | None = getattr(value, name, None)
        if convert is not None:
            return _plain(convert())
    raise TypeError(f"a {type(value).__name__}")


def _digest_of(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
