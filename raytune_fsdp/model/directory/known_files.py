"""Which files of a model directory are copied along: into an export, to the hub, and next to checkpoints elsewhere.

It is a list, not "whatever is there": a run directory may hold what its owner put there, and one from a stranger may
hold links to files of this machine.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from raytune_fsdp.base.errors import ModelError
from raytune_fsdp.base.untrusted import MIB, read_file, read_json, reason, shown

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
ADAPTER_CONFIG_FILE = "adapter_config.json"
CARD_FILE = "README.md"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"

SEEING_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files that say how images and sounds become tensors. A run does not use them."""

_KNOWN = (
    CONFIG_FILE, GENERATION_CONFIG_FILE,
    TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE, "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "dict.txt", "bpe.codes", "tekken.json", "emoji.json",
    "tokenizer.model", "tiktoken.model", "spiece.model", "spm.model", "sentencepiece.model", "sentencepiece.bpe.model",
    "*.tiktoken",
    "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja",
    *SEEING_FILES,
    CARD_FILE, "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
"""Files that are copied besides weights and, if the user trusts it, code. The vocabularies are those of transformers'
tokenizers."""
_TEMPLATES = "additional_chat_templates"
_WEIGHTS = re.compile(
    r"adapter_model\.safetensors|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
)
_HASH = re.compile(r"[0-9a-f]{40,64}")
_MODULE = re.compile(r"\w+")
_BESIDE = re.compile(r"^\s*from\s+\.(\w+)\s+import|^\s*from\s+\.\s+import\s+([\w, ]+)", re.MULTILINE)
_MOST_LINKS = 40
"""As many as Linux follows: links may lead in a circle."""
_MAX_BYTES = 64 * MIB
"""Largest JSON or Python file that is read here."""


def is_known(name: str) -> bool:
    """Return whether a file of this name, relative to the model directory, is copied. `*` does not match a slash."""
    return any(fnmatchcase(name, pattern) and name.count("/") == pattern.count("/") for pattern in _KNOWN)


def is_weights(name: str) -> bool:
    """Return whether an export gives this name to weights or to their index."""
    return _WEIGHTS.fullmatch(name) is not None


def travelling(directory: Path, *, code: bool) -> list[str]:
    """Return the known files of a model directory; with `code`, also the Python files that its configs name.

    Raise ModelError if one of them is a link, or anything else but a file: what it leads to is not the model's.
    """
    names = [name for name in _names(directory) if is_known(name)]
    names += code_files(directory) if code else []
    for name in names:
        _check_plain(directory / name)
    return names


def _names(directory: Path) -> Iterator[str]:
    for path in sorted(directory.iterdir()):
        if path.name != _TEMPLATES:
            yield path.name
        elif path.is_symlink() or not path.is_dir():
            raise ModelError(f"{path} is not a directory of its own: put the chat templates there, or remove it")
        else:
            yield from (f"{_TEMPLATES}/{each.name}" for each in sorted(path.iterdir()))


def _check_plain(path: Path) -> None:
    mode = path.lstat().st_mode
    if not stat.S_ISREG(mode):
        kind = "a link, which is not followed" if stat.S_ISLNK(mode) else "not a file"
        raise ModelError(f"{path} is {kind}: put the file itself there, or remove it")


def check_links(file: Path) -> None:
    """Refuse a link to an arbitrary file of this machine.

    The hub's cache links to files named by their hash; people link to a file of the same name elsewhere, or to another
    one in the same directory.
    """
    place, followed = file, 0
    while place.is_symlink():
        followed += 1
        if followed > _MOST_LINKS:
            raise ModelError(f"{file} is a link that leads to no file: put the file itself there, or remove it")
        parent = os.path.realpath(place.parent)
        target = Path(os.path.normpath(os.path.join(parent, os.readlink(place))))
        is_cached = target.parent.name == "blobs" and _HASH.fullmatch(target.name)
        if target.name != place.name and str(target.parent) != parent and not is_cached:
            raise ModelError(
                f"{file} is a link to {shown(str(target))}, a file of another name in another place, which may be no "
                "part of the model: put the file itself there"
            )
        place = target


def code_files(directory: Path, *, links: bool = False) -> list[str]:
    """Return the Python files that the configs name under `auto_map`, and those that these import from here.

    `links`: for a model that is read and not copied, whose files may be links as in the hub's cache.
    """
    check = check_links if links else _check_plain
    found: list[str] = []
    asked = [reference.partition(".")[0] for reference in _references(directory, links=links)]
    while asked:
        module = asked.pop(0)
        name = f"{module}.py"
        # The text is a config's: only a plain name can be a file of this directory. `owner/repository--…` is on the
        # hub.
        if not _MODULE.fullmatch(module) or name in found or not (directory / name).exists():
            continue
        check(directory / name)
        found.append(name)
        for one, several in _BESIDE.findall(_text(directory / name, links=links)):
            asked += [one] if one else [each.split()[0] for each in several.split(",") if each.strip()]
    return found


def _references(directory: Path, *, links: bool) -> Iterator[str]:
    for file in (CONFIG_FILE, TOKENIZER_CONFIG_FILE):
        if (directory / file).exists():
            auto_map = read_object(directory / file, links=links).get("auto_map")
            values = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
            for value in values:
                yield from (each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str))


def read_object(path: Path, *, links: bool = False) -> dict[str, Any]:
    """Read the object in a JSON file of a model directory or export. Raise ModelError if it has none, or is a link."""
    try:
        values = read_json(path, limit=_MAX_BYTES, links=links)
    except ValueError as error:
        raise ModelError(f"{path} is not JSON ({reason(error)}): restore it, or download it again") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} is not a JSON object but {type(values).__name__}: restore it, or download it again")
    return values


def _text(path: Path, *, links: bool) -> str:
    try:
        return read_file(path, limit=_MAX_BYTES, links=links).decode()
    except ValueError as error:
        raise ModelError(f"{path} is not a file of code ({reason(error)}): restore it, or download it again") from error
