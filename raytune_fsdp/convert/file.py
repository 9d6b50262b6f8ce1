"""Convert a file: read it, guess its project, turn its keys into ours, and check that the result is a valid config."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.base.redaction import find_secrets
from raytune_fsdp.base.untrusted import MAX_DEPTH, UnsoundError, reason
from raytune_fsdp.base.untrusted import read_file as read_bytes
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.load import ROOT, load_config, nearest_file
from raytune_fsdp.config.problems import explain, shown
from raytune_fsdp.config.text import Plain, dump, parse, problem_line, put_at, spelled
from raytune_fsdp.convert.accelerate import ACCELERATE
from raytune_fsdp.convert.axolotl import AXOLOTL
from raytune_fsdp.convert.deepspeed import DEEPSPEED
from raytune_fsdp.convert.llama_factory import LLAMA_FACTORY
from raytune_fsdp.convert.rules import MOST_BYTES, Project, Said, TheirOption, Translation
from raytune_fsdp.convert.torchtune import TORCHTUNE
from raytune_fsdp.convert.trl import TRL
from raytune_fsdp.convert.trl_gkd import TRL_GKD
from raytune_fsdp.convert.trl_preferences import TRL_CPO, TRL_DPO, TRL_KTO, TRL_ORPO, TRL_REWARD

_TRL = (TRL, TRL_DPO, TRL_KTO, TRL_ORPO, TRL_CPO, TRL_REWARD, TRL_GKD)
PROJECTS = {project.name: project for project in (AXOLOTL, *_TRL, LLAMA_FACTORY, TORCHTUNE, ACCELERATE, DEEPSPEED)}
_INSIDES = {
    name: {option[: dot.start()] for option in project.options for dot in re.finditer(r"\.", option)}
    for name, project in PROJECTS.items()
}
"""The names that have options below them, by project."""
_MOST_UNKNOWN = 200
"""The most keys that are not options: for each the nearest option is looked for, which takes milliseconds."""
# A part of a config is completed with these to validate it.
_REST: dict[str, Any] = {
    "run": {"name": "any"},
    "model": {"path": "any"},
    "data": {"train": [{"path": "any"}]},
    "train": {"max_steps": 1, "global_batch": 1},
}


@dataclass(frozen=True, slots=True)
class KeyLine:
    """A key of the file with its value, or a default of the project without one, and what became of it."""

    key: str
    value: Any
    said: Said

    @property
    def name(self) -> str:
        if self.said.fate == "default":
            return "(not in the file)"
        if self.value is None:
            return self.key
        # As the file writes it: 5e-5, not 5e-05.
        value = self.value.text if isinstance(self.value, Plain) else spelled(self.value)
        return f"{self.key}={'null' if value in ('', '~') else shown(value, self.key)}"


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of a conversion."""

    project: Project
    guessed: str
    """Why the file was taken for that project's; empty if the project was named."""
    lines: list[KeyLine]
    problems: list[str]
    """Why there is no config, a line each."""
    tree: dict[str, Any]
    """The config, or a part of one, without defaults."""

    def report(self) -> str:
        """Return a line for every key of the file, and for every default that is not ours."""
        width = min(44, max((len(line.name) for line in self.lines), default=0))
        fates = [line.said.fate for line in self.lines]
        counts = ", ".join(f"{fates.count(fate)} {fate}" for fate in dict.fromkeys(sorted(fates)))
        taken = f" ({self.guessed})" if self.guessed else ""
        head = f"taken for a file of {self.project.title}{taken}: {counts}"
        lines = (f"{line.said.fate:8} {line.name:{width}}  {line.said.text}" for line in self.lines)
        return "\n".join(_printable(line) for line in (head, *lines))

    def config(self, file: str) -> str:
        """Return the config as the text of a file."""
        dropped = [line.key for line in self.lines if line.said.fate == "dropped"]
        without = f", without {', '.join(dropped)}" if dropped else ""
        part = (
            "\n# A part of a config: put it into one that names the model, the data and the training."
            if self.project.fragment
            else ""
        )
        head = _printable(f"# Converted from {Path(file).name} of {self.project.title}{without}.")
        return f"{head}{part}\n{dump(self.tree)}"


