"""Turn a YAML file and command-line overrides into a validated `FinetuneConfig`, and a config back into YAML.

File and overrides are first merged as plain trees, so that an override can replace, extend or complete anything the
file says, and one validation sees the result. All problems are reported together, a line each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, Literal, TypeVar, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.base.redaction import redact_text
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.problems import below, explain
from raytune_fsdp.config.recorded import recorded
from raytune_fsdp.config.rules import Section
from raytune_fsdp.config.schema import ANYTHING, TAG, Option, Place, find_place, tags
from raytune_fsdp.config.text import MAX_BYTES, Loc, Plain, dump, listed, parse, problem_line, scalar, spelled

S = TypeVar("S", bound=Section)

ROOT = Place((Option(FinetuneConfig),))
_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class ReadConfig:
    """A file, or a recipe, as it was when it was read."""

    tree: dict[str, Any]
    sources: dict[Loc, str]
    """Where each of its values is."""


def load_config(
    config: str | Path | Mapping[str, Any] | ReadConfig | None = None, overrides: Sequence[str] = ()
) -> FinetuneConfig:
    """Return a validated config. Raises ConfigError naming every problem.

    `config`: a YAML file, also one that was read before, a recipe's name, or the sections themselves, where paths may be
    `Path`s. `overrides`: flags as on the command line, such as "--optim.lr=1e-4".
    """
    return validated(FinetuneConfig, *merged(config, overrides, ROOT))


def merged(
    config: str | Path | Mapping[str, Any] | ReadConfig | None, overrides: Sequence[str], root: Place
) -> tuple[dict[str, Any], dict[Loc, str], list[str]]:
    """Return the tree of a file or of a program's sections with the overrides in it, where each of its values is from,
    and what is wrong with the overrides."""
    sources: dict[Loc, str] = {}
    if isinstance(config, ReadConfig):
        tree, sources = _tree(config.tree), dict(config.sources)
    elif isinstance(config, Mapping):
        tree = _tree(config)
    else:
        tree, sources = ({}, {}) if config is None else read_file(config, root)
    tree, sources = _in_our_words(tree, root), {_in_our_case(path, root): each for path, each in sources.items()}
    found, problems = read_overrides(overrides, root)
    problems += apply_overrides(tree, found, root, sources)
    return tree, sources, problems


def validated(kind: type[S], tree: dict[str, Any], sources: Mapping[Loc, str], problems: Sequence[str]) -> S:
    """Return the section that a tree says. Raises ConfigError with all that is wrong with it, after `problems`."""
    root = Place((Option(kind),))
    found, settled = list(problems), settle(tree, root)
    try:
        made = kind.model_validate(settled)
    except ValidationError as error:
        found += explain(error, settled, root, sources)
    if found:
        raise ConfigError(*found)
    return made


def _tree(value: Any) -> Any:
    """Return a program's sections in a form like that of a file's, to which overrides are applied."""
    if isinstance(value, Mapping):
        return {key: _tree(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_tree(each) for each in value]
    return str(value) if isinstance(value, PurePath) else value


def recorded_text(config: FinetuneConfig) -> str:
    """Return the config as YAML for the run directory and for trackers: defaults included, without its secrets."""
    return dump(recorded(config.model_dump()))


def recipes() -> dict[str, Path]:
    """Return the configs that come with the package, by name: from inside it, or in a checkout from `jobs/recipes`."""
    installed, checkout = _PACKAGE / "recipes", _PACKAGE.parent / "jobs" / "recipes"
    return {path.stem: path for path in sorted((installed if installed.is_dir() else checkout).glob("*.yaml"))}


def recipe_text(name: str) -> str:
    """Return a recipe as it works in this directory.

    Outside of the repository, it names the package's own data where that is installed.
    """
    text = recipes()[name].read_text(encoding="utf-8")
    own = re.compile(rf"(?<=: ){_PACKAGE.name}/(\S+)")

    def here_or_installed(found: re.Match[str]) -> str:
        here = Path(_PACKAGE.name, found[1]).exists()
        return found[0] if here else json.dumps(str(_PACKAGE / found[1]), ensure_ascii=False)

    return own.sub(here_or_installed, text)


def read_file(path: str | Path, root: Place = ROOT) -> tuple[dict[str, Any], dict[Loc, str]]:
    """Return the tree of a YAML file, or of the recipe of that name, and where each of its values is."""
    try:
        # It may also be a pipe of the user's.
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"config file {path}: has more than {MAX_BYTES} bytes, more than any config has")
        text = content.decode()
    except FileNotFoundError:
        if str(path).lower() not in recipes():
            raise ConfigError(f"config file {path}: no such file{nearest_file(Path(path))}") from None
        text = recipe_text(str(path).lower())
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from None
    try:
        tree, lines = parse(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {path}: {problem_line(error)}") from None
    if not isinstance(tree, dict):
        kind = "empty" if tree is None else f"a {'list' if isinstance(tree, list) else 'single value'}"
        names = ", ".join(root.fields())
        raise ConfigError(f"config file {path}: is {kind}, must be a map of sections ({names})")
    return tree, {loc: f"{path} line {line}" for loc, line in lines.items() if loc}


def nearest_file(path: Path) -> str:
    """Return what to add to the news that there is no such file."""
    hint = "" if path.is_absolute() else f" (relative paths start at {Path.cwd()})"
    beside = [each.name for each in islice(path.parent.glob("*.y*ml"), 1000)] if path.parent.is_dir() else []
    near = [str(path.parent / name) for name in get_close_matches(path.name, beside, n=1)]
    if not path.suffix:
        recipe = get_close_matches(str(path).lower(), recipes(), n=1)
        hint += f", and no recipe{'' if recipe else ' (`raytune-fsdp recipes` lists them)'}"
        near = near or recipe
    return hint + (f"; nearest: {near[0]}" if near else "")


def settle(value: Any, place: Place) -> Any:
    """Return the tree as pydantic should see it: scalars read as their fields mean them, omitted parts filled in."""
    if isinstance(value, Plain):
        value = _scalar(value, place)
    if isinstance(value, str):
        value = _chosen(value, place)
        if value == "None" and place.optional and not place.allows(str):  # as Python writes null
            value = None
    if value is None and place.sections and not place.optional:
        value = {}  # a section whose every line is commented out
    if isinstance(value, dict) and place.sections:
        return _section(value, place)
    if isinstance(value, list) and place.item is not None:
        return [settle(item, place.item) for item in value]
    return spelled(value)


def _section(values: dict[str, Any], place: Place) -> dict[str, Any]:
    settled = dict(values)
    # pydantic wants the `type` of every union; a config may leave it out for the default's type.
    if len(place.sections) > 1 and TAG not in settled and place.default_tag is not None:
        settled = {TAG: place.default_tag, **settled}
    tag = _word(settled.get(TAG))
    here = place.narrowed({TAG: _chosen(tag, place.child(TAG) or ANYTHING) if isinstance(tag, str) else tag})
    for name in here.fields():
        child = here.child(name)
        # A required section that is missing would be reported as one problem; an empty one reports its required fields.
        if (
            name not in settled
            and child is not None
            and child.required
            and child.sections
            and not tags(child.sections[0])
        ):
            settled[name] = {}
    return {name: settle(value, here.child(name) or ANYTHING) for name, value in settled.items()}


def _named(values: dict[str, Any], place: Place) -> dict[str, Any]:
    """Return a section with its fields' names as they are written here, whatever their case."""
    known = {name.lower(): name for name in place.fields()}
    made: dict[str, Any] = {}
    for name, value in values.items():
        own = known.get(str(name).lower(), name)
        made[name if own in values or own in made else own] = value
    return made


