"""Add the gradients of a step's micro-batches in fp32 if weights are in 16 bits (`bf16_pure`), and round once.

Autograd and FSDP add them in the type of the weights. Four gradients that are rounded after each sum give another
result as ((a + b) + c) + d, on one rank, than as (a + b) + (c + d), on two: many numbers differ by 2**-9, in every
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from raytune_fsdp.config import ParallelConfig
from raytune_fsdp.model.attention.choose import KernelChoice
from raytune_fsdp.plan.plan import Layout
from raytune_fsdp.step.parallel import Unit

FP32, AS_WEIGHTS = "fp32", "bf16"
"""The type in which gradients are added, as a checkpoint names it."""


def add_gradients(
    how: KernelChoice | None,
    model: nn.Module,
    units: Sequence[Unit],
    config: ParallelConfig,
    layout: Layout,
    micro_batches: int,
) -> None:
    """Add gradients as the run began to, in a network that has its memory. `how` is None if weights are not in 16 bits.

    `micro_batches`: those of a rank in a full step.
    """
    if how is None or how.name != FP32 or micro_batches == 1:
        return
    if not isinstance(model, FSDPModule):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(_Sum([parameter], micro_batches).added)  # type: ignore[no-untyped-call]
        return
    # FSDP itself keeps gradients in fp32 if they wait for the last micro-batch, to be sent or added to the replicas'.
    if config.defer_gradient_sync or layout.replicas > 1:
        return
    known: set[int] = set()
    for modules in (*(unit.modules for unit in units), (model,)):
        own = [p for module in modules for p in module.parameters() if p.requires_grad and id(p) not in known]
        known.update(map(id, own))
        if own:
            cast(FSDPModule, modules[0]).set_all_reduce_hook(_Sum(own, micro_batches).add)


class _Sum:
    """The sum of a step's gradients, for parameters whose gradients come together."""

    def __init__(self, parameters: Sequence[nn.Parameter], micro_batches: int) -> None:
        self._parameters = parameters
        self._micro_batches = micro_batches
        self._kept: torch.Tensor | None = None
        self._count = 0

    def add(self, gradient: torch.Tensor) -> None:
        """Turn the gradient of a micro-batch into the sum so far, in place; it then replaces the previous sum."""
        if gradient.is_cuda:
            # FSDP's buffer belongs to another stream, which would fill it again as soon as nobody holds it.
            gradient.record_stream(torch.cuda.current_stream(gradient.device))
        if all(parameter.grad is None for parameter in self._parameters):  # the first of a step
            # The sum is where the weights are: on the host, with parallel.cpu_offload.
            self._kept = gradient.to(self._parameters[0].device, torch.float32, copy=True)
            self._count = 1
            return
        self._count += 1
        some_new = any(parameter.grad is None for parameter in self._parameters)
        if self._kept is None or some_new or self._kept.shape != gradient.shape:
            self._kept = None  # some had no gradient before: all are then added in the type of the weights
            return
        self._kept += gradient.to(self._kept.device)
        gradient.copy_(self._kept)
        for parameter in self._parameters:
            parameter.grad = None
        if self._count == self._micro_batches:
            self._kept = None  # the update needs its memory

    def added(self, gradient: torch.Tensor) -> torch.Tensor:
        """Call `add` on a copy: what autograd hands out may be used elsewhere, too."""
        gradient = gradient.clone()
        self.add(gradient)
        return gradient
