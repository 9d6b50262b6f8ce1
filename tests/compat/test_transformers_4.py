"""transformers 4.57 computes with an export what we compute: `make compat` gives it an environment of its own.

Servers and converters are built on it, and it ignores what it does not know, without a word.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerBase, Qwen2Tokenizer

from raytune_fsdp.model.export.write import export
from raytune_fsdp.model.weights.keys import owned_tensors
from tests.distributed.test_export import Tensors
from tests.models import ARCHITECTURES, EXPERTS, architecture, build
from tests.unit.made_tokenizers import chat, demo, metaspace

PYTHON = os.environ.get("RAYTUNE_COMPAT_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="needs the environment of `make compat`")

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.5, 3.0, 3.5]}

_KINDS = ("full_attention", "sliding_attention")

ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 16}}),
    "qwen3": ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": {**YARN, "rope_theta": 1e6, "original_max_position_embeddings": 32}}),
    "gemma3": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            }
        },
    ),
    "mixtral": ("mixtral", {"rope_parameters": {"rope_type": "default", "rope_theta": 2e2}}),
    "gpt_neox": (
        "gpt_neox",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.5}},
    ),
    "phi": ("phi", {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4, "partial_rotary_factor": 0.5}}),
    "stablelm": (
        "stablelm",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4, "partial_rotary_factor": 0.5}},
    ),
    "olmo3": ("olmo3", {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 2e2} for kind in _KINDS}}),
    "olmo3-yarn": (
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 2e2, "original_max_position_embeddings": 32},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e2},
            }
        },
    ),
    "phi3": (
        "phi3",
        {
            "rope_parameters": {**LONG, "rope_theta": 2e4, "partial_rotary_factor": 1.0},
            "original_max_position_embeddings": 32,
        },
    ),
    "glm4": ("glm4", {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.5}}),
    "gpt_oss": (
        "gpt_oss",
        {"rope_parameters": {**YARN, "truncate": False, "rope_theta": 1.5e5, "original_max_position_embeddings": 32}},
    ),
    "gpt_oss-plain": ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 1.5e5}}),
}
"""Exports whose rotary embedding is not the default, where default means what 4.57 takes if it reads nothing."""
CASES = {**{f"plain-{name}": (name, {}) for name in (*ARCHITECTURES, *EXPERTS)}, **ROPES}
TEXTS = ("What does FSDP shard?", "  two  spaces", "<s>", "héllo\n\nwörld", "I'm 12345 years", "<|im_start|>user")


def tokenizers() -> dict[str, PreTrainedTokenizerBase]:
    """One for some of the exports; the others have the demo's."""
    words = json.loads(metaspace("prepend").backend_tokenizer.to_str())["model"]
    words["merges"] = [tuple(pair) for pair in words["merges"]]
    extra = chat()
    extra.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    extra.chat_template = "{% for m in messages %}<|im_start|>{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    return {
        "llama3": extra,
        "qwen3": metaspace("prepend"),
        "mixtral": metaspace("always"),
        "gemma3": metaspace("first"),
        # Of an architecture's own class, which adds a first token here; 4.57 has a class of that name, too.
        "plain-llama": LlamaTokenizer(vocab=words["vocab"], merges=words["merges"], add_bos_token=True),
        "plain-mistral": LlamaTokenizer(vocab=words["vocab"], merges=words["merges"]),
        "plain-qwen3_moe": Qwen2Tokenizer(vocab=words["vocab"], merges=words["merges"]),
    }


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the other environment says of every export, with what is expected of it."""
    home = tmp_path_factory.mktemp("compat")
    own = tokenizers()
    expected = {}
    for name, (model_type, changes) in CASES.items():
        model = build(model_type, **changes)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if any(part in key for part in ("q_proj", "k_proj", "query_key_value", "qkv_proj")):
                    parameter.normal_(0, 1)  # so that attention is far from uniform, and the rotation decides it
        files = home / "files" / name
        model.config.save_pretrained(files)
        tokenizer = own.get(name, demo())
        tokenizer.save_pretrained(files)
        state = Tensors({key: tensor.detach() for key, tensor in owned_tensors(model).items()})
        export(state, files, home / name, dtype="fp32", max_file_bytes=10**9)
        ids = torch.arange(48).view(1, 48) * 7 % architecture(model_type)["vocab_size"]
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
        save_file({"ids": ids, "logits": logits.contiguous()}, home / f"{name}.safetensors")
        ours = AutoTokenizer.from_pretrained(home / name)
        texts = {text: tokenizer(text)["input_ids"] for text in TEXTS}
        assert {text: ours(text)["input_ids"] for text in TEXTS} == texts, "our own environment reads it, too"
        (home / f"{name}.json").write_text(json.dumps(texts))
        expected[name] = (type(model).__name__, tokenizer, texts)
    done = subprocess.run(
        [str(PYTHON), Path(__file__).with_name("read_exports.py"), home], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["version"].startswith("4.57.")
    # Kind, what was seen of model and tokenizer, the tokenizer, its tokens.
    return {
        name: (kind, (found[name]["model"], found[name]["tokenizer"]), *rest)
        for name, (kind, *rest) in expected.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_transformers_4_computes_the_same_logits(read: dict[str, Any], name: str) -> None:
    kind, (found, _), _, _ = read[name]
    assert "error" not in found, found
    # Rounding of another order of operations; a wrong theta or a missing scale changes them by more than their size.
    assert found["difference"] < 1e-5, found["difference"]
    assert found["class"] == kind and found["dtype"] == "torch.float32" and not found["keys"]


@pytest.mark.parametrize("name", CASES)
def test_transformers_4_has_the_same_tokens(read: dict[str, Any], name: str) -> None:
    _, (_, found), tokenizer, texts = read[name]
    assert "error" not in found, found
    assert found["tokens"] == texts
    assert found["decoded"] == {text: tokenizer.decode(ids, skip_special_tokens=True) for text, ids in texts.items()}
    assert found["inputs"] == ["attention_mask", "input_ids"], "what the model takes"
    assert found["special"] == sorted(tokenizer.all_special_tokens)
    if tokenizer.chat_template:
        assert found["chat"] == tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