def _in_our_words(value: Any, place: Place) -> Any:
    """Return a tree with names of fields, and the types of unions, as they are written here."""
    if isinstance(value, list) and place.item is not None:
        return [_in_our_words(each, place.item) for each in value]
    if not isinstance(value, dict) or not place.sections:
        return value
    made = _named(value, place)
    tag, own = _word(made.get(TAG)), place.child(TAG)
    if isinstance(tag, str) and own is not None and (chosen := _chosen(tag, own)) != tag:
        made[TAG] = chosen
    here = place.narrowed({TAG: _word(made.get(TAG))})
    return {name: _in_our_words(each, here.child(name) or ANYTHING) for name, each in made.items()}


def _chosen(text: str, place: Place) -> str:
    """Return a choice as it is written here, whatever its case. Where any text may be, its case is part of it."""
    if place.allows(str):
        return text
    return next((choice for choice in place.choices if choice.lower() == text.lower()), text)


def _scalar(scalar: Plain, place: Place) -> Any:
    """Return the value of a scalar at a place.

    `2024` in a text field is text, `none` where `none` is a choice is that choice, and `yes` in a number field is not a
    number.
    """
    if scalar.value is None or place.free:
        return scalar.value
    if scalar.text in place.choices:
        return scalar.text
    kind = type(scalar.value)
    numbers = any(place.allows(number) for number in (int, float))
    if place.allows(kind) or (kind is not bool and numbers):
        return scalar.value
    words = place.allows(str) or any(get_origin(option.type) is Literal for option in place.options)
    # As text, a word is refused where a number belongs; pydantic would read `true` as the number 1.
    return scalar.text if words or kind is bool else scalar.value


