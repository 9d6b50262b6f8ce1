"""Model directories whose weights are stored quantized, as those of gpt-oss (MXFP4) and DeepSeek V3 (FP8 in blocks)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models import save_checkpoint

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}

# What the makers of FP8 models leave in 16 bits.
_WHOLE = re.compile(r"embed|norm|lm_head|mlp\.gate\.|bias")


def save_mxfp4(directory: Path, seed: int = 7, **changes: Any) -> Path:
    """A tiny gpt-oss whose experts are drawn in MXFP4, every code among them; the rest is in bf16."""
    save_checkpoint(directory, "gpt_oss", **changes)
    stored = load_file(directory / "model.safetensors")
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, tensor in stored.items():
        if not key.endswith(("gate_up_proj", "down_proj")):
            tensors[key] = tensor.bfloat16()
            continue
        experts, inputs, outputs = tensor.shape
        tensors[f"{key}_blocks"] = torch.randint(
            256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=draw
        )
        tensors[f"{key}_scales"] = torch.randint(
            118, 124, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=draw
        )
    assert len(tensors) > len(stored)
    write(directory, tensors, MXFP4)
    return directory


def save_fp8(directory: Path, model_type: str, block: Sequence[int] | None, **changes: Any) -> Path:
    """A tiny network whose linear layers are quantized, `block` numbers with a scale; the rest is in bf16."""
    save_checkpoint(directory, model_type, **changes)
    stored = load_file(directory / "model.safetensors")
    tensors = {}
    for key, tensor in stored.items():
        if tensor.ndim < 2 or _WHOLE.search(key):
            tensors[key] = tensor if "e_score_correction" in key else tensor.bfloat16()
            continue
        tensors[key], tensors[f"{key}_scale_inv"] = quantized(tensor, block)
    assert len(tensors) > len(stored)
    write(directory, tensors, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block})
    return directory


def quantized(tensor: torch.Tensor, block: Sequence[int] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in FP8, and the scales of its blocks; of None it is one without dimensions."""
    rows, columns = block or tensor.shape
    height, width = -(-tensor.shape[0] // rows), -(-tensor.shape[1] // columns)
    scales = torch.empty(height, width)
    for i in range(height):
        for j in range(width):
            part = tensor[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            scales[i, j] = part.abs().max() / 448
    numbers = (tensor / spread(scales, tensor.shape, (rows, columns))).to(torch.float8_e4m3fn)
    return numbers, scales if block else scales.reshape(())


def spread(scales: torch.Tensor, shape: Sequence[int], block: Sequence[int]) -> torch.Tensor:
    """The scale of every number of a matrix."""
    return scales[torch.arange(shape[0])[:, None] // block[0], torch.arange(shape[1])[None] // block[1]]


def write(directory: Path, tensors: Mapping[str, torch.Tensor], quantization: Mapping[str, Any]) -> None:
    """Put these weights into the model's directory: in two files, so that scales are in the other one than numbers."""
    (directory / "model.safetensors").unlink(missing_ok=True)
    file_of = {key: f"model-0000{1 + key.endswith(('_scales', '_scale_inv'))}-of-00002.safetensors" for key in tensors}
    for name in sorted(set(file_of.values())):
        parts = {key: tensor for key, tensor in tensors.items() if file_of[key] == name}
        save_file(parts, directory / name, metadata={"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    config = json.loads((directory / "config.json").read_text())
    config |= {"quantization_config": dict(quantization), "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))


def by_transformers(directory: Path) -> Any:
    """The network in bf16, dequantized by transformers."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

    method = json.loads((directory / "config.json").read_text())["quantization_config"]["quant_method"]
    chosen = {"mxfp4": Mxfp4Config, "fp8": FineGrainedFP8Config}[method](dequantize=True)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, quantization_config=chosen)
