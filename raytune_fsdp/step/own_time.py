"""Measure how long a rank spends on its own work, and find ranks that keep the others waiting.

Inside of a step ranks wait for each other at every unit, so all steps take as long as the slowest rank's. Ranks differ
only in the time between two waits: after FSDP has gathered a unit's weights, until the unit is computed, forward and
backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

WORK = ("data", "compute", "storage")
"""What a rank spends its own time on."""

_MUCH_SLOWER = 1.5
"""A slow rank takes at least this many times the median of the other ranks."""
_LONG = 10
"""Steps in a row that a rank has to be slow before it is named."""
_MATTERS = 0.05
"""Least difference, as a share of a step. If ranks do little but communicate, it does not matter which does more."""


class OwnTime:
    """Times the units of a sharded network on this rank, in the first micro-batch of each step.

    Timing the other micro-batches would cost as much again and say the same: for an 8B a step has 136 marks of some
    microseconds each. A mark on a GPU is an event in its stream, which nobody waits for before the metrics of the step
    are fetched.
    """

    def __init__(self, modules: Iterable[nn.Module], device: torch.device, *, storage: Callable[[], float]) -> None:
        """Add hooks to `modules`: those of the units, in the order of the forward pass, and already wrapped.

        Hooks run in the order in which they were added, and these must run after FSDP's.
        """
        self._on_gpu = device.type == "cuda"
        self._storage, self._stored = storage, 0.0
        """How long training has waited for storage: a function that returns it, and its value after the last step."""
        self._passes = 0
        self._forward: Any = None
        self._backward: dict[nn.Module, Any] = {}
        self._spans: list[tuple[Any, Any]] = []
        self._steps: list[tuple[list[tuple[Any, Any]], int, float]] = []
        for number, module in enumerate(modules):
            module.register_forward_pre_hook(self._first if number == 0 else self._before, with_kwargs=True)
            module.register_forward_hook(self._after)

    def end_step(self, micro_batches: int) -> None:
        before, self._stored = self._stored, self._storage()
        self._steps.append((self._spans, micro_batches, self._stored - before))
        self._spans, self._passes = [], 0
        self._forward = None
        self._backward.clear()

    def fetch(self, steps: int) -> list[tuple[float, float]]:
        """Return seconds of computing and of storage for each of the first `steps` steps since the last call."""
        done, self._steps = self._steps[:steps], self._steps[steps:]
        return [(many * sum(self._seconds(*span) for span in spans), stored) for spans, many, stored in done]

    def _seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end) / 1000 if self._on_gpu else end - begin)

    def _mark(self) -> Any:
        """Take the time, or on a GPU put an event into its stream."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()  # type: ignore[no-untyped-call]
        return event

    def _first(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._passes += module.training
        self._before(module, args, kwargs)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a span: FSDP has gathered the weights, and the module is about to be computed."""
        if self._passes != 1 or not module.training:
            return
        if (given := _with_gradient((*args, *kwargs.values()))) is not None:
            given.register_hook(partial(self._end_backward, module))  # type: ignore[no-untyped-call]
        self._forward = self._mark()

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._forward is None:
            return
        self._spans.append((self._forward, self._mark()))
        self._forward = None
        if (returned := _with_gradient(output if isinstance(output, tuple) else (output,))) is not None:
            # Runs after FSDP's hook, which gathers the weights again.
            returned.register_hook(partial(self._begin_backward, module))  # type: ignore[no-untyped-call]

    def _begin_backward(self, module: nn.Module, gradient: torch.Tensor) -> None:
        self._backward[module] = self._mark()

    def _end_backward(self, module: nn.Module, gradient: torch.Tensor) -> None:
        """End a span: the gradients of the module are computed, and FSDP is about to reduce them."""
        # If a unit has several modules, the next one in backward has begun already: each has its own mark.
        if (begun := self._backward.pop(module, None)) is not None:
            self._spans.append((begun, self._mark()))


def _with_gradient(values: Iterable[Any]) -> torch.Tensor | None:
    return next((value for value in values if isinstance(value, torch.Tensor) and value.requires_grad), None)


def typical(steps: np.ndarray) -> np.ndarray:
    """Return the lower median of each column. In a mean, one slow step of ten would make all of them look slow."""
    lower: np.ndarray = np.sort(steps, axis=0)[(len(steps) - 1) // 2]
    return lower


class SlowRanks:
    """Names a rank that the others wait for, once for as long as it is slow. All ranks name the same."""

    def __init__(self, world: int, device: torch.device) -> None:
        # The host of a GPU gets the next batch while the device still computes: only the longer of the two counts.
        self._at_once = device.type == "cuda"
        self._slow_for = [0] * world
        self._named = [False] * world

    def judge(self, own: np.ndarray, *, steps: int, step_seconds: float) -> list[dict[str, Any]]:
        """Return what to report about ranks that have been slow for long.

        `own`: the seconds that each rank's steps typically spend on each kind of `WORK`.
        """
        if len(own) == 1:
            return []
        data, compute, storage = own.T
        busy = (np.maximum(data, compute) if self._at_once else data + compute) + storage
        found = []
        for rank, mine in enumerate(busy):
            others = float(np.median(np.delete(busy, rank)))
            slow = mine > _MUCH_SLOWER * others and mine - others > _MATTERS * step_seconds
            self._slow_for[rank] = self._slow_for[rank] + steps if slow else 0
            if not slow:
                self._named[rank] = False
            elif self._slow_for[rank] >= _LONG and not self._named[rank]:
                self._named[rank] = True
                more: Sequence[float] = own[rank] - np.median(np.delete(own, rank, axis=0), axis=0)
                on = WORK[int(np.argmax(more))]
                found.append({"rank": rank, "spends_it_on": on, "seconds": float(mine), "others": others})
        return found
