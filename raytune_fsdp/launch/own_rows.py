"""Rows that a program has in memory: written once below `run.storage`, and from then on a file like any other.

So ranks on other machines find them, the run is identified by their content, and it goes on without the program's
object. They are beside the cache, not in it: `raytune-fsdp data clean` leaves them, as nothing could make them again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import date, datetime
from pathlib import Path, PurePath
from typing import Any

from raytune_fsdp.base.errors import ConfigError, in_one_line
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.load import load_config
from raytune_fsdp.config.rules import OWN_ROWS
from raytune_fsdp.plan.run_dir import storage_of

_USES = ("train", "eval")


def load_with_rows(sections: Mapping[str, Any]) -> FinetuneConfig:
    """Return the config of these sections, in which rows may stand for the `path` of a dataset.

    The rows are written when everything else in the config is known to be right.
    """
    rows: dict[str, Any] = {}
    config = load_config(_with_stand_ins(sections, ("data",), rows))
    if not rows:
        return config
    place, data, changed = storage_of(config) / OWN_ROWS, config.data, dict[str, list[Any]]()
    from raytune_fsdp.data.sources.source import dataset_name

    lists = {use: found for use in _USES if isinstance(found := getattr(data, use), list)}
    taken = {dataset_name(each) for found in lists.values() for each in found if each.path not in rows}
    for use, datasets in lists.items():
        changed[use] = []
        for number, each in enumerate(datasets):
            if each.path in rows:
                field = f"data.{use}.{number}.path"
                path = _written(_rows_of(rows[each.path], field), field, place)
                each = each.model_copy(update={"path": str(path), "name": each.name or _name(taken)})
            changed[use].append(each)
    return config.model_copy(update={"data": data.model_copy(update=changed)})


def _with_stand_ins(value: Any, where: Sequence[str], rows: dict[str, Any]) -> Any:
    """Return the sections with a text in place of rows, which are noted under it. Names may be in any case."""
    name, *rest = where
    made = dict(value)
    for key, each in value.items():
        if str(key).lower() != name or each is None:
            continue
        if name == "path" and not isinstance(each, str | PurePath):
            made[key] = f"rows-{uuid.uuid4().hex}"
            rows[made[key]] = each
        elif name == "data" and isinstance(each, Mapping):
            for use in _USES:
                made[key] = _with_stand_ins(made[key], (use,), rows)
        elif name in _USES and isinstance(each, list | tuple):
            made[key] = [_with_stand_ins(one, ("path",), rows) if isinstance(one, Mapping) else one for one in each]
    return made if not rest else _with_stand_ins(made, rest, rows)


def _name(taken: set[str]) -> str:
    number = 0
    while (name := "rows" if not number else f"rows-{number}") in taken:
        number += 1
    taken.add(name)
    return name


def _rows_of(value: Any, field: str) -> Iterable[Any]:
    """Return the rows of a table (pandas, polars, Arrow), of a Dataset, or of anything else that yields maps."""
    columns = getattr(value, "column_names", getattr(value, "columns", None))
    names = [str(name) for name in columns] if isinstance(columns, Iterable) else []
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{field}: has two columns called {repeated}: rename one of them")
    if hasattr(value, "itertuples"):
        return (dict(zip(names, row, strict=True)) for row in value.itertuples(index=False, name=None))
    if hasattr(value, "iter_rows"):
        named: Iterable[Any] = value.iter_rows(named=True)
        return named
    if hasattr(value, "to_batches"):
        return (row for batch in value.to_batches() for row in batch.to_pylist())
    if isinstance(value, Mapping):
        raise ConfigError(
            f"{field}: is a map of {', '.join(map(str, list(value)[:5])) or 'nothing'}, not rows: give one of its "
            "values (of a DatasetDict, a split), or a list of maps"
        )
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        raise ConfigError(
            f"{field}: a value of type {type(value).__name__} is neither a path nor rows: give a path, a Dataset, a "
            "table of pandas, polars or Arrow, or an iterable of maps"
        )
    return value


def _written(rows: Iterable[Any], field: str, place: Path) -> Path:
    """Write the rows into a file that is named after its content; return its path."""
    import xxhash  # here, as a command's help does without it

    draft = place / f".{uuid.uuid4().hex}.tmp"
    digest, count = xxhash.xxh3_128(), 0
    try:
        with _storing(field, place):
            place.mkdir(parents=True, exist_ok=True)
            file = os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640), "wb")
        with file:
            for row in rows:  # whatever the program's own iterator raises is its own
                line = _line_of(row, f"{field}: row {count}")
                digest.update(line)
                with _storing(field, place):
                    file.write(line)
                count += 1
            if not count:
                raise ConfigError(
                    f"{field}: has no rows; an iterator has them once only: give what can be iterated again"
                )
            with _storing(field, place):
                file.flush()
                os.fsync(file.fileno())
        with _storing(field, place):
            return _published(draft, place / f"{digest.hexdigest()}.jsonl", digest.hexdigest())
    finally:
        with suppress(OSError):
            draft.unlink()


def _published(draft: Path, final: Path, digest: str) -> Path:
    """Give the draft its name. What is there already keeps its date, by which the cache knows it."""
    try:
        os.link(draft, final)
    except FileExistsError:
        if _digest_of(final) != digest:
            os.replace(draft, final)
    except OSError:  # a file system without hard links
        if not final.exists() or _digest_of(final) != digest:
            os.replace(draft, final)
    return final


@contextmanager
def _storing(field: str, place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{field}: its rows cannot be written to {place}: {in_one_line(error)}; set run.storage to a directory "
            "where you may write"
        ) from error


def _line_of(row: Any, where: str) -> bytes:
    if isinstance(row, str | PurePath):
        raise ConfigError(
            f"{where}: is the text {str(row)[:80]!r}, must be a map of columns; of several files give a pattern, such "
            "as data/*.jsonl, or a dataset for each"
        )
    if not isinstance(row, Mapping):
        raise ConfigError(
            f"{where}: is of type {type(row).__name__}, must be a map of columns, such as {{'text': ...}}"
        )
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
    """Return a value as JSON has it. NaN, NaT and NA are how tables write that there is none."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if type(value).__name__ in ("NaTType", "NAType") or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, float):
        return value
    if isinstance(value, Mapping):
        made = {str(key): _plain(each) for key, each in value.items()}
        if len(made) < len(value):
            raise ValueError("two keys are the same text")
        return made
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, datetime | date):
        return value.isoformat()
    for name in ("tolist", "item"):  # arrays and their numbers
        convert: Callable[[], Any] | None = getattr(value, name, None)
        if convert is not None:
            return _plain(convert())
    raise TypeError(f"of type {type(value).__name__}")


def _digest_of(path: Path) -> str:
    import xxhash

    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
