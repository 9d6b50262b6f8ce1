"""How the identity of a run, and of windows in the cache, may grow without breaking what is there.

An identity names every value that decides the trajectory; two runs are the same if their identities are equal. A new
field of a section that an identity dumps would be named in new identities and not in old ones, so every existing run
would refuse to continue and every cache be built again. Therefore: what a missing key means is written down here once,
when the field is added, and a value equal to that is left out. The meaning never changes afterwards, also if the
field's default does.

What changes the order of samples or how they are packed is not a field: it raises ORDER_VERSION (data/order.py) or
DOCUMENT_VERSION (data/rows/formats.py), and a run begun under another version is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from raytune_fsdp.config.base import Section

ABSENT: dict[str, Any] = {}
"""The meaning of a key's absence, by its path: `optim.<field>`, `optim.schedule.<type>.<field>`,
`method.<type>.<field>`, `format.<type>.<field>`. Fields that every identity has named from the beginning are not
here."""


def named(path: str, section: Section, *, exclude: Collection[str] = ()) -> dict[str, Any]:
    """What an identity says of a section of the config."""
    values = section.model_dump()
    place = f"{path}.{values['type']}" if "type" in values else path
    found: dict[str, Any] = {}
    for key, value in values.items():
        inner = getattr(section, key)
        said = named(f"{place}.{key}", inner) if isinstance(inner, Section) else value
        absent = ABSENT.get(f"{place}.{key}", _ALWAYS_NAMED)
        if key not in exclude and said != absent:
            found[key] = said
    return found


_ALWAYS_NAMED = object()
