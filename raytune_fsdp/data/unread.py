"""Report well-known columns that a dataset's format does not read, so that nothing is lost in silence."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from raytune_fsdp.base.errors import DataError, RowError
from raytune_fsdp.config.sections.data import DatasetConfig
from raytune_fsdp.config.sections.formats import FUNCTIONS, PythonFormat, TokensFormat
from raytune_fsdp.data.mixture import ORDER_VERSION
from raytune_fsdp.data.sources.opening import columns_of
from raytune_fsdp.data.sources.source import Columns, Row, Source, dataset_names

logger = logging.getLogger(__name__)

_FUNCTION = "a function (format.type=python)"
_SYSTEM = dict.fromkeys(("system", "system_prompt", "system_message"), "format.system")
_CONTEXT = dict.fromkeys(("input", "context"), "format.input")
_CALLS = dict.fromkeys(("tools", FUNCTIONS), "format.tools")
_ANSWERS = dict.fromkeys(("chosen", "rejected"), "format.type=preference")
_BY_FUNCTION = dict.fromkeys((*_CALLS, "history"), _FUNCTION)
_PADDED = "attention_mask"
"""What tokenizers return besides the tokens: it says something where a row was padded."""
_NOT_TEXT = dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), "no format")
_ASKED = {
    **_SYSTEM, "history": _FUNCTION,
    **{name: f"format.{name}" for name in ("prompt", "tools", "weight")},
}  # fmt: skip
_KNOWN: dict[str, dict[str, str]] = {
    "chat": {
        **_SYSTEM, **_CALLS, **_ANSWERS, "history": _FUNCTION,
        "chat_template_kwargs": "chat_template_kwargs of the dataset (one map for all rows)",
    },
    "instruction": {**_SYSTEM, **_CONTEXT, **_ANSWERS, **_BY_FUNCTION},
    "preference": {**_ASKED, "margin": "format.margin"},
    "binary": _ASKED,
    "score": {**dict.fromkeys(_SYSTEM, _FUNCTION), **_BY_FUNCTION, "weight": "format.weight"},
    "template": {**dict.fromkeys((*_SYSTEM, *_CONTEXT), "format.prompt"), "history": _FUNCTION},
    "completion": {**_ANSWERS},
    "tokens": {
        "labels": "format.labels",
        **dict.fromkeys(("loss_mask", "completion_mask", "assistant_masks", _PADDED), "format.mask"),
    },
}  # fmt: skip
"""For types of formats: well-known columns, and what would read them. A type that is not here reads none of them, nor
does any those of `_NOT_TEXT`."""
_ROWS, _CHARACTERS = 1000, 4_000_000
"""How much of a dataset is looked at, from its start."""


@dataclass(frozen=True, slots=True)
class UnreadColumn:
    """A column that is not read, and is not empty."""

    dataset: str
    column: str
    filled: int
    """How many rows have something in it."""
    rows: int
    """How many rows were looked at: the first ones."""
    read_by: str
    """The setting that would read it."""

    def __str__(self) -> str:
        found = "are padded by it, so that padding is trained on" if self.column == _PADDED else "have something in it"
        return (
            f"dataset {self.dataset!r}: its column {self.column!r} is not read, and {self.share:.1%} of "
            f"{self.rows:,} rows {found}; {self.read_by} would read it, and "
            f"format.ignore=[{self.column}] silences this"
        )

    @property
    def share(self) -> float:
        return self.filled / self.rows

    def fields(self) -> dict[str, Any]:
        """Return the fields that the record of a run has."""
        return {
            "dataset": self.dataset, "column": self.column, "share": round(self.share, 4), "rows": self.rows,
            "read_by": self.read_by,
        }  # fmt: skip


def unread_columns(datasets: Sequence[DatasetConfig], sources: Sequence[Source], order: int) -> list[UnreadColumn]:
    """Return the unread columns of datasets that are read by the rules of version `order`."""
    names = dataset_names(datasets)
    return [
        column
        for name, dataset, source in zip(names, datasets, sources, strict=True)
        for column in _unread(name, dataset, source, order)
    ]


def _unread(name: str, dataset: DatasetConfig, source: Source, order: int) -> list[UnreadColumn]:
    format = dataset.format
    if isinstance(format, PythonFormat):
        return []  # its function is given all columns
    if isinstance(format, TokensFormat) and (format.labels or format.mask):
        return []  # what is trained on is known
    now, newest = (columns_of(format, each) for each in (order, ORDER_VERSION))
    read = {*now.needed, *now.optional}
    known = _KNOWN.get(format.type, dict.fromkeys(_SYSTEM, _FUNCTION) | _BY_FUNCTION) | _NOT_TEXT
    wanted = {each: by for each, by in known.items() if each not in read and each not in format.ignore}
    if not wanted:
        return []
    rows = _first_rows(source.with_columns(Columns((), tuple(wanted))))
    found = []
    for column, by in wanted.items():
        filled = sum(_is_filled(column, row.get(column)) for row in rows)
        if column in newest.optional:
            by = "a run that is begun now"  # this run goes on by older rules
        if filled:
            found.append(UnreadColumn(name, column, filled, len(rows), by))
    return found


def warn_of_unread(columns: Iterable[UnreadColumn]) -> None:
    """Log each column once: rows for evaluation may be of the same dataset."""
    said: set[tuple[str, str]] = set()
    for each in columns:
        if (each.dataset, each.column) not in said:
            logger.warning("%s", each)
        said.add((each.dataset, each.column))


def _first_rows(source: Source) -> list[Row]:
    rows: list[Row] = []
    first, many, size, last = 0, 1, 0, min(_ROWS, len(source))
    # A row may be too large or a file may have changed: the code that uses the rows reports it.
    with suppress(DataError):
        while first < last and size < _CHARACTERS:
            some = source.rows(range(first, min(first + many, last)))
            rows += (row for row in some if not isinstance(row, RowError))
            size += sum(_size_of(row) for row in some if not isinstance(row, RowError))
            first, many = first + many, 2 * many
    return rows


def _size_of(row: Row) -> int:
    """Return the size of a row's content: its characters, and 64 for each value."""
    total, stack = 0, [row]
    while stack:
        item: Any = stack.pop()
        total += 64
        if isinstance(item, str | bytes):  # images, perhaps
            total += len(item)
        elif isinstance(item, dict):
            stack += [*item, *item.values()]
        elif isinstance(item, list | tuple):
            stack += item
    return total


def _is_filled(column: str, value: Any) -> bool:
    if column == _PADDED:
        return isinstance(value, list) and 0 in value
    return value not in (None, [], {}) and not (isinstance(value, str) and not value.strip())
