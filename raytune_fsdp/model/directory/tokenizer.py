"""Load the tokenizer of a model that a stranger may have made, from files of its own directory and no others.

transformers calls the tokenizer's class with whatever `tokenizer_config.json` says, and its classes open the files that
they are given: from `"vocab": "/home/me/.aws/credentials"` they make a vocabulary, which the run's export then has.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tokenizers
import transformers
import xxhash
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from raytune_fsdp.base.errors import ModelError
from raytune_fsdp.base.untrusted import is_file_name, printable, shown
from raytune_fsdp.model.directory.bounds import MOST_TOKENS, check_tokenizer_files
from raytune_fsdp.model.directory.known_files import CONFIG_FILE, SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE
from raytune_fsdp.model.directory.tokenizer_trial import try_tokenizer

_VERSIONS = f"{transformers.__version__}-{tokenizers.__version__}-{sys.version_info.major}.{sys.version_info.minor}-1"
"""Versions that may read the same content in another way; the last is that of the trial (`tokenizer_child.py`)."""
logger = logging.getLogger(__name__)

_TOKENS = re.compile(r".*_tokens?|added_tokens_decoder")
"""Names of arguments that are tokens: they may be any text, even `/etc/passwd`."""
_TABLES = frozenset(("vocab", "merges", "entity_vocab"))
"""Names of arguments that are tables: a text in their place is the name of a file."""
_FILES = re.compile(r"(.*_)?(files?|paths?|dirs?|directory|folder)|\w+_object|init_inputs")
"""Names of arguments that are files, or that JSON cannot hold: an object, and arguments without a name."""
_FILES_OF_TRANSFORMERS = re.compile(
    r"(added_tokens|chat_template|emoji|entity_vocab|gguf|merges|model|monolingual_vocab|normalizer|special_tokens_map|spm"
    r"|src_vocab|target_vocab|tgt_vocab|tokenizer|tokenizer_config|vocab|word_pronunciation|word_shape)_file"
    r"|name_or_path|tokenizer_object|init_inputs"
)
"""Names of files among the arguments of transformers' classes. Others may be meant for the model's own code."""
_NO_FILES = frozenset((
    "auto_map", "backend", "chat_template", "errors", "files_loaded", "id2lang", "lang2id", "langs", "language",
    "language_codes", "model_input_names", "model_type", "never_split", "padding_side", "phonemizer_backend",
    "phonemizer_lang", "processor_class", "raytune_fsdp", "replace_word_delimiter_char", "response_schema",
    "response_template", "slow_tokenizer_class", "src_lang", "subword_tokenizer_type", "tags_dict", "target_lang",
    "task", "tgt_lang", "token_type_ids_pattern", "tokenizer_class", "tokenizer_type", "transformers_version",
    "truncation_side", "truncation_strategy", "word_tokenizer_type", "wordpieces_prefix",
))  # fmt: skip
"""Names of arguments whose text transformers never opens."""
_FAST_FILES = "fast_tokenizer_files"
"""An argument with names of files in the same directory, of which transformers opens one."""
_IN_NO_NAME = re.compile(r"[<>{}\n\0]")
"""Characters of tokens and templates, as in `</think>`; no file that matters has them in its name."""


def tokenizer_in(directory: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a directory. Raise whatever transformers does, and ModelError for what no tokenizer has."""
    values, content = check_tokenizer_files(directory)
    _check_class(directory, values)
    with _without_files(directory, values, trust_remote_code) as place:
        if not trust_remote_code:  # code that is trusted may do what it likes
            try_tokenizer(place, directory, f"{content}-{_VERSIONS}")
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
        for found in (vars(tokenizer), tokenizer.init_kwargs):
            for name, value in found.items():
                if isinstance(value, str) and value.startswith(str(place)):
                    found[name] = str(directory) + value.removeprefix(str(place))
    vocabulary_of(tokenizer)
    template = tokenizer.chat_template
    named = isinstance(template, dict) and all(isinstance(each, str) for each in [*template, *template.values()])
    if template is not None and not isinstance(template, str) and not (template and named):
        raise ModelError(
            f"{directory} has a tokenizer with the chat_template {shown(template)}, which is neither a text nor texts "
            "by name: correct tokenizer_config.json, or download it again"
        )
    return tokenizer


def vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest id plus one, not the number of tokens: ids may have gaps."""
    most = max(tokenizer.get_vocab().values(), default=-1)
    if not 0 <= most < MOST_TOKENS:
        raise ModelError(
            f"{tokenizer.name_or_path} has a tokenizer whose largest id is {most}, which no vocabulary has: "
            "download it again"
        )
    return int(most) + 1


def digest_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of which token each id is: of what token ids mean, not of how texts become ids."""
    return xxhash.xxh3_128_hexdigest(json.dumps(sorted(tokenizer.get_vocab().items())).encode())


