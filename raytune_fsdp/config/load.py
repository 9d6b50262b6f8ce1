"""A YAML file and command-line overrides in, a validated `FinetuneConfig` out; and back to YAML.

Both are merged as plain trees first, so that an override can replace, extend or complete anything the file says, and
one validation sees the result. All problems are reported together, a line each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_origin

import yaml
from pydantic import ValidationError

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.overrides import apply_overrides, read_overrides
from raytune_fsdp.config.problems import explain
from raytune_fsdp.config.recorded import recorded
from raytune_fsdp.config.schema import ANYTHING, TAG, Option, Place, tags
from raytune_fsdp.config.text import MAX_BYTES, Loc, Plain, dump, parse, problem_line, spelled

ROOT = Place((Option(FinetuneConfig),))
_PACKAGE = Path(__file__).parents[1]


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> FinetuneConfig:
    """Read the YAML file (if any), apply the overrides, validate. Reads the disk; raises ConfigError naming every
    problem."""
    tree, sources = read_file(path) if path is not None else ({}, {})
    found, problems = read_overrides(overrides, ROOT)
    problems += apply_overrides(tree, found, ROOT, sources)
    settled = settle(tree, ROOT)
    try:
        config = FinetuneConfig.model_validate(settled)
    except ValidationError as error:
        problems += explain(error, settled, ROOT, sources)
    if problems:
        raise ConfigError(*problems)
    return config


def dump_config(config: FinetuneConfig) -> str:
    """The whole config as YAML, defaults included, so that it keeps its meaning when a default changes."""
    return dump(config.model_dump())  # not its JSON mode, which turns infinities in free-form maps into null


def recorded_text(config: FinetuneConfig) -> str:
    """The same for the run directory and for trackers: without its secrets."""
    return dump(recorded(config.model_dump()))


def recipes() -> dict[str, Path]:
    """The configs that come with the package, by name. An installed package has them inside, a checkout beside it."""
    inside, beside = _PACKAGE / "recipes", _PACKAGE.parent / "jobs" / "recipes"
    return {path.stem: path for path in sorted((inside if inside.is_dir() else beside).glob("*.yaml"))}


def recipe_text(name: str) -> str:
    """A recipe as it works in this directory: outside of the repository, with the package's own data where it is
    installed."""
    text = recipes()[name].read_text(encoding="utf-8")
    if Path(_PACKAGE.name).is_dir():
        return text
    own = re.compile(rf"(?<=: ){_PACKAGE.name}/(\S+)")
    return own.sub(lambda found: json.dumps(str(_PACKAGE / found[1]), ensure_ascii=False), text)


def _text_of(path: str | Path) -> str:
    """The text of a file; a pipe of the user's is one, too."""
    with open(path, "rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ConfigError(f"config file {path}: has more than {MAX_BYTES} bytes, more than any config has")
    return content.decode()


def read_file(path: str | Path) -> tuple[dict[str, Any], dict[Loc, str]]:
    """The tree of a YAML file, or of the recipe of that name, and where each of its values is."""
    try:
        text = _text_of(path)
    except FileNotFoundError:
        if str(path) not in recipes():
            hint = "" if Path(path).is_absolute() else f" (relative paths start at {Path.cwd()})"
            if not Path(path).suffix:
                hint += f", and no recipe; there are {', '.join(recipes())}"
            raise ConfigError(f"config file {path}: no such file{hint}") from None
        text = recipe_text(str(path))
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
        names = ", ".join(ROOT.fields())
        raise ConfigError(f"config file {path}: is {kind}, must be a map of sections ({names})")
    return tree, {loc: f"{path} line {line}" for loc, line in lines.items() if loc}


def settle(value: Any, place: Place) -> Any:
    """The tree as pydantic should see it: every scalar read as its field means it, and what may be left out filled in."""
    if isinstance(value, Plain):
        value = _scalar(value, place)
    if value is None and place.sections and not place.optional:
        value = {}  # a section whose every line is commented out
    if isinstance(value, dict) and place.sections:
        return _section(value, place)
    if isinstance(value, list) and place.item is not None:
        return [settle(item, place.item) for item in value]
    return spelled(value)


def _section(values: dict[str, Any], place: Place) -> dict[str, Any]:
    settled = dict(values)
    # pydantic wants the `type` of every union; here the default's type may go without saying.
    if len(place.sections) > 1 and TAG not in settled and place.default_tag is not None:
        settled = {TAG: place.default_tag, **settled}
    tag = settled.get(TAG)
    here = place.narrowed({TAG: tag.text if isinstance(tag, Plain) else tag})
    for name in here.fields():
        child = here.child(name)
        # A required section that is left out would be one problem; empty, it names the fields that it requires.
        if (
            name not in settled
            and child is not None
            and child.required
            and child.sections
            and not tags(child.sections[0])
        ):
            settled[name] = {}
    return {name: settle(value, here.child(name) or ANYTHING) for name, value in settled.items()}


def _scalar(scalar: Plain, place: Place) -> Any:
    """`2024` in a text field is text, `none` where `none` is a choice is that choice, `yes` for a number is not
    one."""
    if scalar.value is None or place.free:
        return scalar.value
    if scalar.text in place.choices:
        return scalar.text
    kind = type(scalar.value)
    numbers = any(place.allows(number) for number in (int, float))
    if place.allows(kind) or (kind is not bool and numbers):
        return scalar.value
    words = place.allows(str) or any(get_origin(option.type) is Literal for option in place.options)
    # As text it is refused where a number belongs; pydantic would read `true` as the number 1.
    return scalar.text if words or kind is bool else scalar.value
