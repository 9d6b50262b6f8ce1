"""Explain mistakes in a config, one line each: field, value, rule, way out, and the file line or flag it comes from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from raytune_fsdp.base.redaction import redact
from raytune_fsdp.config.other_names import OURS, our_value
from raytune_fsdp.config.rules import CredentialsError
from raytune_fsdp.config.schema import TAG, Place, describe, find_place, tags, type_in_words
from raytune_fsdp.config.text import Loc

_MOST_LINES = 100
"""The most problems reported of one config. Looking for the nearest name of 60,000 keys would take an hour."""
_MOST_CHARACTERS = 200
"""The most of a line with all names of a section: two lines of a terminal of 100 columns."""
_MENTION = re.compile(r"\b[a-z_]+(?:\.[a-z0-9_]+)+")


def explain(error: ValidationError, tree: Any, root: Place, sources: Mapping[Loc, str]) -> list[str]:
    """Return one line for each field that pydantic refuses."""
    if (foreign := _another_files(error, tree, root, sources)) is not None:
        return [foreign]
    lines: dict[Loc, str] = {}
    # Unknown names come first: a mistyped one may be why another is missing.
    found = sorted(error.errors(include_url=False), key=lambda detail: detail["type"] != "extra_forbidden")
    for number, detail in enumerate(found):
        if len(lines) >= _MOST_LINES:
            return [*lines.values(), f"and {error.error_count() - number} more problems like these"]
        path, place, holder = _locate(detail["loc"], root, tree)
        if path in lines:  # pydantic reports a union once for each of its members
            continue
        if place is not None and place.mixed and isinstance(detail["input"], dict) and detail["type"] != "value_error":
            continue  # that a map is no number: what is wrong inside it is reported for the section
        if detail["type"] == "extra_forbidden" and holder is not None:
            lines[path] = _unknown(path, detail["input"], holder, root, sources)
        else:
            lines[path] = _explain_one(detail, path, place, sources)
    return list(lines.values())


def _another_files(error: ValidationError, tree: Any, root: Place, sources: Mapping[Loc, str]) -> str | None:
    """Return the line for a whole file that is no config: another trainer's, or a model's, without a section of ours."""
    if any(isinstance(tree.get(name), dict) and (name,) in sources for name in root.fields()):
        return None
    if ("model_type",) in sources:
        file = sources["model_type",].rpartition(" line ")[0]
        return f"config file {file}: is a model's config.json, not a run's: name its directory in model.path"
    unknown = [detail["loc"] for detail in error.errors(include_url=False) if detail["type"] == "extra_forbidden"]
    theirs = [str(loc[0]) for loc in unknown if len(loc) == 1 and loc[0] in OURS]
    files = {sources[(name,)].rpartition(" line ")[0] for name in theirs if (name,) in sources} - {""}
    if len(theirs) < 3 or len(files) != 1:
        return None
    (file,) = files
    return (
        f"config file {file}: {', '.join(theirs[:3])} are names of another trainer: `raytune-fsdp convert {file}` writes "
        "a config for this one"
    )


def _locate(loc: tuple[int | str, ...], root: Place, tree: Any) -> tuple[Loc, Place | None, Place | None]:
    """Return the dotted path of an error, its place, and the place that holds it.

    pydantic's location also has labels that name members of unions, as in ('optim', 'schedule', 'wsd', 'decay'); the
    path leaves them out.
    """
    path: list[str] = []
    place: Place | None = root
    holder: Place | None = None
    label_next = False
    for part in loc:
        if label_next:
            label_next = False
            continue
        path.append(str(part))
        tree = below(tree, part)
        holder = place
        place = place.child(str(part)) if place is not None else None
        if place is not None and len(place.options) > 1:
            label_next = True
            if len(place.sections) > 1 and isinstance(tree, dict):
                place = place.narrowed(tree)
    return tuple(path), place, holder


def below(tree: Any, part: int | str) -> Any:
    """Return what a tree has under a key or an index; None if it has nothing there."""
    if isinstance(tree, dict):
        return tree.get(part)
    return tree[part] if isinstance(tree, list) and isinstance(part, int) and part < len(tree) else None


def _explain_one(detail: ErrorDetails, path: Loc, place: Place | None, sources: Mapping[Loc, str]) -> str:
    name, value = ".".join(path), detail["input"]
    kind = detail["type"]
    if kind == "missing" and place is not None:
        way_out = f"set it in the YAML file or with --{name}"
        first_sentence = re.split(r"(?<=[.])\s", place.doc, maxsplit=1)[0]
        return f"{name}: required, {type_in_words(place)}; {way_out}. {first_sentence}".strip()
    # Reported for the whole section, though only its `type` is wrong.
    if kind in ("union_tag_invalid", "union_tag_not_found") and place is not None:
        path, place = (*path, TAG), place.child(TAG)
        name, value = ".".join(path), value.get(TAG) if isinstance(value, dict) else value
    if kind == "value_error":
        # Raised by a rule of ours. A rule about several fields names them itself, and belongs to their section.
        rule = str(detail["ctx"]["error"])
        # The fields that a rule names and the user has set; if there is none, the place of the error.
        named = [tuple(word.split(".")) for word in _MENTION.findall(rule)]
        written = [name for name in dict.fromkeys(named) if any(known[: len(name)] == name for known in sources)]
        origin = _origin(written or [path], sources)
        section = place is not None and bool(place.sections)
        if rule.startswith(f"{name}.") or not path:
            return f"{rule}{origin}"
        hidden = section or isinstance(detail["ctx"]["error"], CredentialsError)
        return f"{name}: {rule}{origin}" if hidden else f"{name}={shown(value, name)}: {rule}{origin}"
    if callable(value) and place is not None and "`module:function`" in place.doc:
        said = getattr(value, "__name__", type(value).__name__)
        return f"{name}: {said} is a function, must be its name, module:function; `finetune` takes functions themselves"
    if (ours := our_value(path, value)) is not None:
        return f"{name}={shown(value, name)}: here it is {ours}{_origin([path], sources)}"
    kinds = [tag for section in place.sections for tag in tags(section)] if place is not None else []
    if isinstance(value, str) and value.lower() in kinds:
        return f"{name}={shown(value, name)}: here it is {{type: {value.lower()}}}{_origin([path], sources)}"
    rule = f"must be {type_in_words(place)}" if place is not None and not place.free else detail["msg"]
    near = get_close_matches(str(value).lower(), place.choices, n=1) if place is not None else []
    hint = f"; nearest: {near[0]}" if near else ""
    return f"{name}={shown(value, name)}: {rule}{hint}{_origin([path], sources)}"


def _unknown(path: Loc, value: Any, holder: Place, root: Place, sources: Mapping[Loc, str]) -> str:
    """Return the line for a name that does not exist: with the nearest that does, and all names of that section."""
    *parents, last = path
    names = holder.fields()
    equals = "" if isinstance(value, (dict, list)) else f"={shown(value, '.'.join(path))}"
    what, known = "section", f"sections: {', '.join(names)}"
    if parents:
        what, known = "field", f"{'.'.join(parents)} has {', '.join(names)}"
        types = tags(holder.sections[0]) if len(holder.sections) == 1 else ()
        what += f" with type {', '.join(types)}" if types else ""
    if last.lower() not in names and (ours := OURS.get(last.lower())) is not None:
        return f"{'.'.join(path)}{equals}: unknown {what}; here it is {ours}{_origin([path], sources)}"
    near = _sibling(path, names, root) or _elsewhere(path, root)
    nearest = f"; nearest: {near}" if near else ""
    line = f"{'.'.join(path)}{equals}: unknown {what}{nearest}; {known}{_origin([path], sources)}"
    if len(line) > _MOST_CHARACTERS:  # names that nobody reads
        section = " ".join(["--help", ".".join("N" if part.isdecimal() else part for part in parents)]).strip()
        line = line.replace(known, f"`raytune-fsdp train {section}` lists all")
    return line


def _sibling(path: Loc, names: tuple[str, ...], root: Place) -> str | None:
    """Return the nearest name in the same section, else in another member of the same union, with its type."""
    *parents, last = path
    for near in get_close_matches(last.lower(), names, n=1):
        return ".".join([*parents, near])
    union = find_place(root, tuple(parents))
    if union is None:
        return None
    for near in get_close_matches(last, union.fields(), n=1):
        having = [tag for section in union.sections if near in section.model_fields for tag in tags(section)]
        return f"{'.'.join([*parents, near])} with type {' or '.join(having)}"
    return None


def _elsewhere(path: Loc, root: Place) -> str | None:
    """Return the full path of a field with that name in another section, or of one with a similar path."""
    known = [entry.path for entry in describe(root)]
    same = [name for name in known if name.rsplit(".", 1)[-1] == path[-1]]
    # 0.75, above difflib's 0.6: a whole path shares much with others, and a wrong hint is worse than none.
    near = same or get_close_matches(".".join(path), known, n=1, cutoff=0.75)
    return near[0] if near else None


def _origin(paths: list[Loc], sources: Mapping[Loc, str]) -> str:
    found = dict.fromkeys(source for path in paths for source in _sources_of(path, sources))
    return f" (from {' and '.join(found)})" if found else ""


def _sources_of(path: Loc, sources: Mapping[Loc, str]) -> Iterator[str]:
    """Yield where a value was set: itself, else something inside it (which only a flag spells out), else its holder."""
    if path in sources:
        yield sources[path]
        return
    inside = [source for known, source in sources.items() if known[: len(path)] == path and path]
    if inside:
        yield inside[0]
        return
    for length in range(len(path) - 1, 0, -1):
        if path[:length] in sources:
            yield sources[path[:length]]
            return


def shown(value: Any, name: str = "", limit: int = 60) -> str:
    """Return the value of a field as it would be written, without secrets, and cut off if it is long."""
    value = redact(value, name)
    if isinstance(value, str):
        text = value if value and not re.search(r"\s", value) else repr(value)
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
