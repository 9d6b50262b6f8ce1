"""Have FSDP gather the weights of linear layers that multiply in 8 bits as 8 bits.

A rank finds the largest number of its rows of each weight, all ranks agree on the largest of these, and every rank
sends its rows divided by it, in 8 bits, as bytes (gloo knows no fp8), after what the unit has in 16 bits. The receiver
widens them to 16 bits. The layer then divides by the same largest number and rounds to the same 8 bits: widening has
moved each number by at most 2^-9 of it, and two numbers in 8 bits are 2^-4 apart. So a run that gathers in 8 bits is
the same run, bit for bit, as one that does not.

torchao has its own way, a tensor class that replaces each weight. It would come between the weights and everything that
reads them here (optimizers, checkpoints, filling, planning). This file only replaces what FSDP calls to move bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from raytune_fsdp.model.precision.fp8 import dtype_of_weights, narrow, scales_of, widen_fp8
from raytune_fsdp.step.units import groups_of_unit

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The function, by its name since torch 2.13 or by its older one."""


def gather_in_fp8(modules: Sequence[nn.Module], layers: Collection[nn.Linear]) -> None:
    """Have these layers' weights sent in 8 bits when the unit of these modules is gathered. It is already sharded."""
    first = cast(FSDPModule, modules[0])
    weights = {id(layer.weight) for layer in layers}
    pieces = [
        _Piece(each.padded_sharded_param_size.numel(), id(each.sharded_param) in weights)
        for group in groups_of_unit(first)
        for each in group.fsdp_params
    ]
    if any(piece.narrow for piece in pieces):
        first.set_custom_all_gather(_GatherInFp8(modules[0], pieces, dtype_of_weights()))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A rank's rows of a weight."""

    numbers: int
    narrow: bool


class _GatherInFp8:
    def __init__(self, module: nn.Module, pieces: Sequence[_Piece], dtype: torch.dtype) -> None:
        self._module, self._pieces, self._dtype = module, pieces, dtype
        self._sizes = [piece.numbers for piece in pieces]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        if not self._module.training:  # evaluations multiply in 16 bits, and need all 16
            work: dist.Work | None = _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
            return work
        mine = torch.split(input_tensor, self._sizes)
        wide = [rows for rows, piece in zip(mine, self._pieces, strict=True) if not piece.narrow]
        narrowed = [rows for rows, piece in zip(mine, self._pieces, strict=True) if piece.narrow]
        scales = self._agree(narrowed, group)
        sent = torch.cat(
            [
                # Weights in 16 bits first, or they might not begin at an even byte.
                *(rows.view(torch.uint8) for rows in wide),
                *(narrow(rows, s, self._dtype).view(torch.uint8) for rows, s in zip(narrowed, scales, strict=True)),
            ]
        )
        got = sent.new_empty(group.size() * sent.numel())
        _all_gather(got, sent, group=group)
        self._spread(got.view(group.size(), -1), output_tensor.view(group.size(), -1), scales)
        return None

    def _agree(self, narrowed: list[torch.Tensor], group: dist.ProcessGroup) -> Sequence[torch.Tensor]:
        """Agree on each weight's scale, from all of its rows. One small message a unit; torchao has one a weight."""
        largest = torch.stack(torch._foreach_norm(narrowed, float("inf"))).double()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        return scales_of(largest, self._dtype).unbind()

    def _spread(self, got: torch.Tensor, output: torch.Tensor, scales: Sequence[torch.Tensor]) -> None:
        """Put what all ranks have sent where FSDP expects it."""
        places = torch.split(output, self._sizes, 1)
        left = 0
        for place, piece in zip(places, self._pieces, strict=True):
            if not piece.narrow:
                right = left + piece.numbers * output.itemsize
                place.copy_(got[:, left:right].view(output.dtype))
                left = right
        of = iter(scales)
        for place, piece in zip(places, self._pieces, strict=True):
            if piece.narrow:
                widen_fp8(got[:, left : left + piece.numbers].view(self._dtype), next(of), place)
                left += piece.numbers
