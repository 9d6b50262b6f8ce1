"""Turn YAML text into plain trees and back.

The rules differ from `yaml.safe_load` where that surprises people: `5e-5` is a number, a repeated key is refused, keys
are text, dates and `1:30` stay text, and every scalar keeps its spelling (`Plain`), because only the field it ends up
in knows whether `2024` or `no` is a name.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import yaml

from raytune_fsdp.base.untrusted import shown

Loc = tuple[str, ...]
"""Where a value is: keys and list indexes from the root."""

# Numbers and booleans as people write them. YAML 1.1 reads `5e-5` as text, `010` as eight and `1:30` as ninety.
_RESOLVERS = {
    "bool": re.compile(r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF"),
    "int": re.compile(r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+|0b[01]+"),
    "float": re.compile(
        r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
    ),
    "null": re.compile(r"~|null|Null|NULL|"),
    "merge": re.compile(r"<<"),
}
# Line breaks for PyYAML, but not for a person.
_BREAKS = re.compile("[\r\x85\u2028\u2029]")

# Far above any config. Aliases of aliases turn a few lines into a billion values, and a file may be a stranger's.
_MAX_CHARS, _MAX_VALUES = 4_000_000, 100_000
MAX_BYTES = 4 * _MAX_CHARS
"""The most bytes of a file that is read as YAML."""
_MAX_DIGITS = 4300
"""The most digits of an integer: Python prints no more."""

_PREFIX = "tag:yaml.org,2002:"


@dataclass(frozen=True, slots=True)
class Plain:
    """A scalar without quotes: what it means where any value may stand, and how it was spelled."""

    value: Any
    text: str


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # without YAML's own: ours are added below

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._composed = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._composed += 1
        if self._composed > 2 * _MAX_VALUES:  # a key and its value
            raise _too_many()
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a word", problem_mark=key.start_mark)
            if key.tag == _PREFIX + "merge":
                continue
            # Keys are text, whatever they look like. YAML 1.1 would make `on:` the key True, and keep the last of two
            # equal keys.
            key.tag = _PREFIX + "str"
            line = key.start_mark.line + 1
            if key.value in seen:
                problem = f"{shown(key.value)} is written twice in the same map (first in line {seen[key.value]})"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen[key.value] = line
        return node


class _Dumper(yaml.SafeDumper):
    """Writes YAML, quoting every string that YAML 1.1 or our own rules would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True  # values are written out in full: `&id001` means nothing to a reader

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # In other styles PyYAML writes Unicode's line breaks as they are, and reads them back as spaces or `\n`.
        return self.represent_scalar(_PREFIX + "str", text, style='"' if _BREAKS.search(text) else None)


_Dumper.add_representer(str, _Dumper.represent_text)


def _meaning(kind: str, text: str) -> Any:
    digits = text.replace("_", "")
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() in ("yes", "true", "on")
    if kind == "int":
        if len(digits) > _MAX_DIGITS:
            raise ValueError(f"a number of more than {_MAX_DIGITS} digits")
        # Not base 0: a leading zero ("010") is a spelling of ten, not octal.
        return int(digits, {"x": 16, "o": 8, "b": 2}.get(digits[1:2], 10))
    return float(re.sub(r"\.(?=inf|nan)", "", digits.lower()))


