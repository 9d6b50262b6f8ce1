"""Every field of the config in words: for `--help`, the docs page and error messages."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import annotated_types as bounds

from raytune_fsdp.config.base import Section
from raytune_fsdp.config.schema import TAG, Option, Place, is_section, place_of, place_of_field, tags
from raytune_fsdp.config.text import Loc

INDEX = "N"
"""Stands for the index of a list item in the path of a field."""


@dataclass(frozen=True, slots=True)
class DescribedField:
    path: str
    """Dotted, with N for a list index."""

    type: str
    default: str
    doc: str
    only_with: tuple[str, ...] = ()
    """For a field that not all members of a union have, or not all alike: the values of `type` that select those of
    which this is said."""


def describe(root: Place) -> list[DescribedField]:
    """Every field below the root, in the order the sections are written in. One that means something else with another
    `type` comes once for each meaning."""
    return list(_fields(root, ()))


def _fields(place: Place, path: Loc) -> Iterator[DescribedField]:
    for name in place.fields():
        here = (*path, name)
        if name == TAG:
            child = place.child(name)
            assert child is not None
            default = place.default_tag or default_in_words(child)
            yield DescribedField(".".join(here), type_in_words(child), default, _doc_of_tag(place))
        else:
            for meant, having in _meanings(place, name):
                shared = len(having) == len(place.sections)
                only_with = () if shared else tuple(tag for section in having for tag in tags(section))
                yield from _below(meant, here, only_with)


def _meanings(place: Place, name: str) -> list[tuple[Place, list[type[Section]]]]:
    """What the members of a union say of a field, and which of them say so: mostly all the same."""
    child = place.child(name)
    assert child is not None
    having = [section for section in place.sections if name in section.model_fields]
    if child.sections:
        return [(child, having)]
    found: dict[tuple[str, ...], tuple[Place, list[type[Section]]]] = {}
    for section in having:
        own = place_of_field(section.model_fields[name])
        said = (type_in_words(own), default_in_words(own), own.doc)
        found.setdefault(said, (own, []))[1].append(section)
    return list(found.values())


def _below(place: Place, path: Loc, only_with: tuple[str, ...]) -> Iterator[DescribedField]:
    if place.sections and not place.mixed:
        yield from _fields(place, path)
        return
    yield DescribedField(".".join(path), type_in_words(place), default_in_words(place), place.doc, only_with)
    yield from _fields(place, path)
    if place.item is not None and place.item.sections:
        yield from _fields(place.item, (*path, INDEX))


def _doc_of_tag(place: Place) -> str:
    """The field `type` of a union: what each of its values means, from the docstring that each member has there."""
    infos = [(tags(section), section.model_fields[TAG].description or "") for section in place.sections]
    if len(infos) == 1:
        return " ".join(infos[0][1].split())
    return " ".join(f"`{tag}`: {' '.join(doc.split())}" for names, doc in infos for tag in names)


def type_in_words(place: Place) -> str:
    """The type of a place: `integer >= 1, or null`."""
    if place.sections and not place.mixed:
        types = " | ".join(tag for section in place.sections for tag in tags(section))
        return f"a map with fields {', '.join(place.fields())}{f' (type: {types})' if types else ''}"
    if place.free:
        words = ["map with any keys"]
    else:
        words = [_option_in_words(option) for option in place.options if get_origin(option.type) is not Literal]
    if place.choices:
        words.append(f"one of {', '.join(place.choices)}" if len(place.choices) > 1 else place.choices[0])
    if place.optional:
        words.append("null")
    return f"{', '.join(words[:-1])}, or {words[-1]}" if len(words) > 1 else words[0]


_NAMES = {bool: "true or false", int: "integer", float: "number", str: "text"}


def _option_in_words(option: Option) -> str:
    if get_origin(option.type) is list:
        item = place_of(get_args(option.type)[0])
        others = Place(tuple(option for option in item.options if not is_section(option.type)))
        what = type_in_words(item) if not item.sections else "maps"
        what = f"{type_in_words(others)} or maps" if item.mixed else what
        least = [bound.min_length for bound in option.bounds if isinstance(bound, bounds.MinLen)]
        return f"list of {what} (at least {least[0]})" if least else f"list of {what}"
    if is_section(option.type):
        fields = list(option.type.model_fields)
        return f"map of {' and '.join(fields)}" if len(fields) < 3 else "map"
    return f"{_NAMES.get(option.type, str(option.type))}{_limits(option.bounds)}"


def _limits(found: tuple[Any, ...]) -> str:
    symbols = ((bounds.Gt, "gt", ">"), (bounds.Ge, "ge", ">="), (bounds.Lt, "lt", "<"), (bounds.Le, "le", "<="))
    limits = [
        f"{symbol} {_number(getattr(bound, attribute))}"
        for kind, attribute, symbol in symbols
        for bound in found
        if isinstance(bound, kind)
    ]
    return f" {', '.join(limits)}" if limits else ""


def _number(value: Any) -> str:
    """A bound as a person would write it: 2**63, not 9223372036854775808."""
    if isinstance(value, int) and value > 2**20 and value & (value - 1) == 0:
        return f"2**{value.bit_length() - 1}"
    return f"{value}"


def default_in_words(place: Place) -> str:
    if place.required:
        return "required"
    if isinstance(place.default, str):
        return place.default or '""'
    return json.dumps(place.default, default=str)


def help_text(root: Place, width: int = 80) -> str:
    """All fields for a terminal: the flag, its type and default, what it means."""
    lines: list[str] = []
    section = ""
    for entry in describe(root):
        if entry.path.split(".")[0] != section:
            section = entry.path.split(".")[0]
            child = root.child(section)
            title = f"{section}: {child.doc if child else ''}"
            lines += ["", *textwrap.wrap(title, width)]
        head = f"--{entry.path}  {entry.type}"
        head += "  (required)" if entry.default == "required" else f"  (default: {entry.default})"
        # Flags and choices with a hyphen must stay whole, or they cannot be copied.
        lines += textwrap.wrap(head, width, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
        only = f"Only with type {', '.join(entry.only_with)}. " if entry.only_with else ""
        lines += textwrap.wrap(only + entry.doc, width, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines[1:]) + "\n"