def convert(
    file: str,
    *,
    project: str | None = None,
    gpus: int | None = None,
    drop: Sequence[str] = (),
    teacher: str | None = None,
) -> Converted:
    """Read a file and turn it into a config of ours. Raises ConfigError if it cannot be read, or is no known project's.

    What cannot be carried is in `problems`.
    """
    tree = read(file)
    guessed = ""
    if project is None and _is_ours(tree):
        return _convert_ours(file, tree)
    if project is None:
        project, guessed = guess(file, tree)
    about = PROJECTS[project]
    leaves = list(_leaves(tree, about))
    dropped = {key for key, _, _ in leaves if _drops(drop, key)}
    unknown = sum(option is None and key not in dropped for key, option, _ in leaves)
    if unknown > _MOST_UNKNOWN:
        raise ConfigError(
            f"{file}: {unknown} of its {len(leaves)} keys are not known as options of {about.title}, so it is not a "
            f"file of {about.title}: name the trainer with --from"
        )
    given = {
        key: value
        for key, option, value in leaves
        if key not in dropped and (spelled(value) is not None or (option and option.takes_null))
    }
    c = Translation(file, given, gpus=gpus, drop=drop, teacher=teacher)
    about.prepare(c)
    lines = []
    for key, option, value in leaves:
        said = Said("dropped", "as if the file did not have it") if key in dropped else _say(c, about, key, option)
        lines.append(KeyLine(key, value, said))
    about.finish(c)
    lines += [KeyLine(key, None, said) for key, said in c.unsaid]
    problems = [_refusal(line) for line in lines if line.said.fate == "refused"] + c.problems
    keys = [key for key, _, _ in leaves] + [key for key, _ in c.unsaid]
    for each in drop:
        # An option that the file does not set may be dropped: many files may be converted with the same command.
        if each not in about.options and not any(_drops([each], key) for key in keys):
            near = get_close_matches(each, keys, n=1)
            problems.append(f"--drop {each}: the file has no such key{f'; nearest: {near[0]}' if near else ''}")
    if teacher is not None and c.fields.get("teacher.model", teacher) != teacher:
        problems.append(f"--teacher {teacher}: the file names {c.fields['teacher.model']} as teacher: leave one out")
    elif teacher is not None and "teacher.model" not in c.fields and not problems:
        problems.append(f"--teacher {teacher}: the file learns from no teacher: leave --teacher out")
    ours = _nested(c.fields)
    problems += [
        f"{key}: looks like a secret, and the config would show it: take it out of the file, and set it in the "
        "environment"
        for key in find_secrets(ours)
    ]
    if not problems:
        problems = _check(ours, c, fragment=about.fragment)
    return Converted(about, guessed, lines, [_printable(problem) for problem in problems], ours)


def _printable(text: str) -> str:
    """Return one line without line breaks or anything that moves a cursor: keys and values may be a stranger's."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def read(file: str) -> dict[str, Any]:
    """Read the map in a YAML file, which a stranger may have written."""
    try:
        # Editors on Windows begin a file with a mark.
        content = read_bytes(file, limit=MOST_BYTES, links=True).decode("utf-8-sig")
        if content.lstrip().startswith("{"):
            content = content.expandtabs(1)  # YAML reads JSON, but for tabs, which no text in JSON has as they are
        tree, _ = parse(content)
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file{nearest_file(Path(file))}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except (OSError, UnsoundError) as error:
        raise ConfigError(f"{file}: {error.strerror if isinstance(error, OSError) else reason(error)}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: {problem_line(error)}") from None
    _check_depth(file, tree)
    if not isinstance(tree, dict) or not tree:
        kind = "empty" if not tree else f"a {'list' if isinstance(tree, list) else 'single value'}"
        raise ConfigError(f"{file}: is {kind}, must be a map of options")
    return tree


def _check_depth(file: str, tree: Any) -> None:
    """Refuse deep nesting: the functions that write and compare values are recursive."""
    level = [tree]
    for _ in range(MAX_DEPTH):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [value for values in inner for value in values]
    if level:
        raise ConfigError(f"{file}: is nested deeper than {MAX_DEPTH} levels")


def guess(file: str, tree: dict[str, Any]) -> tuple[str, str]:
    """Return the project that knows most of the keys, and how many it knows."""
    known = {
        name: sum(key in project.options or key in _INSIDES[name] for key in tree) for name, project in PROJECTS.items()
    }
    best = max(known, key=lambda name: known[name])
    family = PROJECTS[best].like or best
    second = max((name for name in known if (PROJECTS[name].like or name) != family), key=lambda name: known[name])
    alike = [name for name in known if known[name] == known[best] and (PROJECTS[name].like or name) == family]
    if 2 * known[best] < len(tree) or known[best] == known[second] or (len(alike) > 1 and family not in alike):
        raise ConfigError(
            f"{file}: its trainer is unclear ({', '.join(f'{name} knows {many}' for name, many in known.items())} "
            f"of its {len(tree)} keys): name the trainer with --from {'|'.join(PROJECTS)}"
        )
    others = ", ".join(f"--from {name}" for name in alike if name != best)
    unless = f"; if it is for another of its commands: {others}" if others else ""
    return best, f"it knows {known[best]} of the {len(tree)} keys, {second} {known[second]}{unless}"


def _leaves(tree: dict[str, Any], project: Project) -> Iterator[tuple[str, TheirOption | None, Any]]:
    """Yield every key with its option and value. Goes into maps, and lists of maps, with options below their names."""

    options, insides = project.options, _INSIDES[project.name]

    def walk(key: str, name: str, value: Any) -> Iterator[tuple[str, TheirOption | None, Any]]:
        value = _as_map(value) if name in insides else value
        maps = isinstance(value, list) and all(isinstance(each, dict) for each in value)
        if value and isinstance(value, dict) and name in insides:
            for inner, each in value.items():
                yield from walk(f"{key}.{inner}", _name_below(options, name, inner), each)
        elif value and maps and f"{name}.*" in insides:
            for index, each in enumerate(value):
                yield from walk(f"{key}.{index}", f"{name}.*", each)
        else:
            yield key, options.get(name), value

    for key, value in tree.items():
        # A key with a dot would look like a nested key.
        yield from walk(key, "?" if "." in key else key, value)


def _as_map(value: Any) -> Any:
    """Parse a map that is written as JSON text, as on a command line; return other values as they are."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        found, _ = parse(value)
        _check_depth("", found)
    except (yaml.YAMLError, ConfigError):
        return value
    return found


