"""Find the hidden matrices among a network's weights, and split tensors that are made of several matrices."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config import OptimConfig
from raytune_fsdp.model.layers import layers_of

Parts = Callable[[torch.Tensor], Sequence[torch.Tensor]]
"""Splits a whole matrix into views of the matrices that it is made of. A view of three dimensions is one matrix of all
its rows."""

_ROUTER = re.compile(r"(^|\.)(gate|router|shared_expert_gate)(\.|$)")
_FUSED = ("c_attn", "qkv_proj", "Wqkv", "query_key_value")
_GROUPED = "query_key_value"


def hidden_matrices(model: PreTrainedModel) -> dict[str, Parts]:
    """Return the matrices inside the layers by name: weights of linear layers, and of experts (three dimensions).

    Embeddings, head and routers are left out: their rows stand for tokens and experts, and rightly have very different
    sizes.
    """
    inside = {id(p) for layer in layers_of(model) for p in layer.parameters()}
    found: dict[str, Parts] = {}
    for prefix, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{own}"
            if id(parameter) not in inside or not parameter.requires_grad or _ROUTER.search(prefix):
                continue
            linear = isinstance(module, nn.Linear | Conv1D) and parameter.ndim == 2 and min(parameter.shape) > 1
            experts = parameter.ndim == 3 and "experts" in prefix
            if linear or experts:
                last = own if experts else prefix.rsplit(".", 1)[-1]
                # Conv1D stores a matrix input first; so do some networks' experts, which their sizes show.
                axis = 1 if isinstance(module, Conv1D) else 0
                adapter = _adapter_of_experts(model, prefix)
                found[name] = adapter or _parts(last, axis, parameter.shape[-2:], model)
    return found


def _adapter_of_experts(model: PreTrainedModel, prefix: str) -> Parts | None:
    """Return how to split an adapter of experts; None if it is another weight.

    PEFT keeps the adapters of all experts in one pair: A has their rows one after the other, B their columns in turn.
    """
    wrapper, found, rest = prefix.rpartition(".lora_")
    count = getattr(model.get_submodule(wrapper), "num_experts", 1) if found else 1
    if count == 1:
        return None
    return partial(_pieces, 0, (1,) * count, 1) if rest.startswith("A") else partial(_in_turn, count)


def _in_turn(count: int, matrix: torch.Tensor) -> Sequence[torch.Tensor]:
    return [matrix[:, each::count] for each in range(count)]


def _parts(name: str, axis: int, shape: torch.Size, model: PreTrainedModel) -> Parts:
    """Return how to split a matrix that computes several things: queries, keys, values; or gates and what they gate."""
    config = model.config.get_text_config()
    if name == "gate_up_proj":
        inner = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None)
        sizes = {2 * inner} if inner else set()
        sizes |= {2 * config.intermediate_size} if getattr(config, "intermediate_size", None) else set()
        axis = 0 if shape[0] in sizes else 1
        if shape[axis] not in sizes:
            return _whole
        return partial(_every_second, axis) if "gpt_oss" in config.model_type else partial(_pieces, axis, (1, 1), 1)
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if name not in _FUSED or not isinstance(heads, int) or not isinstance(hidden, int):
        return _whole
    kept = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or heads
    width = getattr(config, "head_dim", None) or hidden // heads
    # A config may have a number of key heads, or one head for all, that its network does not use: the rows tell.
    for each in (kept, heads, 1):
        if shape[axis] == (heads + 2 * each) * width:
            # GPT-NeoX, Bloom, Falcon: for each group of heads its queries, its key, its value.
            grouped = (heads // each, 1, 1), each
            return partial(_pieces, axis, *(grouped if name == _GROUPED else ((heads, each, each), 1)))
    return _whole


def check_matrices(network: PreTrainedModel, config: OptimConfig) -> None:
    """Refuse Muon if it would update nothing. The network may be on the meta device."""
    if config.optimizer.type == "muon" and not hidden_matrices(network):
        raise ConfigError(
            "optim.optimizer.type=muon: no matrix inside the layers is trained (vectors, embeddings and adapters of "
            "rank 1 are none), so there is nothing for muon to update: set optim.optimizer.type=adamw"
        )


def _whole(matrix: torch.Tensor) -> Sequence[torch.Tensor]:
    return [matrix]


def _every_second(axis: int, matrix: torch.Tensor) -> Sequence[torch.Tensor]:
    return [matrix[::2], matrix[1::2]] if axis == 0 else [matrix[:, ::2], matrix[:, 1::2]]


def _pieces(axis: int, shares: tuple[int, ...], groups: int, matrix: torch.Tensor) -> Sequence[torch.Tensor]:
    """Split along an axis, in each of `groups` groups, into pieces whose sizes are in the ratio of `shares`."""
    size = matrix.shape[axis] // groups
    sizes = [size * share // sum(shares) for share in shares]
    if groups == 1:
        return torch.split(matrix, sizes, dim=axis)
    assert axis == 0, "grouped heads are rows"
    return torch.split(matrix.view(groups, size, matrix.shape[1]), sizes, dim=1)
