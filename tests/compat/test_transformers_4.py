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
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from raytune_fsdp.model.export import export
from raytune_fsdp.model.keys import owned_tensors
from tests.distributed.test_export import Tensors
from tests.models import ARCHITECTURES, EXPERTS, architecture, build
from tests.unit.made_tokenizers import chat, demo, metaspace

PYTHON = os.environ.get("RAYTUNE_COMPAT_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="needs the environment of `make compat`")

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.5, 3.0, 3.5]}

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
    "mixtral": ("mixtral", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "gpt_neox": (
        "gpt_neox",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.5}},
    ),
    "phi": ("phi", {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4, "partial_rotary_factor": 0.5}}),
    "stablelm": (
        "stablelm",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4, "partial_rotary_factor": 0.5}},
    ),
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
    extra = chat()
    extra.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    extra.chat_template = "{% for m in messages %}<|im_start|>{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    return {
        "llama3": extra,
        "qwen3": metaspace("prepend"),
        "mixtral": metaspace("always"),
        "gemma3": metaspace("first"),
    }


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the other environment says of every export, with what is expected of it."""
    home = tmp_path_factory.mktemp("compat")
    own = tokenizers()
    expected = {}
    for name, (model_type, changes) in CASES.items():
        model = build(model_type, **changes)
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
        (home / f"{name}.json").write_text(json.dumps({"texts": texts}))
        expected[name] = (type(model).__name__, tokenizer, texts)
    done = subprocess.run(
        [str(PYTHON), Path(__file__).with_name("read_exports.py"), home], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["version"].startswith("4.57.")
    return {name: (found[name], *expected[name]) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_transformers_4_computes_the_same_logits(read: dict[str, Any], name: str) -> None:
    found, kind, _, _ = read[name]
    assert "error" not in found, found
    # Rounding of another order of operations; a wrong theta or a missing scale changes them by more than their size.
    assert found["difference"] < 1e-5, found["difference"]
    assert found["class"] == kind and found["dtype"] == "torch.float32" and not found["keys"]


@pytest.mark.parametrize("name", CASES)
def test_transformers_4_has_the_same_tokens(read: dict[str, Any], name: str) -> None:
    found, _, tokenizer, texts = read[name]
    assert found["tokens"] == texts
    assert found["decoded"] == {text: tokenizer.decode(ids, skip_special_tokens=True) for text, ids in texts.items()}
    assert found["inputs"] == ["attention_mask", "input_ids"], "what the model takes"
    assert found["special"] == sorted(tokenizer.all_special_tokens)
    if tokenizer.chat_template:
        assert found["chat"] == tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
