"""Keep moments between steps: in a floating-point type, in bf16, or in 8 bits.

Rounding uses keyed noise, and what is quantized, and in which groups, follows from the whole tensor: so the numbers
that are kept do not depend on how the tensor is split.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from raytune_fsdp.model.tables import constant_table
from raytune_fsdp.step.optim.pieces import split_like
from raytune_fsdp.step.optim.update import LEVELS, to_bf16

MOMENT_GROUP = 256
"""Numbers that share a scale. Groups are parts of a row and so of a shard, whatever the number of ranks; groups of the
flat tensor, as others have them, would be cut."""

_FEW = 4096
"""Smaller parameters keep fp32: the norms of all layers are a ten-thousandth of a model."""


class Kept(Protocol):
    """How one moment is kept."""

    rounded: bool
    """Whether writing it needs noise."""

    def zeros(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors of a moment that is 0, by the suffix that is added to its name."""

    def read(self, kept: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers of some rows."""

    def write(self, value: torch.Tensor, noise: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Return the tensors that keep the numbers of some rows."""


class AsType:
    """Keeps a moment in a floating-point type; None: in that of the weights."""

    rounded = False

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype

    def zeros(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"": torch.zeros_like(parameter, dtype=self._dtype)}

    def read(self, kept: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        return kept[""].to(dtype)

    def write(self, value: torch.Tensor, noise: torch.Tensor | None) -> dict[str, torch.Tensor]:
        return {"": value}


class Bf16(AsType):
    """Keeps a moment in bf16, rounded by noise."""

    rounded = True

    def __init__(self) -> None:
        super().__init__(torch.bfloat16)

    def write(self, value: torch.Tensor, noise: torch.Tensor | None) -> dict[str, torch.Tensor]:
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

    rounded = True

    def __init__(self, *, squares: bool) -> None:
        self._squares = squares

    def zeros(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        columns = parameter.shape[1:].numel()
        codes = torch.zeros_like(parameter, dtype=torch.uint8)
        return {"": codes, "_scale": split_like(parameter, -(-columns // _block(columns)), dtype=torch.float32)}

    def read(self, kept: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        codes = kept[""]
        level = _levels(not self._squares, codes.device)
        value = level.index_select(0, codes.flatten().int()).view(codes.shape)
        value = value * _spread(kept["_scale"], codes.shape[1])
        return (value * value if self._squares else value).to(dtype)

    def write(self, value: torch.Tensor, noise: torch.Tensor | None) -> dict[str, torch.Tensor]:
        assert noise is not None
        value = (value.sqrt() if self._squares else value).float()
        scale = _largest(value)
        level = _levels(not self._squares, value.device)
        share = value / _spread(scale, value.shape[1]).clamp(min=torch.finfo(torch.float32).tiny)
        below = torch.searchsorted(level, share, right=True, out_int32=True).sub_(1).clamp_(0, len(level) - 2)
        low = level.index_select(0, below.flatten()).view(share.shape)
        high = level.index_select(0, below.flatten() + 1).view(share.shape)
        up = (share - low) / (high - low) * LEVELS > noise
        if self._squares:
            up |= (below == 0) & (share > 0)
        return {"": (below + up).to(torch.uint8), "_scale": scale}


def is_quantized(parameter: torch.Tensor) -> bool:
    """Return whether a moment in 8 bits is worth it. A DTensor's shape is that of the whole."""
    # A group of one number would be a scale and a code: five bytes. Each row of an adapter of rank 1 is such a group.
    return parameter.ndim > 1 and parameter.shape[1:].numel() > 1 and parameter.numel() >= _FEW


def _block(columns: int) -> int:
    return min(MOMENT_GROUP, columns)


def _largest(value: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value of every group; the last group of a row may be shorter."""
    rows, columns = value.shape
    size = _block(columns)
    filled = torch.nn.functional.pad(value, (0, -columns % size))
    return filled.view(rows, filled.shape[1] // size, size).abs().amax(-1)


def _spread(scale: torch.Tensor, columns: int) -> torch.Tensor:
    rows, groups = scale.shape
    return scale[:, :, None].expand(rows, groups, _block(columns)).reshape(rows, -1)[:, :columns]


@constant_table
def _levels(signed: bool, device: torch.device) -> torch.Tensor:
    """Return the values of the codes, rising: 255 from -1 to 1, or 256 from 0 to 1. The largest number is exact."""
    most = 127 if signed else 255
    share = torch.arange(-most if signed else 0, most + 1, dtype=torch.float64) / most
    return (share * share.abs()).to(torch.float32).to(device)
