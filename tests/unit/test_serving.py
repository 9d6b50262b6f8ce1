"""What inference servers look for in a model directory stands in an export, under the names that they load.

vLLM and SGLang take every *.safetensors file that the index names, or all if there is no index, and refuse a name that
their network does not have; llama.cpp's converter does the same. They read the config by the keys of transformers 4.
The names are those of their loaders (vllm/model_executor/models, gguf-py/gguf/tensor_mapping.py).
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from raytune_fsdp.model.export.write import export
from raytune_fsdp.model.weights.keys import owned_tensors
from tests.distributed.test_export import CLASSES, Tensors
from tests.models import TIED, architecture, build
from tests.unit.made_tokenizers import chat

LAYERS = range(2)
ATTENTION = [f"self_attn.{each}_proj" for each in "qkvo"]
GATED = [f"mlp.{each}_proj" for each in ("gate", "up", "down")]
NORMS = ["input_layernorm", "post_attention_layernorm"]
HEAD_NORMS = ["self_attn.q_norm", "self_attn.k_norm"]
BLOCKS: dict[str, list[str]] = {
    "llama": [*ATTENTION, *GATED, *NORMS],
    "qwen3": [*ATTENTION, *GATED, *NORMS, *HEAD_NORMS],
    "gemma3_text": [
        *ATTENTION, *GATED, *NORMS, *HEAD_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ],
    "mixtral": [
        *ATTENTION, *NORMS, "block_sparse_moe.gate",
        *(f"block_sparse_moe.experts.{expert}.w{i}" for expert, i in product(range(5), (1, 2, 3))),
    ],
    "qwen3_moe": [
        *ATTENTION, *NORMS, *HEAD_NORMS, "mlp.gate",
        *(f"mlp.experts.{expert}.{each}_proj" for expert, each in product(range(6), ("gate", "up", "down"))),
    ],
}  # fmt: skip


def wanted(name: str) -> set[str]:
    """The tensors that a server's network of this architecture is filled with."""
    if name == "gpt2":
        parts = ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
        blocks = {f"h.{layer}.{part}.{kind}" for layer, part, kind in product(LAYERS, parts, ("weight", "bias"))}
        return {f"transformer.{each}" for each in {"wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias", *blocks}}
    ends = {"model.embed_tokens.weight", "model.norm.weight"} | ({"lm_head.weight"} if name not in TIED else set())
    return ends | {f"model.layers.{layer}.{part}.weight" for layer, part in product(LAYERS, BLOCKS[name])}


def served(directory: Path) -> dict[str, str]:
    """Each tensor that a server finds, with its type."""
    files = sorted(directory.glob("*.safetensors"))
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        named = set(json.loads(index.read_text())["weight_map"].values())
        assert named == {file.name for file in files}, "a file that the index does not name is left out in silence"
    found: dict[str, str] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            names = list(opened.keys())
            assert not found.keys() & set(names), "loaded twice"
            found |= {name: str(opened.get_tensor(name).dtype) for name in names}
    return found


@pytest.mark.parametrize("max_file_bytes", [20_000, 10**9])
@pytest.mark.parametrize("name", CLASSES)
def test_servers_find_what_they_load(name: str, max_file_bytes: int, tmp_path: Path) -> None:
    model = build(name)
    files = tmp_path / "files"
    model.config.architectures = [type(model).__name__]  # as a run notes it
    model.config.save_pretrained(files)
    tokenizer = chat()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(files)
    state = Tensors({key: tensor.detach() for key, tensor in owned_tensors(model).items()})
    directory = tmp_path / "export"
    export(state, files, directory, dtype="bf16", max_file_bytes=max_file_bytes)

    found = served(directory)
    assert found.keys() == wanted(name)
    assert set(found.values()) == {"torch.bfloat16"}
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == [CLASSES[name]] and config["model_type"] == name
    assert config["torch_dtype"] == "bfloat16", "servers compute in the type of this key"
    assert config["vocab_size"] == architecture(name)["vocab_size"]
    assert config.get("tie_word_embeddings", True) == (name in TIED), "else a head is missed, or one is left over"
    if name != "gpt2":
        assert isinstance(config["rope_theta"], (int, float)), "without this key it is taken to be 10000"
        assert config["num_key_value_heads"] == model.config.num_key_value_heads
    assert Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab_size() > 0
    described = json.loads((directory / "tokenizer_config.json").read_text())
    assert described["tokenizer_class"] == "PreTrainedTokenizerFast"
    template = described.get("chat_template") or (directory / "chat_template.jinja").read_text()
    assert template == tokenizer.chat_template
    assert not list(directory.glob("*.bin")) + list(directory.glob("*.pt"))
