"""Bounds on what the files of a stranger's model may ask for, checked before a library acts on them.

transformers builds what a config says: with `num_hidden_layers: 10000000` that never ends, and with `num_labels:
1000000000` it fills the memory. The bounds are far above every model there is: they refuse damage and malice only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from raytune_fsdp.base.errors import ModelError, first_line
from raytune_fsdp.base.untrusted import (
    GIT_LFS,
    IS_POINTER,
    MIB,
    UnsoundError,
    check_size,
    check_values,
    open_regular,
    parse_json,
    read_file,
    read_json_object,
    shown,
)
from raytune_fsdp.model.directory.known_files import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_CONFIG_FILE,
    check_links,
)

if TYPE_CHECKING:  # importing it imports the hub's library, which reads then where the hub and its cache are
    from transformers import PretrainedConfig

_CONFIG_BYTES = 8 * MIB
"""A config.json has 1 to 10 kB; that of a classifier, with the names of 20,000 classes, 1 MB."""
_TOKENIZER_BYTES = 128 * MIB
"""A tokenizer.json has up to 35 MB; a vocabulary of a million tokens would take 100."""
_TOKENIZER_VALUES = 4_000_000
"""The 35 MB of Gemma's tokenizer.json are 2 million values."""
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.*.json", TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE, "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja", "processor_config.json",
    GENERATION_CONFIG_FILE, "bpe.codes", "byte_maps.json", "dict.txt", "emoji.json", "entity_vocab.json", "merges.txt",
    "normalizer.json", "*.model", "*.spm", "*.tiktoken", "prophetnet.tokenizer", "target_vocab.json", "tekken.json",
    "vocab*.json", "vocab.txt", "word_pronunciation.json", "word_shape.json",
)  # fmt: skip
"""Files that a tokenizer and generation settings are read from, with vocabularies of all of transformers' classes."""
# The libraries that read these have limits of depth; a generation config that is broken is ignored.
_NOT_PARSED = ("tokenizer.", GENERATION_CONFIG_FILE)
_MOST_STOPS, _STOP_CHARACTERS, _MOST_BEAMS = 64, 256, 256
"""Bounds of a generation config. transformers compares every token with every place of every stop string."""

MOST_TOKENS = 1 << 24  # XLM-V has a vocabulary of a million
_LONG_NUMBER = re.compile(rb"[:\s]\d{8,}")
_MOST_LAYERS = 1024  # Llama 3.1 405B has 126
_MOST = {
    "vocab_size": MOST_TOKENS,
    "hidden_size": 1 << 20,  # 18,432 in PaLM
    "intermediate_size": 1 << 22,
    "num_attention_heads": 1 << 16,
    "num_labels": 1 << 18,  # transformers makes a name for each
}
_LAYERS = re.compile(r"(n|num|number_of)_(\w+_)?(layers?|blocks)|(enc|dec)oder_layers")
_SAME = {
    "n_embd": "hidden_size", "d_model": "hidden_size", "dim": "hidden_size", "n_head": "num_attention_heads",
    "n_heads": "num_attention_heads", "num_heads": "num_attention_heads", "n_inner": "intermediate_size",
    "ffn_dim": "intermediate_size", "d_ff": "intermediate_size",
}  # fmt: skip

_MOST_TENSORS = 200_000
"""Tensors of a network. The 384 experts in each of Kimi K2's 60 layers are 70,000, each in a module of its own."""
HEADER_BYTES = 100 << 20
"""Largest header of a safetensors file, the library's own limit."""
_BUFFER_BYTES = 1 << 30
"""Bytes of a network's buffers. The masks of a GPT-J, its largest buffers, are 117 MB."""


def read_config(directory: Path) -> dict[str, Any]:
    """Read a `config.json`; refuse one that asks for more than any model needs."""
    file = directory / CONFIG_FILE
    try:
        values = read_json_object(file, limit=_CONFIG_BYTES, links=True)
        if not isinstance(values.get("model_type", ""), str):
            raise UnsoundError(f"has the model_type {shown(values['model_type'])}")
        _check_counts(values)
    except UnsoundError as error:
        raise ModelError(f"{file} {error}, so it is not the config of a model: download it again") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read ({first_line(error)}): download it again") from error
    return values


