"""Which values are allowed where in the config, read from the pydantic models, for overrides, messages, help and docs.

A `Place` is one position in the config (`optim.lr`, `data.train`, the items of `data.train`). The field `type`
distinguishes the members of a union of sections; a place below such a union allows what any of its members allows.
"""

from __future__ import annotations

import json
import re
import textwrap
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types as bounds
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from raytune_fsdp.config.rules import Section
from raytune_fsdp.config.text import Loc

TAG = "type"
"""The field that distinguishes the members of a union of sections."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to fill a place: a type, and the bounds on it (`annotated_types` objects)."""

    type: Any
    bounds: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    options: tuple[Option, ...] = ()
    """Empty: anything is allowed, as inside a free-form map."""

    optional: bool = False
    default: Any = field(default=PydanticUndefined)
    doc: str = ""

    @property
    def free(self) -> bool:
        return all(option.type is Any or get_origin(option.type) is dict for option in self.options)

    @property
    def required(self) -> bool:
        return self.default is PydanticUndefined

    @property
    def sections(self) -> tuple[type[Section], ...]:
        return tuple(option.type for option in self.options if is_section(option.type))

    @property
    def mixed(self) -> bool:
        """Whether a section and something other than a section are both allowed here."""
        return bool(self.sections) and len(self.sections) < len(self.options)

    @property
    def item(self) -> Place | None:
        """The place of an item of a list here; None if no list is allowed."""
        lists = (option.type for option in self.options if get_origin(option.type) is list)
        return next((place_of(get_args(each)[0]) for each in lists), None)

    @property
    def choices(self) -> tuple[str, ...]:
        """The words allowed here; none for a union of sections (they are the choices of its `type`)."""
        literals = (option.type for option in self.options if get_origin(option.type) is Literal)
        return tuple(dict.fromkeys(str(choice) for literal in literals for choice in get_args(literal)))

    @property
    def default_tag(self) -> str | None:
        """The `type` of a union of sections whose map names no type: the type of the field's default."""
        return getattr(self.default, TAG, None)

    def allows(self, scalar: type) -> bool:
        return any(option.type is scalar for option in self.options)

    def fields(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for section in self.sections for name in section.model_fields))

    def child(self, name: str) -> Place | None:
        """Return the place called `name` below this one; None if there is none."""
        if self.sections:
            found = [_place_in(s, name) for s in self.sections if name in s.model_fields]
            if found or self.item is None:
                return _sum(found) if found else None
        if self.item is not None:
            # Any index: whether it is past the end depends on the tree, not on the types.
            return self.item if name.isdecimal() else None
        return ANYTHING if self.free else None

    def narrowed(self, values: Mapping[str, Any]) -> Place:
        """Return this place with only the members of the union that `values[type]` names; all if it names none."""
        named = [option for option in self.options if str(values.get(TAG)) in tags(option.type)]
        return Place(tuple(named), self.optional, self.default, self.doc) if named else self


ANYTHING = Place()


def find_place(root: Place, path: tuple[str, ...]) -> Place | None:
    place: Place | None = root
    for part in path:
        place = place.child(part) if place is not None else None
    return place


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def tags(section: Any) -> tuple[str, ...]:
    """Return the values of `type` that select this section; none for sections outside unions."""
    if not is_section(section) or TAG not in section.model_fields:
        return ()
    return tuple(str(choice) for choice in get_args(section.model_fields[TAG].annotation))


def sections_of(union: Any) -> dict[str, Any]:
    """Return the sections of a union that `type` chooses from, by their types, in order."""
    return {tag: option.type for option in place_of(union).options for tag in tags(option.type)}


@cache  # found by every setting of every config that is read: without it, two thirds of the time that takes
def _place_in(section: type[Section], name: str) -> Place:
    return place_of_field(section.model_fields[name])


def place_of_field(info: FieldInfo) -> Place:
    place = place_of(info.annotation, tuple(info.metadata))
    default = info.get_default(call_default_factory=True, validated_data={})
    return Place(place.options, place.optional, default, " ".join((info.description or "").split()))


def place_of(annotation: Any, bounds: tuple[Any, ...] = ()) -> Place:
    found = list(_options(annotation, bounds))
    return Place(tuple(o for o in found if o.type is not type(None)), any(o.type is type(None) for o in found))


