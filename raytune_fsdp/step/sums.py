"""Sum a step over its micro-batches and over the ranks: the loss, what is recorded of it, and the gradient's squares.

`SumsByRank` sums on each rank first and then over ranks, so that the last digits depend on who had what. With
`run.exact` a step takes `SumsInOrder` (in_order.py) instead, whose sums have the same bits at any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from raytune_fsdp.base.batch import MicroBatch
from raytune_fsdp.model.pieces.pieces import is_cut
from raytune_fsdp.plan.plan import Layout
from raytune_fsdp.step.optim.pieces import at


@dataclass(frozen=True, slots=True)
class Totals:
    """The sums of a step over all ranks, in float64."""

    loss: torch.Tensor
    squares: torch.Tensor
    """The square of the gradient's norm."""
    details: torch.Tensor
    """What else is recorded of each micro-batch, and then the load of the experts."""


class Sums(Protocol):
    """Sums each step of a network. Nothing in it waits for the device."""

    def start(self, step: int, like: torch.Tensor) -> None:
        """Begin a step. `like`: a number on the device."""

    def next_round(self, number: int) -> None:
        """Begin the forward and backward of a micro-batch on every rank; its gradients are summed at its end."""

    def add(self, batch: MicroBatch, values: torch.Tensor, load: torch.Tensor) -> None:
        """Add a micro-batch: its loss, followed by the details, and its counts of tokens by expert."""

    def over_ranks(self, trained: Sequence[nn.Parameter], gradients: list[torch.Tensor]) -> Totals:
        """Return the sums over all ranks, with these pieces of the gradients. Collective."""


class SumsByRank:
    """Sums on each rank, then over ranks."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def start(self, step: int, like: torch.Tensor) -> None:
        self._sums = torch.zeros((), dtype=torch.float64, device=like.device)

    def next_round(self, number: int) -> None:
        pass

    def add(self, batch: MicroBatch, values: torch.Tensor, load: torch.Tensor) -> None:
        self._sums = self._sums + torch.cat([values, load])

    def over_ranks(self, trained: Sequence[nn.Parameter], gradients: list[torch.Tensor]) -> Totals:
        squares = at(self._sums.device, self._squares(trained, gradients))
        sums = torch.cat([self._sums[:1], squares[None], self._sums[1:]])
        dist.all_reduce(sums)
        return Totals(sums[0], sums[1] / self._layout.replicas, sums[2:])  # every replica counted the same gradient

    def _squares(self, trained: Sequence[nn.Parameter], gradients: list[torch.Tensor]) -> torch.Tensor:
        """Sum the squares of this rank's gradients, so that a replica's ranks count each gradient once."""
        # 16-bit gradients (bf16_pure) have too few digits to sum their own squares.
        wide = torch.float64 if gradients[0].dtype == torch.float64 else torch.float32
        each = torch.stack(torch._foreach_norm(gradients, 2, dtype=wide)).double().square()
        if self._layout.tensor > 1:
            # All ranks have what is not cut. Python numbers, not a tensor: the host would wait until the device has it.
            shares = [1.0 if is_cut(parameter) else 1 / self._layout.tensor for parameter in trained]
            torch._foreach_mul_(list(each.unbind()), shares)
        return each.sum()