def _check_counts(values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict):  # the language model's config in a model that also sees or hears
            _check_counts(value)
        most = _MOST_LAYERS if _LAYERS.fullmatch(key) else _MOST.get(_SAME.get(key, key))
        if most is None or not isinstance(value, int | float):
            continue
        if value > most:
            raise UnsoundError(f"has {key}={shown(value)}, more than the {most} that any model has")
        if value < 0:
            raise UnsoundError(f"has {key}={shown(value)}, and no model has fewer than none")


def check_tokenizer_files(directory: Path) -> tuple[dict[str, Any], str]:
    """Refuse a tokenizer's file that is not a regular file, or larger than any tokenizer's.

    Return the contents of those that are parsed here, and a hash of all.
    """
    found: dict[str, Any] = {}
    digest = hashlib.blake2b(digest_size=20)
    if (directory / CONFIG_FILE).exists():
        found[CONFIG_FILE] = config = read_config(directory)  # it may name the tokenizer's class
        said = [config.get(name) for name in ("model_type", "model_name", "tokenizer_class")]
        digest.update(json.dumps(said).encode())
    for file in _tokenizer_files(directory):
        try:
            check_links(file)
            content = read_file(file, limit=_TOKENIZER_BYTES, links=True)
            digest.update(f"{file.name} {len(content)} ".encode())
            digest.update(content)
            if file.suffix != ".json":
                continue
            if file.name.startswith(_NOT_PARSED):
                check_values(content, _TOKENIZER_VALUES)
                (_check_generation if file.name == GENERATION_CONFIG_FILE else _check_ids)(content)
            else:
                found[file.name] = parse_json(content, doubles=True, constants=True)
                _check_most(_ids_in(found[file.name]))
        except FileNotFoundError:
            continue
        except UnsoundError as error:
            raise ModelError(f"{file} {error}, so it is not that of a tokenizer: download it again") from error
        except (OSError, ValueError) as error:
            raise ModelError(f"{file} cannot be read ({first_line(error)}): download it again") from error
    return found, digest.hexdigest()


def _tokenizer_files(directory: Path) -> list[Path]:
    found = [directory / name for name in _TOKENIZER_FILES if "*" not in name]
    patterns = [name for name in _TOKENIZER_FILES if "*" in name]
    found += [file for each in patterns for file in sorted(directory.glob(each)) if not file.is_dir()]
    return list(dict.fromkeys(found))


def _check_generation(content: bytes) -> None:
    """Refuse settings that would make a model generate for hours. A broken file is ignored."""
    try:
        values = parse_json(content, doubles=True, constants=True)
    except ValueError:
        return
    if not isinstance(values, dict):
        return
    stops = values.get("stop_strings")
    stops = [stops] if isinstance(stops, str) else stops
    if stops is not None and not (
        isinstance(stops, list)
        and len(stops) <= _MOST_STOPS
        and all(isinstance(each, str) and 0 < len(each) <= _STOP_CHARACTERS for each in stops)
    ):
        raise UnsoundError(f"has stop_strings={shown(stops)}, which are not up to {_MOST_STOPS} short texts")
    for name in ("num_beams", "num_return_sequences", "num_beam_groups"):
        if isinstance(values.get(name), int | float) and not 0 <= values[name] <= _MOST_BEAMS:
            raise UnsoundError(f"has {name}={shown(values[name])}, more than the {_MOST_BEAMS} that are of any use")


def _check_ids(content: bytes) -> None:
    """Refuse ids that no vocabulary has: transformers 5.17 makes a list as long as the largest id, 8.6 GB for 2**31."""
    if not _LONG_NUMBER.search(content):  # 250,000 tokens take 0.09 s to search, 0.19 s to parse
        return
    values = parse_json(content, doubles=True, constants=True, values=_TOKENIZER_VALUES, depth=None)
    model = values.get("model") if isinstance(values, dict) else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    added = values.get("added_tokens") if isinstance(values, dict) else None
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    _check_most(ids)


def _ids_in(values: Any) -> list[Any]:
    """Return what may be ids in a file of tokens by name, or in a config: those of its table, and of added tokens."""
    if not isinstance(values, dict):
        return []
    ids = list(values.values()) if all(isinstance(each, int) for each in values.values()) else []
    for name in ("vocab", "entity_vocab"):
        if isinstance(values.get(name), dict):
            ids += values[name].values()
    added = values.get("added_tokens_decoder")
    ids += [int(key) for key in added if key.isdecimal() and key.isascii()] if isinstance(added, dict) else []
    return ids


