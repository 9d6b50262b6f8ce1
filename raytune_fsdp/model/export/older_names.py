"""Write exported configs with the names of both transformers 4 and 5.

transformers 5 writes `rope_parameters` and `dtype`, and tokenizer classes that version 4 does not have. 4.57 ignores
what it does not know: an export of a Llama 3 then silently computes with theta 10,000 and without its scaling. Servers
built on version 4 do the same. Each version finds its own names here; version 5 prefers the older names, so both must
say the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from raytune_fsdp.model.directory.known_files import TOKENIZER_FILE

_BASE = {"gpt_neox": "rotary_emb_base", "gpt_neox_japanese": "rotary_emb_base"}
_PART = {"gpt_neox": "rotary_pct", "gpt_neox_japanese": "rotary_pct"}
"""A few architectures' older names of `rope_theta` and `partial_rotary_factor`."""
_OF_LAYERS = {
    "gemma3_text": ("rope_theta", "rope_local_base_freq"),
    "gemma3n_text": ("rope_theta", "rope_local_base_freq"),
    "olmo3": ("rope_theta", "rope_theta"),
    "modernbert-decoder": ("global_rope_theta", "local_rope_theta"),
}
"""Older names of the bases of full and of sliding attention, where they differ. Scaling was that of full attention."""
_FIELDS = {"qwen3_moe": {"num_experts": "num_local_experts"}}
"""Older names of other fields. Of the decoders that both versions have, only this one was renamed."""
_GENERIC_TOKENIZER = "PreTrainedTokenizerFast"
"""The class that in both versions does what tokenizer.json says, and nothing else."""


def add_older_names(config: dict[str, Any], dtype: str) -> None:
    """Complete the content of a config.json, in place; `dtype` is the type of its weights."""
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            _add_rope(part)
            for older, newer in _FIELDS.get(str(part.get("model_type")), {}).items():
                if newer in part:
                    part[older] = part[newer]
    config["dtype"] = config["torch_dtype"] = dtype


def _add_rope(config: dict[str, Any]) -> None:
    rope, model_type = config.get("rope_parameters"), str(config.get("model_type"))
    if not isinstance(rope, dict) or not rope:
        return
    full, sliding = rope.get("full_attention"), rope.get("sliding_attention")
    if isinstance(full, dict) and isinstance(sliding, dict):
        if model_type in _OF_LAYERS:  # transformers 4 does not know the others
            base, local = _OF_LAYERS[model_type]
            config[local] = sliding.get("rope_theta")
            config[base] = full.get("rope_theta")
            config["rope_scaling"] = _scaling(full, model_type)
    elif "rope_theta" in rope:
        config[_BASE.get(model_type, "rope_theta")] = rope["rope_theta"]
        if "partial_rotary_factor" in rope:
            config[_PART.get(model_type, "partial_rotary_factor")] = rope["partial_rotary_factor"]
        config["rope_scaling"] = _scaling(rope, model_type)


def _scaling(rope: dict[str, Any], model_type: str) -> dict[str, Any] | None:
    """Return `rope_scaling`. None is written as null: without the key some architectures scale by default."""
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return None
    if model_type.startswith("phi3"):  # transformers 4 checks that it has these three keys, under these names
        return {"type": kind, **{key: rope[key] for key in ("short_factor", "long_factor") if key in rope}}
    return {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}


def rename_tokenizer(values: dict[str, Any], directory: Path) -> None:
    """Name a tokenizer class that both versions have in the content of a tokenizer_config.json, in place.

    The architecture's own class is not named, even if both versions have it: transformers 4 adds the first token in
    LlamaTokenizer and its like by its own defaults, and version 5 no longer writes where it goes. tokenizer.json does.
    """
    kind = tokenizer_class_from_name(str(values.get("tokenizer_class")))  # looks in transformers only
    if not (directory / TOKENIZER_FILE).is_file():
        return
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedTokenizerFast)):
        return
    own: Any = kind
    # What the class decided by itself. The generic class of transformers 4 adds token_type_ids, which models refuse.
    values.setdefault("model_input_names", list(own.model_input_names))
    values.setdefault("padding_side", own.padding_side)
    values.setdefault("clean_up_tokenization_spaces", False)
    values["tokenizer_class"] = _GENERIC_TOKENIZER
    if isinstance(values.get("extra_special_tokens"), list):  # transformers 4 takes only a mapping there
        values["additional_special_tokens"] = values.pop("extra_special_tokens")
