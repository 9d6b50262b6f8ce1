"""A rank knows what its own work took, whatever it waited for, and ranks agree on who keeps the others waiting."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raytune_fsdp.step.own_time import OwnTime, SlowRanks, typical

CPU, GPU = torch.device("cpu"), torch.device("cuda")


SLEPT: list[float] = []
"""What each sleep of a block took: on a busy machine it is longer than was asked for."""


def sleep(seconds: float) -> None:
    began = time.perf_counter()
    time.sleep(seconds)
    SLEPT.append(time.perf_counter() - began)


class Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        sleep(0.01)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        sleep(0.02)
        return gradient


class Block(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleeps.apply(x)  # type: ignore[no-any-return,no-untyped-call]


def waits(*_: Any) -> None:
    time.sleep(0.05)


def waits_in_forward(_: nn.Module, given: tuple[torch.Tensor]) -> torch.Tensor:
    waits()
    return given[0].clone()  # a node of the graph before each block, as FSDP's


def waits_in_backward(_: nn.Module, __: Any, output: torch.Tensor) -> None:
    output.register_hook(waits)  # type: ignore[no-untyped-call]


def step(blocks: nn.ModuleList, micro_batches: int) -> None:
    for _ in range(micro_batches):
        x = torch.ones(1, 4, requires_grad=True)
        for block in blocks:
            x = block(x)
        x.sum().backward()  # type: ignore[no-untyped-call]


def test_what_a_rank_waits_for_is_not_its_own_time() -> None:
    blocks = nn.ModuleList(Block() for _ in range(2))
    for block in blocks:  # as FSDP does, before
        block.register_forward_pre_hook(waits_in_forward)
        block.register_forward_hook(waits_in_backward)
    stored = iter((0.1, 0.5, 0.5))
    own = OwnTime(blocks, CPU, storage=lambda: next(stored))
    SLEPT.clear()
    step(blocks, 3)
    own.end_step(3)
    step(blocks.eval(), 1)  # an evaluation is no part of a step
    step(blocks.train(), 3)
    own.end_step(3)
    both, each = own.fetch(2), 2 * 2
    for (computed, _), first in zip(both, (0, (3 + 1) * each), strict=True):
        slept = 3 * sum(SLEPT[first : first + each])
        assert slept <= computed < slept + 0.1, "all three micro-batches, by the first of them"
    assert [storage for _, storage in both] == [0.1, 0.4]
    step(blocks, 1)
    own.end_step(1)
    assert own.fetch(1)[0][1] == 0


def test_a_unit_costs_microseconds() -> None:
    bare, timed = (nn.ModuleList(nn.Linear(4, 4) for _ in range(34)) for _ in range(2))
    own = OwnTime(timed, CPU, storage=lambda: 0.0)
    costs: dict[str, list[float]] = {"bare": [], "timed": []}
    for _ in range(100):
        began = time.thread_time()
        step(bare, 1)
        between = time.thread_time()
        step(timed, 1)
        own.end_step(1)
        own.fetch(1)
        costs["bare"].append(between - began)
        costs["timed"].append(time.thread_time() - between)
    # The least of each: beside other processes a core does less in a microsecond.
    unit = (min(costs["timed"]) - min(costs["bare"])) / 34
    # 8 µs on an AMD EPYC, 36 on half of a busy core of it; the step of an 8B on 8 GPUs takes a second or more.
    assert unit < 100e-6


def own(*ranks: tuple[float, float, float]) -> np.ndarray:
    return np.array(ranks)


def judged(ranks: SlowRanks, values: np.ndarray, steps: int = 1) -> list[tuple[int, str]]:
    found = ranks.judge(values, steps=steps, step_seconds=float(values.sum(1).max()))
    return [(each["rank"], each["spends_it_on"]) for each in found]


@pytest.mark.parametrize(("slow", "on"), [((0, 3, 0), "compute"), ((2, 1, 0), "data"), ((0, 1, 2), "storage")])
def test_a_slow_rank_is_named_once(slow: tuple[float, float, float], on: str) -> None:
    ranks = SlowRanks(3, CPU)
    even, uneven = own((0, 1, 0), (0, 1.1, 0), (0, 0.9, 0)), own((0, 1, 0), slow, (0, 0.9, 0))
    assert [judged(ranks, uneven) for _ in range(9)] == [[]] * 9
    assert judged(ranks, even) == [], "nine steps are not ten"
    assert [judged(ranks, uneven, steps=5) for _ in range(4)] == [[], [(1, on)], [], []]
    assert judged(ranks, even) == []
    assert judged(ranks, uneven, steps=10) == [(1, on)], "it is slow again"


@pytest.mark.parametrize("log_every", [1, 2, 3, 10, 20])
def test_one_slow_step_in_ten_makes_no_slow_rank(log_every: int) -> None:
    """However many steps are fetched at a time: one of them may wait a minute for its data."""
    fast, slow = np.tile([0.1, 1.0, 0.0], (60, 1)), np.tile([0.1, 1.0, 0.0], (60, 1))
    slow[4::10, 0] = 60.0
    ranks, named = SlowRanks(3, CPU), []
    for first in range(0, 60, log_every):
        each = [typical(own[first : first + log_every]) for own in (fast, slow, fast)]
        named += judged(ranks, np.array(each), steps=len(fast[first : first + log_every]))
    assert not named
    slow[:, 0] = 2.0
    for first in range(0, 60, log_every):
        each = [typical(own[first : first + log_every]) for own in (fast, slow, fast)]
        named += judged(ranks, np.array(each), steps=log_every)
    assert named == [(1, "data")]


def test_what_nobody_waits_for_is_not_named() -> None:
    ranks = SlowRanks(2, CPU)
    values = own((0, 0.01, 0), (0, 0.03, 0))
    assert ranks.judge(values, steps=20, step_seconds=1.0) == [], "ranks that only communicate"
    assert judged(SlowRanks(2, GPU), own((0.9, 1, 0), (0.1, 1, 0)), steps=20) == [], "data comes while a GPU computes"
    assert judged(SlowRanks(2, GPU), own((1.9, 1, 0), (0.1, 1, 0)), steps=20) == [(0, "data")]
    assert judged(SlowRanks(1, CPU), own((1, 1, 1)), steps=20) == []