def _check_most(ids: Iterable[Any]) -> None:
    most = max((each for each in ids if isinstance(each, int)), default=0)
    if most >= MOST_TOKENS:
        raise UnsoundError(f"has a token with the id {shown(most)}, more than any vocabulary has")


@contextmanager
def bounded_building() -> Iterator[None]:
    """Limit a network that is built in this context to `_MOST_TENSORS` tensors."""
    count = 0

    # One of torch's own hooks, called for every parameter of every module.
    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal count
        count += 1
        if count > _MOST_TENSORS:
            raise ModelError(
                f"config.json describes a network of more than {_MOST_TENSORS} tensors, more than any model has: "
                "download it again"
            )

    with register_module_parameter_registration_hook(registered):
        yield


def check_buffers(model: nn.Module) -> None:
    """Refuse a network on the meta device whose buffers would take more memory than any model's."""
    buffers = {name: buffer.nbytes for name, buffer in model.named_buffers()}
    if sum(buffers.values()) > _BUFFER_BYTES:
        largest = max(buffers, key=lambda name: buffers[name])
        raise ModelError(
            f"model: the buffers of this {type(model).__name__} would take {sum(buffers.values()) / 1e9:.1f} GB, the "
            f"largest of them {largest}: correct its config.json, whose sizes no model has"
        )


def check_header(file: Path) -> None:
    """Refuse a safetensors file of more tensors than any model has, before a library makes an entry for each."""
    with os.fdopen(open_regular(file, links=True), "rb") as source:
        begin = source.read(8)
        if begin == GIT_LFS[:8] and begin + source.read(len(GIT_LFS) - 8) == GIT_LFS:
            raise UnsoundError(IS_POINTER)
        length = int.from_bytes(begin, "little")
        check_size(length, HEADER_BYTES)
        check_tensors(source.read(length))


def check_tensors(header: bytes) -> None:
    """Refuse a header of more tensors than any model has."""
    count = header.count(b'"data_offsets"')
    if count > 2 * _MOST_TENSORS:
        raise UnsoundError(f"has a header of {count} tensors, more than any model has")


def check_index(values: Any) -> dict[str, str]:
    """Return the file of every tensor, from the content of a `model.safetensors.index.json`."""
    found = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise UnsoundError("has no weight_map that names a file for each tensor")
    if len(found) > 2 * _MOST_TENSORS:
        raise UnsoundError(f"names {len(found)} tensors, more than any model has")
    return found


# What transformers means when it refuses a model.

NEEDS_CODE = "needs Python code that comes with it (auto_map in config.json or tokenizer_config.json): read that code"
"""Part of a message, followed by the way to trust it."""


def wants_code(error: BaseException) -> bool:
    """Return whether transformers refuses because the user has not allowed code that comes with a model."""
    return isinstance(error, ValueError) and "trust_remote_code=True" in str(error)


def unknown_word(hf_config: PretrainedConfig, error: Exception) -> str | None:
    """Say which field of the config has a word that transformers does not know; None if that is not the reason.

    transformers' message is only that word: `'siluu'`, from a table of activations, of rope types, of kinds of layers.
    """
    from transformers.activations import ACT2FN
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    word = error.args[0] if isinstance(error, KeyError) and error.args else None
    if not isinstance(word, str):
        return None
    for field, value in _words(hf_config.get_text_config().to_dict()):
        if value == word:
            # The words of two tables are known here; the nearest is named, as a word is usually mistyped.
            known = ROPE_INIT_FUNCTIONS if field.endswith("rope_type") else ACT2FN
            near = get_close_matches(word, [str(each) for each in known], n=1)
            return f"{field}={word!r} is not known to the installed transformers" + (
                f"; nearest: {near[0]}" if near else f"; it knows {', '.join(sorted(map(str, known)))}"
            )
    return None


def _words(values: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield all strings in a config, with the fields that hold them."""
    if isinstance(values, str):
        yield path, values
    elif isinstance(values, dict):
        for key, value in values.items():
            yield from _words(value, f"{path}.{key}" if path else str(key))
    elif isinstance(values, list):
        for value in values:
            yield from _words(value, path)
