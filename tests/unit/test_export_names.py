"""An export says what it is in the words of transformers 4 and of 5. `make compat` has transformers 4 read it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, Qwen2Tokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from raytune_fsdp.model.export.older_names import add_older_names, rename_tokenizer
from tests.models import ARCHITECTURES, EXPERTS, PARTICULAR, REARRANGED, ROTATED, architecture
from tests.unit.made_tokenizers import chat, demo, metaspace

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
PLAIN = {"rope_type": "default"}

OLDER: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama3": (
        "llama",
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    ),
    "qwen3": (
        "qwen3",
        {"rope_parameters": {**PLAIN, "rope_theta": 1e6}},
        {"rope_theta": 1e6, "rope_scaling": None},
    ),
    "mixtral": (
        "mixtral",
        {"rope_parameters": {**PLAIN, "rope_theta": 2e2}},
        {"rope_theta": 2e2, "rope_scaling": None},
    ),
    "gemma3": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {**PLAIN, "rope_theta": 1e4},
            }
        },
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "gpt_neox": (
        "gpt_neox",
        {"rope_parameters": {**PLAIN, "rope_theta": 2e4, "partial_rotary_factor": 0.5}},
        {"rotary_emb_base": 2e4, "rotary_pct": 0.5, "rope_scaling": None},
    ),
    "phi": (
        "phi",
        {"rope_parameters": {**PLAIN, "rope_theta": 2e4, "partial_rotary_factor": 0.5}},
        {"rope_theta": 2e4, "partial_rotary_factor": 0.5, "rope_scaling": None},
    ),
    "phi3": (
        "phi3",
        {"rope_parameters": {"rope_type": "longrope", **LONG, "rope_theta": 2e4}},
        {"rope_theta": 2e4, "rope_scaling": {"type": "longrope", **LONG}},
    ),
    "qwen3_moe": ("qwen3_moe", {}, {"num_experts": 6, "num_local_experts": 6}),
}
"""What the config classes of transformers 4.57 read, for a rope that is not their default."""


def written(model_type: str, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """A config, and what its config.json says in an export."""
    values = architecture(model_type, **copy.deepcopy(changes))
    config = CONFIG_MAPPING[values.pop("model_type")](**values)
    content = json.loads(config.to_json_string())
    add_older_names(content, "bfloat16")
    return config, content


@pytest.mark.parametrize("name", OLDER)
def test_a_config_has_the_names_that_transformers_4_reads(name: str) -> None:
    model_type, changes, older = OLDER[name]
    _, content = written(model_type, **changes)
    assert {key: content.get(key, "missing") for key in older} == older
    assert content["torch_dtype"] == content["dtype"] == "bfloat16"
    assert "rope_parameters" in content or model_type == "gpt2"


@pytest.mark.parametrize("name", [*OLDER, *ARCHITECTURES, *EXPERTS, *REARRANGED, *PARTICULAR, *ROTATED])
def test_a_config_is_the_same_to_transformers_5(name: str, tmp_path: Path) -> None:
    """Also to the identity of a run that begins with an export: it names every value of its config."""
    model_type, changes, _ = OLDER.get(name, (name, {}, {}))
    config, content = written(model_type, **changes)
    (tmp_path / "config.json").write_text(json.dumps(content))
    before = config.to_diff_dict()
    again = AutoConfig.from_pretrained(tmp_path, trust_remote_code=False).to_diff_dict()
    if model_type == "phi3":  # `type` beside `rope_type`, and a factor of 1.0 that is also outside
        again["rope_parameters"].pop("type", None)
        assert again.pop("partial_rotary_factor") == 1.0
    assert {**again, "dtype": None} == {**before, "dtype": None}


def test_a_config_without_rope_keeps_its_names() -> None:
    _, content = written("gpt2")
    assert not any("rope" in key for key in content)


TOKENIZERS = {
    "demo": demo, "chat": chat, "prepend": lambda: metaspace("prepend"), "always": lambda: metaspace("always"),
}  # fmt: skip
TEXTS = ("What does FSDP shard?", "  two  spaces", "<s>", "héllo\n\nwörld", "I'm 12345 years", "<|im_start|>user")


@pytest.mark.parametrize("name", [*TOKENIZERS, "own"])
def test_a_tokenizer_is_the_same_under_a_class_that_both_have(tmp_path: Path, name: str) -> None:
    tokenizer: PreTrainedTokenizerBase
    if name == "own":
        model = json.loads(metaspace("prepend").backend_tokenizer.to_str())["model"]
        tokenizer = Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])
    else:
        tokenizer = copy.deepcopy(TOKENIZERS[name]())
        tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|more|>"]})
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(architecture("qwen3")))
    values = json.loads((tmp_path / "tokenizer_config.json").read_text())
    rename_tokenizer(values, tmp_path)
    assert values["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert values["model_input_names"] == ["input_ids", "attention_mask"], "4 would add token_type_ids"
    assert "extra_special_tokens" not in values, "4 takes only a mapping there"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert [again(text)["input_ids"] for text in TEXTS] == [tokenizer(text)["input_ids"] for text in TEXTS]
    assert again.all_special_tokens == tokenizer.all_special_tokens
    assert (again.padding_side, again.model_max_length) == (tokenizer.padding_side, tokenizer.model_max_length)


@pytest.mark.parametrize("kind", ["Unheard", "pipeline", "PythonBackend", None, 7])
def test_a_tokenizer_that_is_not_one_of_these_is_left_alone(tmp_path: Path, kind: object) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    values = {"tokenizer_class": kind, "extra_special_tokens": ["<x>"]}
    rename_tokenizer(values, tmp_path)
    assert values == {"tokenizer_class": kind, "extra_special_tokens": ["<x>"]}
