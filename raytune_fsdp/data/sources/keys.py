"""Find which keys the rows of a file have, of the keys that newer versions of the order read and older ones did not.

They are found by a search of the bytes while a JSON file is scanned, or in the schema of columns. The search may also
name a key that no row uses as one: then a run has a newer version than it needs, and the same rows. A key that it does
not find (spelled with escapes, for example) is not read: rows are read by the version that the run then has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from raytune_fsdp.base.durable import replace_at_once
from raytune_fsdp.config.sections.formats import FUNCTIONS, SYSTEM, ChatFormat, Format, PythonFormat
from raytune_fsdp.data.mixture import FOURTH_ORDER, OLDEST_ORDER
from raytune_fsdp.data.sources.json_columns import columns_with_json
from raytune_fsdp.data.sources.prepared import PreparedRows
from raytune_fsdp.data.sources.source import Keys

NAMES = ("weight", "training", SYSTEM, FUNCTIONS)
ANY = "*"

# A key ends with a quotation mark and a colon. Few quotation marks have a colon after them, and few of these keys end
# like the names above, so numpy leaves little to look at.
_QUOTE, _COLON, _SPACE, _BRACKET, _BACKSLASH = b'": [\\'
_ENDS = {name: name[-2:].encode() for name in NAMES}
_COLON_AFTER = re.compile(rb'"\s*:')
_OBJECTS_AFTER = re.compile(rb'"\s*:\s*"(?:\s|\\[nrt])*\[(?:\s|\\[nrt])*\{')
_OVERLAP = 128
"""How many bytes are searched again with the next ones: a key may lie across two reads."""
_MOST_TEXTS = 16
_NOTE = "keys.json"


def lowest_order(format: Format, found: Iterable[Keys]) -> int:
    """Return the lowest version of the order that reads the rows of these files as the newest does."""
    if isinstance(format, PythonFormat):  # nobody knows what its function returns
        return FOURTH_ORDER if isinstance(format.then, ChatFormat) else OLDEST_ORDER
    if not isinstance(format, ChatFormat):
        return OLDEST_ORDER
    if format.system not in (None, SYSTEM) or format.prompt is not None:
        return FOURTH_ORDER  # a field that older versions do not have
    wanted = {"weight", "training"}
    wanted |= {SYSTEM} if format.system is not None else set()
    wanted |= {FUNCTIONS} if format.tools not in (None, FUNCTIONS) else set()
    texts = {format.messages, ANY}
    return FOURTH_ORDER if any(each.names & wanted or each.texts & texts for each in found) else OLDEST_ORDER


class KeySearch:
    """Searches a JSON file for keys, one read after another."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._texts: set[str] = set()
        self._end = b""

    def update(self, piece: bytes) -> None:
        data = self._end + piece
        self._end = data[-_OVERLAP:]
        content = np.frombuffer(data + b"\0\0\0\0", dtype=np.uint8)
        quotes = np.flatnonzero(content == _QUOTE)
        after = content[quotes + 1]
        keys = quotes[((after == _COLON) | (after <= _SPACE)) & (quotes > 1)]
        before = content[keys - 2], content[keys - 1]
        for name in [name for name in NAMES if name not in self._names]:
            first, second = _ENDS[name]
            for end in keys[(before[0] == first) & (before[1] == second)].tolist():
                if _key(data, end) == name and _COLON_AFTER.match(data, end):
                    self._names.add(name)
                    break
        next_to = [content[keys + many] for many in range(1, 5)]
        # White space in front of the bracket may be written as it is, or as `\\n`.
        begins = [(each == _BRACKET) | (each <= _SPACE) | (each == _BACKSLASH) for each in next_to]
        close = (next_to[1] == _QUOTE) & begins[2]
        apart = (next_to[1] <= _SPACE) & ((next_to[2] == _QUOTE) & begins[3] | (next_to[2] <= _SPACE))
        for end in keys[(next_to[0] == _COLON) & (close | apart) | (next_to[0] <= _SPACE)].tolist():
            if len(self._texts) <= _MOST_TEXTS and _OBJECTS_AFTER.match(data, end):
                self._texts.add(_key(data, end) if len(self._texts) < _MOST_TEXTS else ANY)

    def found(self) -> Keys:
        return Keys(frozenset(self._names), frozenset(self._texts))


def _key(data: bytes, end: int) -> str:
    """Return the quoted text that ends here."""
    return data[data.rfind(b'"', 0, end) + 1 : end].decode(errors="replace")


def keys_of_columns(names: Iterable[str]) -> Keys:
    """Return the keys of rows whose values are all text."""
    names = frozenset(names)
    return Keys(names & frozenset(NAMES), names)


def keys_of_schema(schema: Any) -> Keys:
    """Return the keys of rows that come from columns."""
    return Keys(
        frozenset(name for field in schema for name in _inside(field)) & frozenset(NAMES),
        frozenset(field.name for field in schema if _is_text(field.type)),
        frozenset(columns_with_json(schema)),
    )


def _inside(field: Any) -> Iterable[str]:
    yield field.name
    for index in range(field.type.num_fields):
        yield from _inside(field.type.field(index))


def _is_text(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def cached_keys(made: PreparedRows, search: Callable[[], Sequence[Keys]], note: str = _NOTE) -> list[Keys]:
    """Return what `search` finds, and keep it: for files prepared without this search, or by an older version.

    `note`: the name of the file that keeps it. Older versions wrote keys.json for Parquet, too, without its JSON.
    """
    kept = made.path / note
    with suppress(OSError, ValueError, KeyError, TypeError):
        values = json.loads(kept.read_text(encoding="utf-8"))
        if values["digest"] == _digest(values["keys"]):
            return [Keys.from_json(each) for each in values["keys"]]
    found = list(search())
    keys = [each.to_json() for each in found]
    with suppress(OSError):  # a read-only cache: the next command searches again
        replace_at_once(kept, json.dumps({"keys": keys, "digest": _digest(keys)}).encode())
    return found


def _digest(keys: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(keys).encode())