# `--section.field value` arguments, merged into the tree of a YAML file before anything is validated.
#
# An unknown name is put into the tree as it is: validation refuses it there, like a mistyped key of the file. Only
# arguments that cannot be put anywhere (a list index past the end, a missing value) are found here.


class Problem(Exception):
    """An argument that cannot be used; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Override:
    flag: str
    path: Loc
    value: Any

    def order(self) -> list[tuple[int, int, str]]:
        # Parents come before children, and items of a list in order. So the command line may name them in any order,
        # and a flag for a whole section never wipes out a flag for one of its fields.
        return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in self.path]


def read_overrides(arguments: Sequence[str], root: Place) -> tuple[list[Override], list[str]]:
    """Return the overrides in the arguments, and a line for every argument that is not an override."""
    found: list[Override] = []
    problems: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            hint = f"--{word}" if "=" in word and "." in word else "--section.field value"
            problems.append(redact_text(f"{word}: not an override; overrides look like {hint}"))
            continue
        try:
            found.append(_read_one(word, rest, root))
        except Problem as problem:
            problems.append(str(problem))
    return found, problems


def _read_one(word: str, rest: list[str], root: Place) -> Override:
    name, equals, text = word.removeprefix("--").partition("=")
    path = _in_our_case(tuple(name.split(".")), root)
    place = find_place(root, path)
    flag = f"--{name}"
    # A field of a free-form map may itself be called no-something. It exists, so it is not a switch turned off.
    if place is None and name.startswith("no-"):
        negated = tuple(name.removeprefix("no-").split("."))
        target = find_place(root, negated)
        if target is not None and target.allows(bool):
            if equals:
                raise Problem(f"{word}: {flag} takes no value; write {flag} or --{'.'.join(negated)} {text}")
            return Override(flag, negated, Plain(False, "false"))
    if not equals:
        # A single dash begins a value: `--optim.lr -1` must reach validation, which explains why it is wrong.
        if rest and not rest[0].startswith("--"):
            text = rest.pop(0)
        elif place is not None and place.allows(bool):
            return Override(flag, path, Plain(True, "true"))
        elif place is None:
            text = ""  # reported as an unknown name, which is the real problem
        else:
            raise Problem(f"{flag}: needs a value ({flag} VALUE or {flag}=VALUE)")
    return Override(flag, path, _in_our_words(_value(flag, text, place or ANYTHING), place or ANYTHING))


def _in_our_case(path: Loc, root: Place) -> Loc:
    made: list[str] = []
    place: Place | None = root
    for part in path:
        known = place.fields() if place is not None else ()
        made.append(part if part in known else next((each for each in known if each.lower() == part.lower()), part))
        place = place.child(made[-1]) if place is not None else None
    return tuple(made)


def _value(flag: str, text: str, place: Place) -> Any:
    """Return what a value on the command line means: in a text field its text, elsewhere a scalar, a map or a list.

    Where both text and a list are allowed, `[a, b]` is the list.
    """
    if text[:1] in ('"', "'"):
        try:
            quoted, _ = parse(text)
        except yaml.YAMLError:
            return text
        return quoted if isinstance(quoted, str) else text
    if place.item is not None and place.allows(str) and (items := listed(text)) is not None:
        return items
    if text[:1] in ("{", "[") and not place.allows(str):
        try:
            return parse(text)[0]
        except yaml.YAMLError as error:
            shown = redact_text(f"{flag}={text}")
            raise Problem(f"{shown}: neither JSON nor YAML ({getattr(error, 'problem', error)})") from None
    return scalar(text)


def apply_overrides(tree: dict[str, Any], overrides: list[Override], root: Place, sources: dict[Loc, str]) -> list[str]:
    """Put the overrides into the tree, and where they came from into `sources`.

    Return a line for each override that does not fit anywhere.
    """
    problems: list[str] = []
    for override in {o.path: o for o in overrides}.values():  # the last one, if a flag is given twice
        _make_way(tree, override, root, sources)
    for override in sorted(overrides, key=Override.order):
        try:
            _put(tree, override, root)
        except Problem as problem:
            problems.append(str(problem))
            continue
        _forget(sources, override.path)
        sources[override.path] = f"flag {override.flag}"
    return problems


def _forget(sources: dict[Loc, str], path: Loc) -> None:
    """Forget where this value, and everything inside it, came from, because it is replaced."""
    for known in [known for known in sources if known[: len(path)] == path]:
        del sources[known]


def _make_way(tree: dict[str, Any], override: Override, root: Place, sources: dict[Loc, str]) -> None:
    """Drop what the file has and the override replaces, though under other names.

    With another `type` of a union, what is there describes the old type. And a dataset is on the hub or in files: it is
    in one place.
    """
    *parents, last = override.path
    place, node = find_place(root, tuple(parents)), _inside(tree, parents)
    if place is None or not isinstance(node, dict):
        return
    if last == TAG and any(tags(section) for section in place.sections):
        before, now = _word(node.get(TAG, place.default_tag)), _word(override.value)
        if (_chosen(now, place.child(TAG) or ANYTHING) if isinstance(now, str) else now) != before:
            node.clear()
            _forget(sources, tuple(parents))
    elif last in _INSTEAD and _INSTEAD.keys() <= set(place.fields()):
        other, *more = _INSTEAD[last]
        if spelled(override.value) is not None and spelled(node.get(other)) is not None:
            for field in (other, *more):
                node.pop(field, None)
                _forget(sources, (*parents, field))


_INSTEAD = {"hub": ("path",), "path": ("hub", "subset", "split", "revision")}


def _inside(tree: dict[str, Any], path: Sequence[str]) -> Any:
    node: Any = tree
    for part in path:
        node = below(node, int(part) if isinstance(node, list) and part.isdecimal() else part)
    return node


def _word(value: Any) -> Any:
    return value.text if isinstance(value, Plain) else value


def _put(tree: dict[str, Any], override: Override, root: Place) -> None:
    *parents, last = override.path
    node: Any = tree
    place: Place | None = root
    for depth, part in enumerate(parents):
        key = _key(node, part, override, depth)
        place = place.child(part) if place is not None else ANYTHING
        found = below(node, key)
        if found is None or (isinstance(found, Plain) and found.value is None):
            found = _start(place, override.path[depth + 1])
            _set(node, key, found)
        elif not isinstance(found, (dict, list)) and place is not None and place.sections:
            found = {}  # the field may also be a single value, which this replaces
            _set(node, key, found)
        if not isinstance(found, (dict, list)):
            where = ".".join(override.path[: depth + 1])
            raise Problem(f"{override.flag}: {where} is {spelled(found)!r}, which has no fields")
        node = found
    _set(node, _key(node, last, override, len(parents)), override.value)


def _start(place: Place | None, key: str) -> dict[str, Any] | list[Any]:
    """Return what a place that the file leaves out holds before a flag sets an item or key in it: its default."""
    if place is None or (place.sections and not (place.item is not None and key.isdecimal())):
        return {}
    if place.item is not None:
        items = place.default if isinstance(place.default, list) else []
        return [item.model_dump(mode="json") if isinstance(item, BaseModel) else deepcopy(item) for item in items]
    return deepcopy(place.default) if isinstance(place.default, dict) else {}


def _key(node: dict[str, Any] | list[Any], part: str, override: Override, depth: int) -> str | int:
    if isinstance(node, dict):
        return part
    where = ".".join(override.path[:depth])
    if not part.isdecimal():
        raise Problem(f"{override.flag}: {where} is a list; name an item by its index, as in --{where}.0")
    if int(part) > len(node):
        items = "1 item" if len(node) == 1 else f"{len(node)} items"
        raise Problem(f"{override.flag}: {where} has {items}; --{where}.{len(node)} appends the next one")
    return int(part)


def _set(node: Any, key: Any, value: Any) -> None:
    if isinstance(node, list) and key == len(node):
        node.append(value)
    else:
        node[key] = value
