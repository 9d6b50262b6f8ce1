"""Linear layers that multiply in 8 bits while they train, with torchao: `parallel.precision: fp8`.

The weights that are trained, saved and exported are fp32, as under `bf16`, and have the same names. Forward multiplies
two numbers with 4 bits of exponent and 3 of mantissa, backward one of these with one of 5 and 2 (`rowwise`: 4 and 3
throughout). What is multiplied is first divided by its largest number, so that it fills the range: that scale is
computed again in every product, and is the same at every world size, since a maximum does not depend on who computes
it.

In evaluations the same layers multiply in 16 bits: what is measured is the model that will be exported. The check of
the network at a start uses 16 bits, too, as it looks for changes of 1e-5: under `tensorwise` another document in the
micro-batch may change the scale, and with it how everything is rounded.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
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
"""Both sides of a weight have to be multiples of this for a GPU's 8-bit products. The number of tokens may be any:
torchao pads it."""

_LEAST = 1e-12
"""torchao's lower bound of the largest number, so that zeros have a scale."""


def layers_in_fp8(network: PreTrainedModel) -> list[nn.Linear]:
    """Return the layers that multiply in 8 bits.

    The answer depends only on shapes and on what is trained, so it is the same before and after these layers are
    replaced, whole or sharded.
    """
    return [layer for _, _, layer in linear_layers(network) if isinstance(layer, nn.Linear) and not _why_not(layer)]


def left_in_bf16(network: PreTrainedModel) -> Mapping[str, str]:
    """Return why linear layers of the network's layers stay in 16 bits, by their names."""
    names = {id(module): name for name, module in network.named_modules()}
    return {names[id(layer)]: why for _, _, layer in linear_layers(network) if (why := _why_not(layer))}


def _why_not(layer: nn.Module) -> str:
    if not isinstance(layer, nn.Linear):
        return "it is not an nn.Linear"
    if not layer.weight.requires_grad:
        return "it is frozen"
    rows, columns = layer.weight.shape
    return f"a side of {rows} x {columns} is not a multiple of {_SIDE}" if rows % _SIDE or columns % _SIDE else ""


def check_fp8(network: PreTrainedModel) -> None:
    """Refuse a network of which nothing would be computed in 8 bits, and an environment without torchao."""
    _check_torchao()
    left = left_in_bf16(network)
    if not layers_in_fp8(network):
        name, why = next(iter(left.items()), ("none", "there are no linear layers"))
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
    """Refuse a GPU without fp8."""
    # AMD's MI300 is 9.4; NVIDIA's Ada is 8.9 and Hopper 9.0.
    if torch.cuda.get_device_capability(device) < ((9, 4) if torch.version.hip else (8, 9)):
        raise ConfigError(
            f"parallel.precision=fp8: {torch.cuda.get_device_name(device)} has no fp8 (Ada, Hopper and MI300 have): "
            "set parallel.precision=bf16"
        )


def compute_in_fp8(network: PreTrainedModel, scaling: Scaling, *, emulated: bool) -> None:
    """Replace the layers that multiply in 8 bits; they keep their parameters. The network is whole, on the meta device.

    `emulated`: round to 8 bits and multiply in 32, which is what a CPU can do.
    """
    _check_torchao()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(scaling), emulate=emulated, pad_inner_dim=True)
    chosen = {id(layer) for layer in layers_in_fp8(network)}
    for each in layers_of(network):
        convert_to_float8_training(each, config=config, module_filter_fn=lambda layer, _: id(layer) in chosen)
    for layer in layers_in_fp8(network):
        layer.train(network.training)  # these are new modules
        layer.__class__ = _layer_class()


@cache
def _layer_class() -> type[nn.Linear]:
    """Return the class of layers that multiply in 8 bits in training, and in 16 in evaluation.

    A class, because a `forward` of each layer's own would make the compiler compile each transformer layer by itself.
    """
    from torchao.float8.float8_linear import Float8Linear

    class LinearInFp8(Float8Linear):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                product: torch.Tensor = super().forward(x)
                return product
            return F.linear(x, self.weight, self.bias)

    return LinearInFp8


def dtype_of_weights() -> torch.dtype:
    """Return torchao's type of weights in fp8: it knows which GPUs have which kind of fp8."""
    from torchao.float8.config import e4m3_dtype

    found: torch.dtype = e4m3_dtype
    return found


def scales_of(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the factor for numbers whose largest is `largest`, bit for bit as torchao computes it."""
    return (torch.finfo(dtype).max / largest.double().clamp(min=_LEAST)).float()


def narrow(numbers: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers in 8 bits, bit for bit as torchao computes them."""
    most = torch.finfo(dtype).max
    return (numbers.float() * scale).clamp(-most, most).to(dtype)


def widen_fp8(narrowed: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """Write into `out`, of 16 bits: divide each number in fp32, then round it."""
    # A scale without dimensions would be rounded to 16 bits first. Copies in fp32 would take three times as many bytes.
    torch.div(out.copy_(narrowed), scale.view(1), out=out)
