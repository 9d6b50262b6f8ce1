"""How the identity of a run, or of windows in the cache, may gain fields without invalidating what exists.

An identity names every value that decides the trajectory; two runs are the same if their identities are equal. If a
section gains a field, new identities would name it and old ones would not, so every existing run would refuse to
continue and every cache would be built again. Therefore the meaning of a missing key is written down here once, when
the field is added, and a value equal to it is left out. That meaning never changes afterwards, even if the field's
default does.

A change of code that alters the order of samples or their packing is not a field: it raises ORDER_VERSION
(data/order.py) or DOCUMENT_VERSION (data/rows/formats.py), and a run begun under another version is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from raytune_fsdp.config.base import Section

ABSENT: dict[str, Any] = {}
"""The meaning of a key's absence, by its path: `optim.<field>`, `optim.schedule.<type>.<field>`,
`method.<type>.<field>`, `format.<type>.<field>`. Fields that every identity has always named are not here."""


def named(path: str, section: Section, *, exclude: Collection[str] = ()) -> dict[str, Any]:
    """The entries of an identity for a section of the config."""
    values = section.model_dump()
    place = f"{path}.{values['type']}" if "type" in values else path
    entries: dict[str, Any] = {}
    for key, value in values.items():
        inner = getattr(section, key)
        entry = named(f"{place}.{key}", inner) if isinstance(inner, Section) else value
        absent = ABSENT.get(f"{place}.{key}", _ALWAYS_NAMED)
        if key not in exclude and entry != absent:
            entries[key] = entry
    return entries


_ALWAYS_NAMED = object()
