"""Read columns that say they are JSON, such as `Json` of the datasets library: it makes them of values of many shapes.

From version 6 of the order on. A text in quotation marks is that text. Anything else stays as it is written, as
`JsonText`: an object where one belongs, and a text where texts are read, since the library writes texts that are JSON
themselves without quotation marks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any

import pyarrow as pa

from raytune_fsdp.base.errors import RowError
from raytune_fsdp.data.sources.source import JsonText, Row

_Read = Callable[[Any], Any]


def columns_with_json(schema: Any) -> list[str]:
    """Return the names of the columns that have JSON in their values, lists and structs."""
    return list(_readers(schema))


def with_json(rows: Iterable[Row | RowError], schema: Any) -> Iterator[Row | RowError]:
    """Yield rows of columns with the JSON in them read."""
    readers = _readers(schema)
    for row in rows:
        yield row if isinstance(row, RowError) else row | {name: read(row[name]) for name, read in readers.items()}


@lru_cache(maxsize=64)  # 0.2 ms for the schema of usual calls, and a batch may be read for one row
def _readers(schema: Any) -> dict[str, _Read]:
    found = ((field.name, _reader(field.type)) for field in schema)
    return {name: read for name, read in found if read is not None}


def _reader(kind: Any) -> _Read | None:
    """Return what reads the JSON in values of a type; None: there is none."""
    if isinstance(kind, pa.JsonType):
        return _read
    if pa.types.is_struct(kind):
        fields = {field.name: read for field in kind if (read := _reader(field.type)) is not None}
        return (lambda value: value and value | {k: read(value[k]) for k, read in fields.items()}) if fields else None
    item = _reader(kind.value_type) if _is_list(kind) else None
    return None if item is None else lambda values: values and [item(each) for each in values]


def _read(text: str | None) -> str | None:
    if text is None or text == "null":  # as older versions of the library wrote what is missing
        return None
    if text.startswith('"'):
        with suppress(ValueError):
            return str(json.loads(text))
    return JsonText(text)


def _is_list(kind: Any) -> bool:
    of = pa.types
    some = (of.is_list, of.is_large_list, of.is_fixed_size_list, of.is_list_view, of.is_large_list_view)
    return any(each(kind) for each in some)
