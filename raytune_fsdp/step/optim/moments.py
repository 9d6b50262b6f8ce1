"""Keep moments between steps: in a floating-point type, in bf16, or in 8 bits.

Rounding uses keyed noise, and what is quantized, and in which groups, follows from the whole tensor: so the numbers
that are kept do not depend on how the tensor is split.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from raytune_fsdp.model.tables import constant_table
from raytune_fsdp.step.optim.pieces import split_like
from raytune_fsdp.step.optim.update import LEVELS, to_bf16

Tensors = Mapping[str, torch.Tensor]

MOMENT_GROUP = 256
"""Numbers that share a scale. Groups are parts of a row and so of a shard, whatever the number of ranks; groups of the
flat tensor, as others have them, would be cut."""

_FEW = 4096
"""Smaller parameters keep fp32: the norms of all layers are a ten-thousandth of a model."""


class AsType:
    """Keeps a moment in a floating-point type; None: in that of the weights."""

    rounded = grouped = False

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype

    def zeros(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"": torch.zeros_like(parameter, dtype=self._dtype)}

    def tables(self, device: torch.device) -> Tensors:
        return {}

    def read(self, kept: Tensors, tables: Tensors, dtype: torch.dtype) -> torch.Tensor:
        return kept[""].to(dtype)

    def write(self, value: torch.Tensor, tables: Tensors, noise: torch.Tensor | None) -> dict[str, torch.Tensor]:
        return {"": value}


class Bf16(AsType):
    """Keeps a moment in bf16, rounded by noise."""

    rounded = True

    def __init__(self) -> None:
        super().__init__(torch.bfloat16)

    def write(self, value: torch.Tensor, tables: Tensors, noise: torch.Tensor | None) -> dict[str, torch.Tensor]:
        assert noise is not None
        return {"": to_bf16(value.float(), noise)}


class EightBit:
    """Keeps a moment as codes of 8 bits, each group with the size of its largest number.

    A code stands for the square of its share of the largest: near 0 codes are close to each other, since the numbers of
    a group differ by orders of magnitude, and equal steps would make most of them 0. (Codes that span seven decades, as
    other libraries' do, have half as many for the upper two, where most numbers are.) A second moment is kept as its
    root: the update divides by the root, and 1e-5 of the largest is 1e-10 as a square. It is never rounded to 0: its
    first moment would be divided by `eps` alone.
    """

    rounded = grouped = True

    def __init__(self, *, squares: bool) -> None:
        self._squares = squares

    def zeros(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        columns = parameter.shape[1:].numel()
        codes = torch.zeros_like(parameter, dtype=torch.uint8)
        return {"": codes, "_scale": split_like(parameter, -(-columns // group_of(columns)), dtype=torch.float32)}

    def tables(self, device: torch.device) -> Tensors:
        return {"levels": _levels(not self._squares, device)}

    def read(self, kept: Tensors, tables: Tensors, dtype: torch.dtype) -> torch.Tensor:
        value = _at(tables["levels"], kept[""]) * kept["_scale"]
        return (value * value if self._squares else value).to(dtype)

    def write(self, value: torch.Tensor, tables: Tensors, noise: torch.Tensor | None) -> dict[str, torch.Tensor]:
        assert noise is not None
        levels, last = tables["levels"], len(tables["levels"]) - 1
        value = (value.sqrt() if self._squares else value).float()
        scale = value.abs().amax(-1, keepdim=True)
        share = value / scale.clamp(min=torch.finfo(torch.float32).tiny)
        # Levels are squares, so a root tells the nearest one or its neighbour, however a device rounds it. What is not
        # a number is taken for the last: fmin prefers numbers.
        most = last if self._squares else last // 2
        root = torch.fmin((share.abs().sqrt() * most).round(), share.new_full((), most))
        near = (root if self._squares else torch.where(share < 0, -root, root) + most).int()
        below = (near - ((_at(levels, near) > share) | (near == last)).int()).clamp(min=0)
        low, high = _at(levels, below), _at(levels, below + 1)
        up = (share - low) / (high - low) * LEVELS > noise
        if self._squares:
            up = up | ((below == 0) & (share > 0))
        return {"": (below + up).to(torch.uint8), "_scale": scale}


Kept = AsType | EightBit
"""How one moment is kept. `zeros` returns the tensors of one that is 0, by the suffix that is added to its name, and
`tables` the constants that reading and writing need. `read` returns the numbers of some rows, and `write` the tensors
that keep them. `rounded`: writing needs noise. `grouped`: it is read and written in groups, rows x groups of each x
numbers, and rows x groups x 1 of scales."""


def _at(levels: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    return levels.index_select(0, codes.flatten().int()).view(codes.shape)


def is_quantized(parameter: torch.Tensor) -> bool:
    """Return whether a moment in 8 bits is worth it. A DTensor's shape is that of the whole."""
    # A group of one number would be a scale and a code: five bytes. Each row of an adapter of rank 1 is such a group.
    return parameter.ndim > 1 and parameter.shape[1:].numel() > 1 and parameter.numel() >= _FEW


def group_of(columns: int) -> int:
    """Return how many numbers of a row share a scale, but for the last, if the row has so many columns."""
    return min(MOMENT_GROUP, columns)


@constant_table
def _levels(signed: bool, device: torch.device) -> torch.Tensor:
    """Return the values of the codes, rising: 255 from -1 to 1, or 256 from 0 to 1. The largest number is exact."""
    most = 127 if signed else 255
    share = torch.arange(-most if signed else 0, most + 1, dtype=torch.float64) / most
    return (share * share.abs()).to(torch.float32).to(device)
