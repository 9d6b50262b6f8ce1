"""Which values may stand where in the config, read from the pydantic models. Overrides, messages, help and docs all ask here.

A `Place` is one position of the config (`optim.lr`, `data.train`, the items of `data.train`). Unions of sections are
told apart by their field `type`; a place below such a union is the sum of what its members allow there.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from raytune_fsdp.config.base import Section

TAG = "type"
"""The field that tells the members of a union of sections apart."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to fill a place: a type, and the bounds on it (`annotated_types` objects)."""

    type: Any
    bounds: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    options: tuple[Option, ...] = ()
    """Empty: anything goes, as inside a free-form map."""

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
        """Whether something else than a section may stand here, too."""
        return bool(self.sections) and len(self.sections) < len(self.options)

    @property
    def item(self) -> Place | None:
        """What a list here holds; None if there cannot be a list."""
        for option in self.options:
            if get_origin(option.type) is list:
                return place_of(get_args(option.type)[0])
        return None

    @property
    def choices(self) -> tuple[str, ...]:
        """Words allowed here; for a union of sections none (they are the choices of its `type`)."""
        literals = (option.type for option in self.options if get_origin(option.type) is Literal)
        return tuple(dict.fromkeys(str(choice) for literal in literals for choice in get_args(literal)))

    @property
    def default_tag(self) -> str | None:
        """The `type` of a union of sections whose map names none: that of the field's default."""
        return getattr(self.default, TAG, None)

    def allows(self, scalar: type) -> bool:
        return any(option.type is scalar for option in self.options)

    def fields(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for section in self.sections for name in section.model_fields))

    def child(self, name: str) -> Place | None:
        """The place called `name` below this one; None if there is none."""
        if self.sections:
            found = [place_of_field(s.model_fields[name]) for s in self.sections if name in s.model_fields]
            if found or self.item is None:
                return _sum(found) if found else None
        if self.item is not None:
            # Any index: whether it is past the end depends on the tree, not on the types.
            return self.item if name.isdecimal() else None
        return ANYTHING if self.free else None

    def narrowed(self, values: Mapping[str, Any]) -> Place:
        """Only the members of the union that `values[type]` names; all of them if it names none."""
        named = [option for option in self.options if str(values.get(TAG)) in tags(option.type)]
        return Place(tuple(named), self.optional, self.default, self.doc) if named else self


ANYTHING = Place()


def find(root: Place, path: tuple[str, ...]) -> Place | None:
    place: Place | None = root
    for part in path:
        place = place.child(part) if place is not None else None
    return place


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def tags(section: Any) -> tuple[str, ...]:
    """The values of `type` that select this section; none for sections outside unions."""
    if not is_section(section) or TAG not in section.model_fields:
        return ()
    return tuple(str(choice) for choice in get_args(section.model_fields[TAG].annotation))


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
        # The bounds of a field hold for every member; a member may have more (`Annotated[int, Field(ge=1)] | ...`).
        for member in get_args(annotation):
            yield from _options(member, bounds)
    else:
        yield Option(annotation, bounds)


def _sum(places: list[Place]) -> Place:
    options: list[Option] = []
    for place in places:
        options += [option for option in place.options if option not in options]
    return Place(tuple(options), any(p.optional for p in places), places[0].default, places[0].doc)
