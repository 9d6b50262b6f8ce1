"""The parts of a project's table, and the state of a file while it is converted.

A table has a `TheirOption` for everything that a project's file may say. Most have a rule of their own (`carry`,
`same`, `leave`, `refuse`). What several options say together, such as a batch, is settled first, by the project's
`prepare`, which says what became of each (`Translation.say`); the table then only lists their names (`settled`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from raytune_fsdp.config.problems import shown
from raytune_fsdp.config.text import Loc, Plain, spelled

Fate = Literal["carried", "same", "left", "refused", "dropped", "default"]
_LIMIT = 2**64
MOST_BYTES = 4_000_000
"""The most bytes of a file of another project that is read here."""
T = TypeVar("T")
D = TypeVar("D")


class Said(NamedTuple):
    """What became of a key, and why."""

    fate: Fate
    text: str
    drop: str | None = ""
    """The key to drop for a refused one, if that is another key. None: dropping it would leave nothing."""


class WrongValueError(ValueError):
    """A value breaks a rule; the message is the rule."""


class NotHereError(ValueError):
    """Something has no counterpart of ours; the message says why."""


# Readers of values. A scalar without quotes comes as `Plain`: only its reader knows whether `no` is a word.


def plain(value: Any) -> Any:
    return value.value if isinstance(value, Plain) else value


def number(value: Any) -> int | float:
    found = plain(value)
    if isinstance(found, str):
        try:
            found = float(found)
        except ValueError:
            raise WrongValueError("must be a number") from None
    # No setting is near the limit, and Python cannot write or divide numbers of a thousand digits. NaN fails the test.
    if isinstance(found, bool) or not isinstance(found, int | float) or not -_LIMIT < found < _LIMIT:
        raise WrongValueError("must be a number")
    return found


def whole(value: Any) -> int:
    found = number(value)
    if found != int(found):
        raise WrongValueError("must be a whole number")
    return int(found)


def flag(value: Any) -> bool:
    found = str(plain(value)).lower()
    if found not in ("true", "yes", "on", "1", "false", "no", "off", "0"):
        raise WrongValueError("must be true or false")
    return found in ("true", "yes", "on", "1")


def flag_or_auto(value: Any) -> bool | Literal["auto"]:
    return "auto" if plain(value) == "auto" else flag(value)


def text(value: Any) -> str:
    found = value.text if isinstance(value, Plain) else value
    if not isinstance(found, str):
        raise WrongValueError("must be a text")
    return found


def words(value: Any) -> list[str]:
    """Read a list of words, or a text of words with commas or spaces between them."""
    if isinstance(value, list):
        return [text(each) for each in value]
    return [word for word in re.split(r"[,\s]+", text(value)) if word]


def a_map(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WrongValueError("must be a map")
    found: dict[str, Any] = spelled(value)
    return found


class Translation:
    """A file that is being converted: its keys, the fields that they became, and what became of each key."""

    def __init__(
        self,
        file: str,
        given: dict[str, Any],
        *,
        gpus: int | None = None,
        drop: Iterable[str] = (),
        teacher: str | None = None,
    ) -> None:
        self.file = file
        self.directory = Path(file).parent
        self.given = given
        """Values by key, as they are in the file: those that are set and not dropped."""
        self.gpus = gpus
        self.dropping = frozenset(drop)
        self.teacher = teacher
        """The model to learn from, of files that do not name one."""
        self.fields: dict[str, Any] = {}
        """Our fields, by dotted name."""
        self.said: dict[str, Said] = {}
        self.unsaid: list[tuple[str, Said]] = []
        """Defaults of the other project, for keys that the file does not set."""
        self.problems: list[str] = []
        self.sources: dict[Loc, str] = {}

    def get(self, key: str, read: Callable[[Any], T], default: D) -> T | D:
        """Return the value of a key. A wrong value is reported once, and then counts as not set."""
        if key not in self.given or key in self.said and self.said[key].fate == "refused":
            return default
        try:
            return read(self.given[key])
        except WrongValueError as error:
            self.said[key] = Said("refused", str(error))
            return default

    def on(self, key: str) -> bool:
        """Return whether the file switches an option on, refused or not."""
        return key in self.given and str(spelled(self.given[key])).lower() not in ("false", "no", "off", "0", "0.0")

    def first(self, *keys: str) -> str:
        """Return the first of these spellings that the file uses, or simply the first."""
        return next((key for key in keys if key in self.given), keys[0])

    def put(self, field: str, value: Any, key: str = "") -> None:
        self.fields[field] = value
        if key:
            self.sources[tuple(field.split("."))] = f"{key} in {self.file}"

    def say(self, key: str, fate: Fate, why: str, drop: str | None = "") -> None:
        """Record what became of a key, if the file has it. The first record counts."""
        if key in self.given:
            self.said.setdefault(key, Said(fate, why, drop))

    def say_all(self, keys: Iterable[str], fate: Fate, why: str, drop: str | None = "") -> None:
        """Record the same of several keys."""
        for key in keys:
            self.say(key, fate, why, drop)

    def carry(self, key: str, field: str, value: Any, note: str = "") -> None:
        if key in self.given and key not in self.said:
            self.put(field, value, key)
            self.say(key, "carried", f"{in_words(field, value)}{note and f': {note}'}")

    def carry_all(self, keys: Iterable[str], field: str, value: Any, note: str = "") -> None:
        """Carry a value that follows from several keys."""
        for key in keys:
            self.carry(key, field, value, note)

    def default(self, field: str, value: Any, why: str) -> None:
        """Set a field to a default of the other project that is not ours, unless it is set."""
        if field not in self.fields:
            self.put(field, value)
            self.tell_default(field, value, why)

    def carry_or_default(self, key: str, field: str, value: Any, why: str, note: str = "") -> None:
        """Carry the value of a key, or set the field to what the other project has without it: see `default`."""
        self.carry(key, field, value, note)
        self.default(field, value, why)

    def tell_default(self, field: str, value: Any, why: str) -> None:
        self.unsaid.append((field, Said("default", f"{in_words(field, value)}: {why}")))

    def refuse_unsaid(self, key: str, why: str) -> None:
        """Refuse something that the other project does by default, because the file does not set it."""
        if key not in self.given and key not in self.dropping:
            self.unsaid.append((key, Said("refused", why)))


def in_words(field: str, value: Any) -> str:
    return f"{field}={shown(value, field)}"


Rule = Callable[[Translation, str], None]


@dataclass(frozen=True, slots=True)
class TheirOption:
    """Options of a project that are converted alike."""

    names: tuple[str, ...]
    here: str
    """What becomes of them, for the documentation."""
    rule: Rule | None
    """Says what becomes of a key, unless that was said before."""
    unused: Said = Said("left", "not used with the other options of this file")
    takes_null: bool = False


def carry(names: str, field: str, read: Callable[[Any], Any], note: str = "") -> TheirOption:
    """Make options whose value becomes the value of a field of ours."""

    def rule(c: Translation, key: str) -> None:
        c.carry(key, field, c.get(key, read, None), note)

    return TheirOption(tuple(names.split()), f"`{field}`{note and f': {note}'}", rule)


def switch(names: str, field: str, value: Any, off: str, note: str = "") -> TheirOption:
    """Make switches that give a field of ours this value if they are on; `off` says what both projects do otherwise."""

    def rule(c: Translation, key: str) -> None:
        if c.get(key, flag, False):
            c.carry(key, field, value, note)
        else:
            c.say(key, "same", off)

    return TheirOption(tuple(names.split()), f"`{field}: {shown(value, field)}`", rule)


def unless_zero(names: str, field: str, when: str = "") -> TheirOption:
    """Make options whose value becomes that of a field of ours, and which are off with 0."""

    def rule(c: Translation, key: str) -> None:
        if value := c.get(key, number, 0):
            c.carry(key, field, value)
        else:
            c.say(key, "same", "off, as here")

    return TheirOption(tuple(names.split()), f"`{field}`{when and f', {when}'}", rule)


def same(names: str, why: str) -> TheirOption:
    return TheirOption(tuple(names.split()), f"same: {why}", None, Said("same", why))


def leave(names: str, why: str) -> TheirOption:
    return TheirOption(tuple(names.split()), f"left: {why}", None, Said("left", why))


def refuse(
    names: str, why: str, off: tuple[Any, ...] = (False, 0), alike: str = "off, as here", here: str = ""
) -> TheirOption:
    """Make options that cannot be carried. With a value in `off`, or an empty one, they mean what happens here, too.

    `here`: what the documentation says instead of `why`.
    """

    def rule(c: Translation, key: str) -> None:
        value = spelled(c.given[key])
        if value in ([], {}, "") or any(_alike(value, each) for each in off):
            c.say(key, "same", alike)
        else:
            c.say(key, "refused", why)

    return TheirOption(tuple(names.split()), here or f"refused: {why}", rule)


def _alike(value: Any, other: Any) -> bool:
    """Compare values as texts (0 is not false, but `"false"` in quotes is), and numbers as numbers (0.0 is 0)."""
    if str(value).lower() == str(other).lower():
        return True
    numbers = not isinstance(value, bool) and not isinstance(other, bool)
    try:
        return numbers and number(value) == number(other)
    except WrongValueError:
        return False


def part(names: str, owner: str, active: Callable[[Translation], bool], here: str = "") -> TheirOption:
    """Make details of an option that cannot be carried: without it they mean nothing. `here`: as in `refuse`."""

    def rule(c: Translation, key: str) -> None:
        if active(c):
            c.say(key, "refused", f"belongs to {owner}", owner)
        else:
            c.say(key, "left", f"means nothing without {owner}")

    return TheirOption(tuple(names.split()), here or f"refused with `{owner}`, else left", rule)


def settled(names: str, here: str, *, takes_null: bool = False) -> TheirOption:
    """Make options that `prepare` settles together with others, before the table is used."""
    return TheirOption(tuple(names.split()), here, None, takes_null=takes_null)


def ask(names: str, here: str, rule: Rule) -> TheirOption:
    return TheirOption(tuple(names.split()), here, rule)


def table(*options: TheirOption) -> dict[str, TheirOption]:
    """Return options by name. In a name `*` stands for the number of an item."""
    found: dict[str, TheirOption] = {}
    for option in options:
        for name in option.names:
            assert name not in found, f"{name} is in the table twice"
            found[name] = option
    return found


@dataclass(frozen=True, slots=True)
class Project:
    """A trainer whose files can be converted."""

    name: str
    title: str
    about: str
    """Which files these are, for the documentation."""
    options: dict[str, TheirOption]
    prepare: Callable[[Translation], None] = lambda c: None
    """Settles what several options say together."""
    finish: Callable[[Translation], None] = lambda c: None
    """Adds the defaults that are not ours."""
    like: str = ""
    """The project of which this is a variant: files without a key that only this one has are taken for that one's."""
    fragment: bool = False
    """Its files say nothing about model, data and training: the result is a part of a config."""
