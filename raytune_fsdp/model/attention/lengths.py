"""Architectures in which a document is computed otherwise where something else is longer than a bound in their config.

The documents of a trial have a few tokens, far below these bounds, so they are read from the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig


def turned_beyond(hf_config: PretrainedConfig) -> int | None:
    """Return up to which length of documents a rotary embedding rotates all of them in one way: longrope takes other
    factors for a whole micro-batch where one is longer. None: at every length."""
    values: Mapping[str, Any] = getattr(hf_config.get_text_config(), "rope_parameters", None) or {}
    every = (values, *(own for own in values.values() if isinstance(own, Mapping)))  # some have one for each sort
    found = [each for each in every if each.get("rope_type") == "longrope"]
    return min((each.get("original_max_position_embeddings") or 0 for each in found), default=None)


def scaled_from(hf_config: PretrainedConfig) -> int | None:
    """Return from which token of a row on queries are scaled by their place in the row, not in the document, as layers
    of Llama 4 without rotary embedding do. None: they are not."""
    text = hf_config.get_text_config()
    if not getattr(text, "attn_temperature_tuning", False) or all(getattr(text, "no_rope_layers", None) or [1]):
        return None
    return getattr(text, "floor_scale", None)
