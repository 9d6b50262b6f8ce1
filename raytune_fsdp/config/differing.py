"""What of a config is not as it would be without being written."""

from __future__ import annotations

from typing import Any

from raytune_fsdp.config.base import Section


def differing(section: Section, usual: object = None) -> dict[str, Any]:
    """The fields of a section, as a tree, that differ from those of `usual`; or from their defaults, if that is of
    another kind. A section of several kinds says which it is."""
    tree: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        before = getattr(usual, name) if type(usual) is type(section) else field.get_default(call_default_factory=True)
        if isinstance(value, Section):
            inner = {**_kind(value, before), **differing(value, before)}
            if inner or type(value) is not type(before):
                tree[name] = inner
        elif value != before:
            tree[name] = [_item(each) for each in value] if isinstance(value, list | tuple) else value
    return tree


def _item(value: object) -> object:
    return {**_kind(value, None), **differing(value)} if isinstance(value, Section) else value


def _kind(value: object, before: object) -> dict[str, Any]:
    return {"type": value.type} if type(value) is not type(before) and hasattr(value, "type") else {}