def _check_class(directory: Path, values: Mapping[str, Any]) -> None:
    """Refuse a class of transformers that is no tokenizer: it would read weights, or more tokenizers elsewhere."""
    for file in (TOKENIZER_CONFIG_FILE, CONFIG_FILE):
        said = values.get(file)
        name = said.get("tokenizer_class") if isinstance(said, dict) else None
        kind: Any = tokenizer_class_from_name(name) if isinstance(name, str) else None
        is_tokenizer = isinstance(kind, type) and issubclass(kind, PreTrainedTokenizerBase)
        # A class with `_backends` stands for one whose package is missing.
        if not (kind is None or is_tokenizer or hasattr(kind, "_backends")):
            raise ModelError(
                f"{directory / file} has tokenizer_class={shown(name)}, which is no tokenizer: download it again"
            )


@contextmanager
def _without_files(directory: Path, values: Mapping[str, Any], trusted: bool) -> Iterator[Path]:
    """Yield the directory, or, if its configs name files, a copy with the same files and configs that name none."""
    cleaned, left_out = {}, []
    for file in (TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE):
        if isinstance(values.get(file), dict):
            kept, dropped = without_files(values[file], trusted=trusted)
            if dropped:
                cleaned[file] = json.dumps(kept)
                text = ", ".join(printable(name)[:60] for name in dropped[:8])
                text += f" and {len(dropped) - 8} more" if len(dropped) > 8 else ""
                left_out.append(f"{directory / file}: {text}")
    if not cleaned:
        yield directory
        return
    _say("; ".join(left_out))
    with TemporaryDirectory(prefix="raytune-tokenizer-") as folder:
        # The copy has the same path inside the folder, since transformers knows a few models by their name.
        copy = Path(folder, *directory.absolute().parts[1:])
        copy.mkdir(parents=True)
        for each in directory.iterdir():
            if each.name not in cleaned:
                (copy / each.name).symlink_to(each.absolute())
        for file, content in cleaned.items():
            (copy / file).write_text(content, encoding="utf-8")
        yield copy


@cache
def _say(left_out: str) -> None:
    logger.warning("a tokenizer's arguments that name files, or what may be files, are not read (%s)", left_out)


def without_files(values: Mapping[str, Any], *, trusted: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments of a tokenizer's class that name no file, and the names of the others.

    If `trusted`, only transformers' own arguments are files: code that the user trusts may have arguments of its own.
    """
    here = _files_here()
    kept: dict[str, Any] = {}
    dropped: list[str] = []
    for name, value in values.items():
        if _TOKENS.fullmatch(name) or name in _NO_FILES:
            kept[name] = value
        elif name == _FAST_FILES:
            _put(name, value, isinstance(value, list) and all(map(is_file_name, value)), kept, dropped)
        elif name in _TABLES:
            _put(name, value, value is None or isinstance(value, dict | list), kept, dropped)
        elif _is_file(name, trusted):
            _put(name, value, value in (None, [], {}), kept, dropped)  # a number would be a file that is already open
        elif isinstance(value, dict):
            inner = {key: each for key, each in value.items() if not _may_name_file(key, each, here, trusted)}
            kept[name] = inner
            dropped += (f"{name}.{key}" for key in value if key not in inner)
        else:
            _put(name, value, not _may_name_file(name, value, here, trusted), kept, dropped)
    return kept, dropped


def _put(name: str, value: Any, harmless: bool, kept: dict[str, Any], dropped: list[str]) -> None:
    if harmless:
        kept[name] = value
    else:
        dropped.append(name)


def _may_name_file(name: str, value: Any, here: frozenset[str], trusted: bool) -> bool:
    """Return whether an argument that transformers' classes do not have, or another library's, may name a file."""
    if isinstance(value, dict):
        return any(_may_name_file(key, each, here, trusted) for key, each in value.items())
    if isinstance(value, list):
        return any(_may_name_file(name, each, here, trusted) for each in value)
    if not isinstance(value, str) or not value:
        return False
    if _is_file(name, trusted):
        return True
    if trusted or _IN_NO_NAME.search(value):
        return False
    return "/" in value or "\\" in value or not here.isdisjoint(value.split())


def _is_file(name: str, trusted: bool) -> bool:
    return (_FILES_OF_TRANSFORMERS if trusted else _FILES).fullmatch(name) is not None


def _files_here() -> frozenset[str]:
    """Return the files that a word without a slash may name."""
    try:
        with os.scandir() as entries:
            return frozenset(entry.name for entry in entries if not entry.is_dir())
    except OSError:
        return frozenset()
