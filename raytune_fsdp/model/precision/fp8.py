"""Linear layers that multiply in 8 bits while they train, by torchao: `parallel.precision: fp8`.

The weights that are trained, saved and exported are fp32, as under `bf16`, and have the same names. Forward multiplies
two numbers of 4 bits of exponent and 3 of mantissa, backward one of those with one of 5 and 2 (`rowwise`: 4 and 3
throughout). What is multiplied is divided by the largest of it first, so that it fills the range: that scale is found
anew in every product, and is the same at every world size, since a largest number does not depend on who looked for it.

In evaluations the same layers multiply in 16 bits: what is measured is the model that will be exported. So is the check
of the network at a start, which looks for changes of 1e-5: under `tensorwise` another document in the micro-batch may
change the scale, and with it how everything is rounded.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from raytune_fsdp.base.errors import ConfigError, pip_install
from raytune_fsdp.model.layers import layers_of
from raytune_fsdp.model.precision.quantized import linear_layers

Scaling = Literal["tensorwise", "rowwise"]

_SIDE = 16
"""What the GPUs' 8-bit products want both sides of a weight to be a multiple of. Tokens may be any number: torchao
fills them up."""

_LEAST = 1e-12
"""torchao's least largest number, so that zeros have a scale."""


def layers_in_fp8(network: PreTrainedModel) -> list[nn.Linear]:
    """The layers that multiply in 8 bits. By shapes and by what is trained alone, so whoever asks gets the same answer,
    before they are replaced as well as after, whole or sharded."""
    return [layer for _, _, layer in linear_layers(network) if isinstance(layer, nn.Linear) and not _why_not(layer)]


def left_in_bf16(network: PreTrainedModel) -> Mapping[str, str]:
    """By the name of each of the blocks' linear layers that stay in 16 bits, why."""
    names = {id(module): name for name, module in network.named_modules()}
    return {names[id(layer)]: why for _, _, layer in linear_layers(network) if (why := _why_not(layer))}


def _why_not(layer: nn.Module) -> str:
    if not isinstance(layer, nn.Linear):
        return "it is no nn.Linear"
    if not layer.weight.requires_grad:
        return "it is frozen"
    rows, columns = layer.weight.shape
    return f"a side of {rows} x {columns} is no multiple of {_SIDE}" if rows % _SIDE or columns % _SIDE else ""


def check_fp8(network: PreTrainedModel) -> None:
    """Refuse a network of which nothing would be computed in 8 bits, and an environment that cannot."""
    _check_torchao()
    left = left_in_bf16(network)
    if not layers_in_fp8(network):
        name, why = next(iter(left.items()), ("none", "its blocks have no linear layers"))
        raise ConfigError(
            f"parallel.precision=fp8: no layer of a {type(network).__name__} would be computed in fp8 ({name}: {why}); "
            "set parallel.precision=bf16"
        )


def _check_torchao() -> None:
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f"parallel.precision=fp8 needs torchao, which is not installed: {pip_install('fp8')}, or set "
            "parallel.precision=bf16"
        )


def check_gpu(device: torch.device) -> None:
    """Refuse one without fp8."""
    # Of AMD's, MI300 is 9.4; of NVIDIA's, Ada is 8.9 and Hopper 9.0.
    if torch.cuda.get_device_capability(device) < ((9, 4) if torch.version.hip else (8, 9)):
        raise ConfigError(
            f"parallel.precision=fp8: {torch.cuda.get_device_name(device)} has no fp8 (Ada, Hopper and MI300 have): "
            "set parallel.precision=bf16"
        )


def compute_in_fp8(network: PreTrainedModel, scaling: Scaling, *, emulated: bool) -> None:
    """Replace those layers, which keep their parameters. The network is whole, on the meta device.

    `emulated`: round to 8 bits and multiply in 32, which is what a CPU can do.
    """
    _check_torchao()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(scaling), emulate=emulated, pad_inner_dim=True)
    chosen = {id(layer) for layer in layers_in_fp8(network)}
    for block in layers_of(network):
        convert_to_float8_training(block, config=config, module_filter_fn=lambda layer, _: id(layer) in chosen)
    for layer in layers_in_fp8(network):
        layer.train(network.training)  # they are made anew
        layer.forward = partial(_forward, layer)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    if layer.training:
        product: torch.Tensor = type(layer).forward(layer, x)
        return product
    return F.linear(x, layer.weight, layer.bias)


def dtype_of_weights() -> torch.dtype:
    """That of torchao, which knows whose GPUs have which kind of fp8."""
    from torchao.float8.config import e4m3_dtype

    found: torch.dtype = e4m3_dtype
    return found


def scales_of(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What numbers are multiplied with, by the largest of them; to the bit as torchao computes it."""
    return (torch.finfo(dtype).max / largest.double().clamp(min=_LEAST)).float()


def narrow(numbers: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers in 8 bits; to the bit as torchao computes it."""
    most = torch.finfo(dtype).max
    return (numbers.float() * scale).clamp(-most, most).to(dtype)


def widen(narrowed: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """Into `out`, of 16 bits: each number divided in fp32, then rounded."""
    # A scale without dimensions would be rounded to 16 bits before. Through copies in fp32 it would be three times as
    # many bytes.
    torch.div(out.copy_(narrowed), scale.view(1), out=out)
