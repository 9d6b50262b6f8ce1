"""What transformers means when it refuses a model."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from transformers import PretrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

NEEDS_CODE = "needs Python code that comes with it (auto_map in config.json or tokenizer_config.json): read that code"
"""Part of a message, followed by the way to trust it."""


def wants_code(error: BaseException) -> bool:
    """Whether transformers refuses because the user has not allowed code that comes with a model."""
    return isinstance(error, ValueError) and "trust_remote_code=True" in str(error)


def unknown_word(hf_config: PretrainedConfig, error: Exception) -> str | None:
    """The field of the config that holds the word which transformers looked up in vain; None if that is not the reason.

    Its message is only that word: `'siluu'`, from a table of activations, of rope types, of kinds of layers.
    """
    word = error.args[0] if isinstance(error, KeyError) and error.args else None
    if not isinstance(word, str):
        return None
    for field, value in _words(hf_config.get_text_config().to_dict()):
        if value == word:
            # Of two tables the words are known here; a near one is named, as a word is mostly mistyped.
            known = ROPE_INIT_FUNCTIONS if field.endswith("rope_type") else ACT2FN
            near = get_close_matches(word, [str(each) for each in known], n=1)
            return f"{field}={word!r} is not known to the installed transformers" + (
                f"; nearest: {near[0]}" if near else f"; it knows {', '.join(sorted(map(str, known)))}"
            )
    return None


def _words(values: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """All words in a config, with the fields that hold them."""
    if isinstance(values, str):
        yield path, values
    elif isinstance(values, dict):
        for key, value in values.items():
            yield from _words(value, f"{path}.{key}" if path else str(key))
    elif isinstance(values, list):
        for value in values:
            yield from _words(value, path)
