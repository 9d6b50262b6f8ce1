"""Read from config.json how a model's weights are stored in fewer bits than they are computed in. Reads no weights.

Two formats are read, since their bits are public and exact: MXFP4 (gpt-oss), where 32 numbers share a scale, and FP8
where groups of rows and columns share one (DeepSeek V3, Qwen3-FP8). Other formats need the library that made them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from raytune_fsdp.base.errors import ModelError
from raytune_fsdp.base.untrusted import shown
from raytune_fsdp.model.directory.bounds import read_config
from raytune_fsdp.model.directory.known_files import CONFIG_FILE

if TYPE_CHECKING:  # importing it takes a second, and what reads the names of files is to be light
    from transformers import PretrainedConfig

_KEY = "quantization_config"
_SUFFIXES = {"mxfp4": ("_blocks", "_scales"), "fp8": ("", "_scale_inv")}
"""What follows the name of a tensor in the key of its numbers and in the key of their scales."""
_OF_INPUTS = "activation_scale"
"""The scale of what is multiplied with an FP8 weight: used only where products are computed in 8 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A tensor that is stored under two keys."""

    numbers: str
    scales: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """A format of quantized weights. Picklable."""

    method: Literal["mxfp4", "fp8"]
    block: tuple[int, int] | None = None
    """How many rows and columns of FP8 weights share a scale; None: a whole matrix shares one."""

    def tensors(self, keys: Collection[str]) -> dict[str, Packed | None]:
        """Return the tensors that are stored under these keys; None: the tensor is stored as it is.

        A tensor with scales is quantized, whatever config.json says. Either key of a tensor may be missing.
        """
        of_numbers, of_scales = _SUFFIXES[self.method]
        found: dict[str, Packed | None] = {}
        for key in keys:
            if self.method == "fp8" and key.endswith(_OF_INPUTS):
                continue
            if key.endswith(of_scales):
                name = key.removesuffix(of_scales)
                found[name] = Packed(numbers=name + of_numbers, scales=key)
            elif not of_numbers or not key.endswith(of_numbers):
                found.setdefault(key, None)
            else:
                name = key.removesuffix(of_numbers)
                found[name] = Packed(numbers=key, scales=name + of_scales)
        return found


def read_quantization(directory: Path) -> Quantization | None:
    """Return how the weights in a model's directory are quantized; None if they are not."""
    there = (directory / CONFIG_FILE).is_file()
    return quantization_of(read_config(directory), str(directory)) if there else None


def quantization_of(values: Mapping[str, Any], what: str) -> Quantization | None:
    """Return how weights are quantized, by the content of a config.json; None if they are not.

    `what` begins the error if they cannot be read here.
    """
    text = values.get("text_config")  # the language model's config in a model that also sees or hears
    found = values.get(_KEY) or (text.get(_KEY) if isinstance(text, dict) else None)
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else None
    if method == "mxfp4":
        return Quantization(method="mxfp4")
    if method != "fp8" or found.get("expert_dtype", "fp8") != "fp8":
        kind = "fp8 with experts in fp4" if method == "fp8" else shown(method or found).strip("'")
        raise ModelError(
            f"{what}: its weights are quantized ({kind}), and only weights in mxfp4 and fp8 are dequantized while they "
            "are loaded: name the model's 16-bit original, or convert it once with transformers (from_pretrained "
            "dequantizes many formats, save_pretrained writes the result)"
        )
    group = found.get("weight_block_size", [128, 128])  # transformers' default
    if group is None:
        return Quantization(method="fp8")
    sizes = tuple(group) if isinstance(group, list | tuple) else ()
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise ModelError(
            f"{what}: {_KEY}.weight_block_size={shown(group)} in its config.json must be two positive numbers, or null "
            "for one scale a matrix: download the model again"
        )
    return Quantization(method="fp8", block=(sizes[0], sizes[1]))


def make_plain(hf_config: PretrainedConfig, *, quantized: bool = False) -> None:
    """Take flash attention out of a config, and quantization unless the network's weights are still `quantized`.

    transformers builds no network with flash attention where there is no GPU, and `model.attention` says which
    attention a run has. Weights that are no longer quantized are not so when they are saved, either.
    """
    for each in (hf_config, hf_config.get_text_config()):
        if hasattr(each, _KEY) and not quantized:
            delattr(each, _KEY)
        if str(each._attn_implementation).startswith("flash_attention"):
            each._attn_implementation = None
