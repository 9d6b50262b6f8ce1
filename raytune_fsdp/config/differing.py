"""What a config says that its defaults do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic_core import PydanticUndefined

from raytune_fsdp.config.base import Section
from raytune_fsdp.config.schema import TAG

REQUIRED = "(required)"
"""In place of a default that there is not."""


def differing(config: Section) -> dict[str, tuple[Any, Any]]:
    """The fields that are not at their defaults, by dotted path: the value and the default.

    A section of another `type` than the default's is compared with the defaults of its own type, and named by it.
    """
    return dict(_differing(config, None, ""))


def _differing(section: Section, default: Section | None, path: str) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for name, info in type(section).model_fields.items():
        value, here = getattr(section, name), f"{path}{name}"
        if default is not None:
            other = getattr(default, name)
        else:
            other = info.get_default(call_default_factory=True, validated_data={})
        if isinstance(value, Section):
            same = isinstance(other, Section) and type(other) is type(value)
            if not same and hasattr(value, TAG):
                yield f"{here}.{TAG}", (getattr(value, TAG), getattr(other, TAG, _default(other)))
            yield from _differing(value, other if same else None, f"{here}.")
        elif isinstance(value, list) and value and all(isinstance(each, Section) for each in value):
            for index, each in enumerate(value):
                yield from _differing(each, None, f"{here}.{index}.")
        elif value != other and name != TAG:
            yield here, (value, _default(other))


def _default(value: Any) -> Any:
    return REQUIRED if value is PydanticUndefined else value.model_dump() if isinstance(value, Section) else value