def _options(annotation: Any, bounds: tuple[Any, ...]) -> Iterator[Option]:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extras = get_args(annotation)
        own = tuple(b for extra in extras for b in (extra.metadata if isinstance(extra, FieldInfo) else (extra,)))
        yield from _options(inner, bounds + own)
    elif origin in (Union, types.UnionType):
        # The bounds of a field apply to every member; a member may have more (`Annotated[int, Field(ge=1)] | ...`).
        for member in get_args(annotation):
            yield from _options(member, bounds)
    else:
        yield Option(annotation, bounds)


def _sum(places: list[Place]) -> Place:
    options: list[Option] = []
    for place in places:
        options += [option for option in place.options if option not in options]
    return Place(tuple(options), any(p.optional for p in places), places[0].default, places[0].doc)


# Every field of the config in words: for `--help`, the docs page and error messages.

INDEX = "N"
"""What stands for the index of a list item in the path of a field."""


@dataclass(frozen=True, slots=True)
class DescribedField:
    path: str
    """The dotted path, with N for a list index."""

    type: str
    default: str
    doc: str
    only_with: tuple[str, ...] = ()
    """The values of `type` whose sections this describes, if the members of a union do not all have the field, or
    describe it differently."""


def describe(root: Place) -> list[DescribedField]:
    """Return every field below the root, in the order in which the sections are written.

    A field that means something else with another `type` comes once for each meaning.
    """
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
                if meant.mixed or not meant.sections:
                    default = default_in_words(meant)
                    yield DescribedField(".".join(here), type_in_words(meant), default, meant.doc, only_with)
                yield from _fields(meant, here)
                if meant.item is not None and meant.item.sections:
                    yield from _fields(meant.item, (*here, INDEX))


def _meanings(place: Place, name: str) -> list[tuple[Place, list[type[Section]]]]:
    """Return how the members of a union describe a field, and which of them do so: mostly all in the same way."""
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


def _doc_of_tag(place: Place) -> str:
    """Return what each value of a union's `type` means, from the docstring that each member has there."""
    infos = [(tags(section), section.model_fields[TAG].description or "") for section in place.sections]
    if len(infos) == 1:
        return " ".join(infos[0][1].split())
    return " ".join(f"`{tag}`: {' '.join(doc.split())}" for names, doc in infos for tag in names)


def type_in_words(place: Place) -> str:
    """Return the type of a place in words, such as `integer >= 1, or null`."""
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
    if get_origin(option.type) is dict:
        return "map with any keys"
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
    """Return a bound as a person would write it: 2**63, not 9223372036854775808."""
    if isinstance(value, int) and value > 2**20 and value & (value - 1) == 0:
        return f"2**{value.bit_length() - 1}"
    return f"{value}"


def default_in_words(place: Place) -> str:
    if place.required:
        return "required"
    if isinstance(place.default, str):
        return place.default or '""'
    return json.dumps(place.default, default=str)


def sections_in_words(root: Place, width: int = 80) -> str:
    """Return the sections for a terminal, with the first sentence of what each is about."""
    lines: list[str] = []
    for name in root.fields():
        child = root.child(name)
        about = re.split(r"(?<=[.:]) ", " ".join(child.doc.split()) if child else "")[0].rstrip(":")
        lines += textwrap.wrap(f"{name:12}{about}", width, initial_indent="  ", subsequent_indent=" " * 14)
    return "\n".join(lines) + "\n"


def help_text(root: Place, width: int = 80, below: str = "") -> str:
    """Return fields for a terminal, all or those of one section: the flag, its type and default, what it means."""
    lines: list[str] = []
    section = ""
    for entry in describe(root):
        if below and not f"{entry.path}.".startswith(f"{below}."):
            continue
        if entry.path.split(".")[0] != section:
            section = entry.path.split(".")[0]
            child = root.child(section)
            lines += ["", *textwrap.wrap(f"{section}: {child.doc if child else ''}", width)]
        head = f"--{entry.path}  {entry.type}"
        head += "  (required)" if entry.default == "required" else f"  (default: {entry.default})"
        # Flags and choices with a hyphen must stay whole, or they cannot be copied.
        lines += textwrap.wrap(head, width, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
        only = f"Only with type {', '.join(entry.only_with)}. " if entry.only_with else ""
        lines += textwrap.wrap(only + entry.doc, width, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines[1:]) + "\n"