def _construct(kind: str, loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Plain:
    text = str(loader.construct_scalar(node))
    try:
        return Plain(_meaning(kind, text), text)
    except ValueError as error:  # reached with an explicit tag, such as `!!int x`
        raise yaml.MarkedYAMLError(problem=f"{shown(text)}: {error}", problem_mark=node.start_mark) from None


for _kind, _pattern in _RESOLVERS.items():
    _whole = re.compile(f"(?:{_pattern.pattern})$")
    _Loader.add_implicit_resolver(_PREFIX + _kind, _whole, None)
    if _kind in ("int", "float"):
        _Dumper.add_implicit_resolver(_PREFIX + _kind, _whole, None)
    if _kind != "merge":
        _Loader.add_constructor(_PREFIX + _kind, partial(_construct, _kind))


def parse(text: str) -> tuple[Any, dict[Loc, int]]:
    """Return the tree of a YAML document, and the line of every value in it. Raises `yaml.YAMLError`."""
    if len(text) > _MAX_CHARS:
        raise yaml.YAMLError(f"has more than {_MAX_CHARS:,} characters")
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        # Checked before anything is built: building merges of merges takes time for every value that they amount to.
        if _count(node, {}) > _MAX_VALUES:
            raise _too_many()
        # Deep, so that a map that contains itself is an error here instead of endless recursion later.
        loader.deep_construct = True
        tree = loader.construct_document(node)
        lines: dict[Loc, int] = {}
        _collect_lines(node, (), lines)
        return tree, lines
    except RecursionError:
        raise yaml.YAMLError("is nested too deeply") from None
    finally:
        loader.dispose()


def _too_many() -> yaml.YAMLError:
    return yaml.YAMLError(f"has more than {_MAX_VALUES:,} values, with those that aliases repeat")


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """Return how many values a node stands for, with those that aliases and merges repeat.

    `known`: these numbers for the nodes counted so far.
    """
    if isinstance(node, yaml.ScalarNode):
        return 1
    found = known.get(id(node))
    if found is None:
        known[id(node)] = -1
        inner = (value for _, value in node.value) if isinstance(node, yaml.MappingNode) else node.value
        found = known[id(node)] = 1 + sum(_count(each, known) for each in inner)
    if found < 0:
        problem = "found unconstructable recursive node"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    return found


def _collect_lines(node: yaml.Node, path: Loc, lines: dict[Loc, int]) -> None:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            lines[(*path, key.value)] = key.start_mark.line + 1
            _collect_lines(value, (*path, key.value), lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _collect_lines(value, (*path, str(index)), lines)


def scalar(text: str) -> Plain | str:
    """Read one word of a command line like a plain scalar in a file. It is never a map, a list or a comment."""
    for kind, pattern in _RESOLVERS.items():
        if kind != "merge" and text and pattern.fullmatch(text):
            with suppress(ValueError):  # Python converts no more than 4300 digits; those are text
                return Plain(_meaning(kind, text), text)
    return text


def listed(text: str) -> list[Any] | None:
    """Return the list that a text spells, such as `[a, b]`; None if it spells none, such as `[ab]_proj`."""
    if not (text.startswith("[") and text.endswith("]")):
        return None
    with suppress(yaml.YAMLError):
        found = parse(text)[0]
        return found if isinstance(found, list) else None
    return None


def spelled(tree: Any) -> Any:
    """Return the tree with every `Plain` replaced by its value."""
    if isinstance(tree, Plain):
        return tree.value
    if isinstance(tree, dict):
        return {key: spelled(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [spelled(value) for value in tree]
    return tree


def put_at(tree: dict[str, Any], path: str, value: Any) -> None:
    """Put a value into a tree of sections by its dotted path."""
    *sections, last = path.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[last] = value


def dump(tree: Any) -> str:
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=False)


_IN_WORDS = {
    "expected <block end>": "it is indented otherwise than the lines above that it belongs to",
    "expected '<document start>'": "a second document begins here, and a config is one",
    "found character '\\t'": "it begins with a tab, and YAML is indented with spaces",
    "mapping values are not allowed": "the line above has no colon with a space after it",
    "could not find expected ':'": "a key needs a colon with a space after it",
}
"""What PyYAML says, by how it begins, and what that means."""
_OPEN = {
    "while scanning a quoted scalar": "the text in quotes",
    "while parsing a flow mapping": "the map in braces",
    "while parsing a flow sequence": "the list in brackets",
}
"""What has no end, by what PyYAML was doing."""


def problem_line(error: yaml.YAMLError) -> str:
    """Return a YAML error in one line, with the line number if it has one."""
    mark = getattr(error, "problem_mark", None)
    problem = str(getattr(error, "problem", None) or " ".join(str(error).split()))[:500]  # it may quote the whole file
    context, begun = getattr(error, "context", None), getattr(error, "context_mark", None)
    said = next((said for known, said in _IN_WORDS.items() if problem.startswith(known)), None)
    if said is None and begun is not None and context in _OPEN:
        said = f"{_OPEN[context]} that begins in line {begun.line + 1} has no end"
    problem = problem if said is None else f"{said} ({problem})"
    return f"line {mark.line + 1}: {problem}" if mark is not None else problem
