"""Sums over the ranks that compute a layer together, in forward or in backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.distributed.tensor import DTensor

from raytune_fsdp.model.pieces.pieces import TENSOR, is_cut

_AT_ONCE = 2**24
"""Numbers that are sent in one message: 64 MiB in fp32."""


def local_weight(parameter: torch.Tensor) -> torch.Tensor:
    """Return a weight as this rank computes with it: if it is cut, this rank's piece."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def sum_results(group: ProcessGroup, result: torch.Tensor) -> torch.Tensor:
    """Add up what each rank has computed for its part. Every rank gets the gradient of the sum."""
    summed: torch.Tensor = _SumResults.apply(group, result)  # type: ignore[no-untyped-call]
    return summed


def sum_gradients(group: ProcessGroup, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return tensors that all ranks have and each uses differently, so that their gradients are added up."""
    same: tuple[torch.Tensor, ...] = _SumGradients.apply(group, *tensors)  # type: ignore[no-untyped-call]
    return same


def summed(group: ProcessGroup, tensor: torch.Tensor, how: str = "sum") -> torch.Tensor:
    """Reduce a tensor over the group, into a new tensor."""
    found: torch.Tensor = wait_tensor(all_reduce(tensor.contiguous(), how, group))  # type: ignore[no-untyped-call]
    return found


def copy_first_gradients(
    model: nn.Module, parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor]
) -> None:
    """Give all ranks that compute layers together the first rank's gradients of weights that are not cut.

    These gradients are sums of the same numbers, but over other ranks, in an order that the library chooses for each
    group: the last bits may differ, and copies of a weight would drift apart.
    """
    group = next(
        each.device_mesh.get_group(TENSOR) for each in model.parameters() if isinstance(each, DTensor) and is_cut(each)
    )
    same = [grad for each, grad in zip(parameters, gradients, strict=True) if not is_cut(each) and grad.numel()]
    for own in _together(same):
        flat = torch.cat([each.reshape(-1) for each in own])
        dist.broadcast(flat, group=group, group_src=0)
        parts = torch.split(flat, [each.numel() for each in own])
        torch._foreach_copy_(own, [part.view_as(each) for each, part in zip(own, parts, strict=True)])


def _together(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Group tensors of one type with few enough numbers for a copy: most are a norm's."""
    many: list[torch.Tensor] = []
    numbers = 0
    for each in sorted(tensors, key=lambda tensor: str(tensor.dtype)):
        if many and (each.dtype != many[0].dtype or numbers > _AT_ONCE):
            yield many
            many, numbers = [], 0
        many.append(each)
        numbers += each.numel()
    if many:
        yield many


class _SumResults(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, result: torch.Tensor) -> torch.Tensor:
        return summed(group, result)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradient


class _SumGradients(torch.autograd.Function):
    """Takes several tensors at once, so that every rank sums them in the same order."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None | torch.Tensor, ...]:
        return None, *(summed(ctx.group, gradient) for gradient in gradients)
