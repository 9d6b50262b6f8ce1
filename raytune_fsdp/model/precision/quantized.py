"""Frozen weights of 4 or 8 bits: quantized row by row while they are read, widened again where they multiply.

A row of a weight (as it is stored) is one row of bytes: its codes, the scale of each group of 64 numbers, and a tail
that says how to read the scales. Nothing in a row depends on another row, so any rank may hold any rows, and the bytes
are the same at every world size. There are two levels of scales as in QLoRA, where the outer scales span rows.

nf4: a scale is a byte, and two fp32 numbers end the row. The fourth roots of scales are evenly spaced between the row's
smallest and largest: with the scales themselves evenly spaced, one group 1000 times as large as the rest made an error
of 0.15 of the rest; with fourth roots it is 0.092, as with exact scales. Logarithms would be as good, but are not
rounded alike everywhere.

int8: a scale is fp16, in units of 1/32768 of the row's largest number, and the unit ends the row in fp32. The error is
that of exact scales even next to groups a million times as large; a scale of one byte made it 1.6 times as large next
to groups 32 times as large.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.model.adapters.attach import base_name
from raytune_fsdp.model.layers import layers_of
from raytune_fsdp.model.objective.routers import numbers_of_experts, routers_of
from raytune_fsdp.model.tables import constant_table
from raytune_fsdp.model.weights.source import Weights

Kind = Literal["nf4", "int8"]

GROUP = 64
"""Numbers that share a scale; the last group of a row may have fewer."""
_TAIL: dict[Kind, int] = {"nf4": 8, "int8": 4}
"""Bytes at a row's end. nf4: the fourth root of the smallest scale, and the step between two of 256. int8: the unit."""
_UNIT = 2.0**-15
"""Unit of int8's scales. A power of two keeps the row's largest exact; fp16 goes to 65504."""
_AT_ONCE = 1 << 22
"""Numbers that are quantized at a time, which take 60 MiB meanwhile."""