def _name_below(options: dict[str, TheirOption], name: str, inner: str) -> str:
    exact, any_name = f"{name}.{inner}", f"{name}.*"
    if "." in inner:
        return "?"
    return any_name if any_name in options and exact not in options else exact


def _drops(drop: Sequence[str], key: str) -> bool:
    return any(key == each or key.startswith(f"{each}.") for each in drop)


def _say(c: Translation, project: Project, key: str, option: TheirOption | None) -> Said:
    """Return what became of a key."""
    if option is None and key in c.said:  # a name of the file's own, which others of its values stand for
        return c.said[key]
    if option is None:
        # Many options share most of their path, so only a very near name counts.
        near = get_close_matches(re.sub(r"\.\d+\.", ".*.", key), list(project.options), n=1, cutoff=0.75)
        return Said(
            "refused", f"not an option of {project.title} that is known here{f'; nearest: {near[0]}' if near else ''}"
        )
    if key not in c.given:
        return Said("same", "not set")
    if key not in c.said and option.rule is not None:
        option.rule(c, key)
    return c.said.get(key, option.unused)


def _refusal(line: KeyLine) -> str:
    if line.said.drop is None:
        return f"{line.name}: {line.said.text}"
    return f"{line.name}: {line.said.text}; --drop {line.said.drop or line.key} converts without it"


def _nested(fields: dict[str, Any]) -> dict[str, Any]:
    """Turn dotted fields into a tree, in the order of our documentation."""
    tree: dict[str, Any] = {}
    for field, value in fields.items():
        put_at(tree, field, value)
    ordered = {section: tree[section] for section in FinetuneConfig.model_fields if section in tree}
    for section, values in ordered.items():
        place = ROOT.child(section)
        names = place.fields() if place is not None else ()
        ordered[section] = {name: values[name] for name in names if name in values}
    return ordered


def _check(tree: dict[str, Any], c: Translation, *, fragment: bool) -> list[str]:
    """Validate the config; return the problems, which name the keys of both files."""
    whole = tree
    if fragment:
        whole = {section: {**_REST.get(section, {}), **tree.get(section, {})} for section in {**_REST, **tree}}
    try:
        FinetuneConfig.model_validate(whole)
    except ValidationError as error:
        return explain(error, whole, ROOT, c.sources)
    return []


# Configs of ours that an older version wrote: a few fields had other names then.

_RENAMED = {"format.returns": "format.then"}
"""Fields by the last two names of their path, with what they are called now."""


_OURS = Project(
    name="raytune-fsdp",
    title="an older raytune-fsdp",
    about="Configs of this package, from before a field was renamed.",
    options={},
)


def _is_ours(tree: dict[str, Any]) -> bool:
    """Return whether a file has sections of ours, and nothing else."""
    known = set(ROOT.fields())
    return tree.keys() <= known and any(isinstance(tree.get(name), dict) for name in ("run", "data", "train"))


def _with_todays_names(tree: Any, path: str = "") -> tuple[Any, dict[str, str]]:
    """Return a tree in which fields are called what they are called now, and the new names of those that were not."""
    if isinstance(tree, list):
        pairs = [(str(index), each) for index, each in enumerate(tree)]
    elif isinstance(tree, dict):
        pairs = list(tree.items())
    else:
        return tree, {}
    found: dict[str, Any] = {}
    renamed: dict[str, str] = {}
    for name, value in pairs:
        where = f"{path}.{name}" if path else name
        now = _RENAMED.get(".".join(where.split(".")[-2:]), "").rpartition(".")[2] or name
        found[now], inside = _with_todays_names(value, where)
        renamed |= inside
        if now != name:
            renamed[where] = f"{path}.{now}"
    return (list(found.values()) if isinstance(tree, list) else found), renamed


def _convert_ours(file: str, tree: dict[str, Any]) -> Converted:
    """Give a config of an older version today's names. One that has them needs no conversion, and is refused so."""
    now, renamed = _with_todays_names(tree)
    lines = [KeyLine(key, None, Said("carried", f"is called {name} now")) for key, name in renamed.items()]
    problems: list[str] = []
    try:
        load_config(spelled(now))
    except ConfigError as error:
        problems = [str(each) for each in error.args]
    if not renamed and not problems:
        problems = [f"{file}: is a config of raytune-fsdp as it is: `raytune-fsdp train --config {file}` takes it"]
    guessed = "it has its sections and no others"
    return Converted(_OURS, guessed, lines, [_printable(each) for each in problems], spelled(now))
