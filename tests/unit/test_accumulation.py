"""Gradients of micro-batches in 16 bits: one sum in fp32, which is rounded once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from raytune_fsdp.config import ParallelConfig
from raytune_fsdp.model.attention.choose import KernelChoice
from raytune_fsdp.plan.plan import Layout
from raytune_fsdp.step.accumulation import FP32, _Sum, add_gradients

ALONE = Layout(world=1, data_ranks=1, replicas=1, shard_size=1)
PURE = ParallelConfig(precision="bf16_pure")
IN_FP32 = KernelChoice(name=FP32, why="a test")


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def gradients(model: Any, blocks: torch.Tensor) -> list[torch.Tensor]:
    """Of one step over these blocks."""
    for block in blocks:
        model(block).square().sum().backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found


def network() -> Any:
    """One of its weights is used twice."""
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 3)).bfloat16()
    model[2].weight = model[0].weight
    for index, parameter in enumerate(model.parameters()):
        parameter.data.copy_(draw(*parameter.shape, seed=index))
    return model


def test_gradients_of_micro_batches_are_rounded_once() -> None:
    """Without, the order in which they are added shows, as numbers of ranks add them in different ones."""
    blocks = draw(6, 5, 8)
    each = [gradients(network(), block[None]) for block in blocks]
    right = [torch.stack(parts).float().sum(0).bfloat16() for parts in zip(*each, strict=True)]
    plain, model = network(), network()
    add_gradients(IN_FP32, model, [], PURE, ALONE, 6)
    assert any(not torch.equal(a, b) for a, b in zip(gradients(plain, blocks), right, strict=True))
    for _ in range(2):  # a step begins where no gradient is left
        for found, wanted in zip(gradients(model, blocks), right, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    short = gradients(model, blocks[:2])  # the last step of a run in epochs
    for found, first, second in zip(short, *each[:2], strict=True):
        assert torch.equal(found, (first.float() + second.float()).bfloat16())
    for found, wanted in zip(gradients(model, blocks), right, strict=True):
        assert torch.equal(found, wanted)


def test_a_parameter_that_gets_its_first_gradient_later_loses_none() -> None:
    """Two of a unit that are as large, of which each micro-batch uses one: FSDP hands both to the same hook."""
    first, second = (nn.Parameter(torch.zeros(4).bfloat16()) for _ in range(2))
    sums = _Sum([first, second], 2)
    sums.add(torch.ones(4))
    first.grad = torch.ones(4).bfloat16()
    later = torch.full((4,), 2.0)
    sums.add(later)
    assert first.grad is not None and later.tolist() == [2.0] * 4, "FSDP adds the second's by itself"


def test_a_step_of_one_micro_batch_needs_no_sum() -> None:
    model = network()
    add_gradients(IN_FP32, model, [], PURE, ALONE, 1)
    assert not any(parameter._backward_hooks for parameter in model.parameters())