# Quantiles of a normal distribution, scaled to end at 1, with an exact zero: Dettmers et al. 2023, appendix E.
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def row_bytes(numbers: int, kind: Kind) -> int:
    """Return the bytes of a row of `numbers` numbers."""
    return _code_bytes(numbers, kind) + -(-numbers // GROUP) * (1 if kind == "nf4" else 2) + _TAIL[kind]


def _code_bytes(numbers: int, kind: Kind) -> int:
    return -(-numbers // 2) if kind == "nf4" else numbers


@torch.no_grad()
def quantize(rows: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Return the bytes of these rows. If a row is not finite, neither is what `ends_of` returns for it."""
    count, numbers = rows.shape
    packed = torch.empty(count, row_bytes(numbers, kind), dtype=torch.uint8)
    at_once = max(1, _AT_ONCE // max(1, numbers))
    for start in range(0, count, at_once):
        packed[start : start + at_once] = _quantize(rows[start : start + at_once].float(), kind)
    return packed


def _quantize(rows: torch.Tensor, kind: Kind) -> torch.Tensor:
    count, numbers = rows.shape
    groups = F.pad(rows, (0, -numbers % GROUP)).reshape(count, -1, GROUP)
    ends = _ends(groups.abs().amax(-1), kind)
    scales = _scales(ends, kind)
    levels = groups / torch.where(scales > 0, scales, 1)[..., None]  # divided by the scale as it will be read back
    levels = levels.reshape(count, -1)[:, :numbers]
    if kind == "nf4":
        values, codes = torch.tensor(_NF4), torch.zeros(levels.shape, dtype=torch.uint8)
        for border in ((values[1:] + values[:-1]) / 2).tolist():  # 2.6 times as fast as torch.bucketize
            codes += levels > border
        codes = F.pad(codes, (0, numbers % 2))
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    else:
        codes = ((levels * 127).round().clamp(-127, 127) + 128).to(torch.uint8)
    return torch.cat([codes, ends], 1)


def _ends(largest: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Return the bytes after the codes of rows, from the largest number of each group."""
    if kind == "int8":
        unit = largest.amax(-1, keepdim=True) * _UNIT
        of_groups = (largest / torch.where(unit > 0, unit, 1)).half()
        return torch.cat([of_groups.view(torch.uint8), unit.view(torch.uint8)], 1)
    roots = largest.sqrt().sqrt()
    low = roots.amin(-1, keepdim=True)
    step = (roots.amax(-1, keepdim=True) - low) / 255
    of_groups = ((roots - low) / torch.where(step > 0, step, 1)).round().clamp(0, 255).to(torch.uint8)
    return torch.cat([of_groups, torch.cat([low, step], 1).view(torch.uint8)], 1)


def _scales(ends: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Return the scales that these bytes stand for, in fp32."""
    of_groups, tail = ends[:, : -_TAIL[kind]], _as(torch.float32, ends[:, -_TAIL[kind] :])
    if kind == "int8":
        return _as(torch.float16, of_groups).float() * tail
    return (tail[:, :1] + tail[:, 1:] * of_groups.float()).square().square()


def ends_of(packed: torch.Tensor) -> torch.Tensor:
    """Return the last number of every row of bytes: it is finite if all numbers of the row were."""
    return _as(torch.float32, packed[:, -4:])


def _as(dtype: torch.dtype, packed: torch.Tensor) -> torch.Tensor:
    # Always a copy: the end of a single row is contiguous already, but at an address where no fp32 number may begin.
    return packed.clone(memory_format=torch.contiguous_format).view(dtype)


def widen_rows(packed: torch.Tensor, numbers: int, kind: Kind, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows that these bytes stand for, computed in fp32."""
    width, count = _code_bytes(numbers, kind), packed.shape[0]
    scales = _scales(packed[:, width:], kind)
    if kind == "nf4":
        values = F.embedding(packed[:, :width].int(), _pairs(packed.device)).view(count, -1)[:, :numbers]
    else:
        values = (packed[:, :width].float() - 128) / 127
    padded = F.pad(values, (0, -numbers % GROUP)).reshape(count, -1, GROUP)
    return (padded * scales[..., None]).reshape(count, -1)[:, :numbers].to(dtype)


@constant_table
def _pairs(device: torch.device) -> torch.Tensor:
    """Return the two numbers that each byte stands for: one look-up, where two would have to split the codes first."""
    byte, values = torch.arange(256), torch.tensor(_NF4)
    return torch.stack([values[byte & 15], values[byte >> 4]], 1).to(device)


class _Product(torch.autograd.Function):
    """A product with widened rows, which are widened again for backward: kept, they would be the 16-bit model."""

    @staticmethod
    def forward(x: torch.Tensor, packed: torch.Tensor, numbers: int, kind: Kind, turned: bool) -> torch.Tensor:
        weight = widen_rows(packed, numbers, kind, x.dtype)
        return x @ weight if turned else F.linear(x, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, packed, *ctx.format = inputs
        ctx.save_for_backward(packed)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,), (packed,), (numbers, kind, turned) = grads, ctx.saved_tensors, ctx.format
        weight = widen_rows(packed, numbers, kind, grad.dtype)
        return F.linear(grad, weight) if turned else grad @ weight, None, None, None, None


class QuantizedLayer(nn.Module):
    """A frozen linear layer whose weight is kept in few bits."""

    def __init__(self, layer: nn.Linear | Conv1D, kind: Kind) -> None:
        super().__init__()
        rows, numbers = layer.weight.shape
        self.numbers = int(numbers)
        """Numbers of a row, as it is stored."""
        self.kind, self.turned = kind, isinstance(layer, Conv1D)
        empty = torch.empty(rows, row_bytes(numbers, kind), dtype=torch.uint8, device=layer.weight.device)
        self.packed = nn.Parameter(empty, requires_grad=False)
        self.bias: nn.Parameter | None = layer.bias

    @property
    def weight(self) -> torch.Tensor:
        """The widened weight, for callers such as PEFT's DoRA."""
        return widen_rows(self.packed, self.numbers, self.kind, torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        format_ = (self.numbers, self.kind, self.turned)
        product: torch.Tensor = _Product.apply(x, self.packed, *format_)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias


def check_torch() -> None:
    """Refuse a torch whose FSDP makes every piece of a weight trainable, which bytes cannot be."""
    if torch.__version__ < "2.12":
        raise ConfigError(
            f"method.type=qlora needs torch 2.12 or newer: FSDP of torch {torch.__version__} takes no weights that are "
            "bytes; install a newer torch, or set method.type=lora"
        )


def quantize_layers(network: PreTrainedModel, kind: Kind) -> None:
    """Replace the frozen linear layers in the network's layers. It is on the meta device, with its adapters."""
    for owner, name, layer in list(linear_layers(network)):
        if not any(parameter.requires_grad for parameter in layer.parameters()):
            setattr(owner, name, QuantizedLayer(layer, kind))


def linear_layers(network: PreTrainedModel) -> Iterator[tuple[nn.Module, str, nn.Linear | Conv1D]]:
    """Yield the linear layers that can do with few bits, each after its parent module and its name there.

    The head is left out, whose errors show in every token, and so are routers, which choose by small differences.
    """
    experts = numbers_of_experts(network)
    # The original that PEFT keeps of a module that is trained whole has the same names as the trained copy.
    kept = [module.original_module for module in network.modules() if hasattr(module, "original_module")]
    left = {id(module) for each in (*kept, *(router for router, _ in routers_of(network))) for module in each.modules()}
    for each in layers_of(network):
        for owner in each.modules():
            for name, layer in owner.named_children():
                if not isinstance(layer, nn.Linear | Conv1D) or id(layer) in left:
                    continue
                gate = _ROUTER.search(name) and layer.weight.shape[0] in experts
                if not gate:
                    yield owner, name, layer


_ROUTER = re.compile(r"gate|router")
"""Finds routers of architectures that do not say which of their modules are routers."""


class QuantizedWeights:
    """Weights of which some can also be read as bytes. Read as numbers, these are what the bytes stand for."""

    def __init__(self, inner: Weights, network: PreTrainedModel) -> None:
        """Take a network with its layers replaced, and with its adapters."""
        self._inner = inner
        self._layers = {
            base_name(name): module for name, module in network.named_modules() if isinstance(module, QuantizedLayer)
        }

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        packed = {f"{name}.packed": tuple(each.packed.shape) for name, each in self._layers.items()}
        return {**self._inner.shapes(), **packed}

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        owner, _, own = name.rpartition(".")
        layer = self._layers.get(owner)
        if layer is None or own not in ("packed", "weight"):
            return self._inner.read(name, start, stop)
        packed = torch.empty(stop - start, row_bytes(layer.numbers, layer.kind), dtype=torch.uint8)
        at_once = max(1, _AT_ONCE // layer.numbers)  # rank 0 may ask for all rows, too many to hold in 32 bits
        for first in range(start, stop, at_once):
            last = min(stop, first + at_once)
            packed[first - start : last - start] = quantize(
                self._inner.read(f"{owner}.weight", first, last), layer.kind
            )
        return packed if own == "packed" else widen_rows(packed, layer.numbers, layer.kind, torch.float32)

    def where(self, name: str) -> str:
        owner, _, own = name.rpartition(".")
        return self._inner.where(f"{owner}.weight" if own == "packed" else name)
