"""Optimizers that update every number by its own gradient and moments. Each is a rule, and `Elementwise` applies it.

Every operation is one that is rounded once, so a number's update has the same bits wherever the tensor is cut. `lerp`
and `addcmul` are not used: vector units fuse them, but not always at the ends of a tensor's memory. For the same reason
an update may run as one kernel (execution.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from raytune_fsdp.config import OptimConfig
from raytune_fsdp.config.sections.optimizers import LionOptimizer, SgdOptimizer
from raytune_fsdp.model.pieces.pieces import local_piece
from raytune_fsdp.step.optim.execution import BY_OPERATION, Execution, Scalars
from raytune_fsdp.step.optim.groups import Group
from raytune_fsdp.step.optim.moments import (
    MOMENT_GROUP,
    AsType,
    Bf16,
    EightBit,
    Kept,
    Tensors,
    group_of,
    is_quantized,
)
from raytune_fsdp.step.optim.pieces import Rows, columns_of, in_parts
from raytune_fsdp.step.optim.update import Trained, Updates, decayed, drawn, replace, update_dtype, write

Moments = Mapping[str, torch.Tensor]


class Rule(Protocol):
    """Turns a gradient into the direction in which its weight moves."""

    def kept(self, parameter: torch.Tensor) -> Mapping[str, Kept]:
        """Return how each moment of a parameter is kept, by the moment's name."""

    def scalars(self, step: torch.Tensor) -> Scalars:
        """Return what a direction needs to know of the step, or of each of several: it is 1 in the first."""

    def direction(self, gradient: torch.Tensor, moments: Moments, scalars: Scalars) -> tuple[torch.Tensor, Moments]:
        """Return what to subtract at a learning rate of 1, and the new moments."""


class AdamWRule:
    """torch's AdamW, with moments of any type."""

    def __init__(self, config: OptimConfig, moments: str) -> None:
        self._beta1, self._beta2, self._eps = config.beta1, config.beta2, config.eps
        self._moments = moments

    def kept(self, parameter: torch.Tensor) -> Mapping[str, Kept]:
        if self._moments == "8bit" and is_quantized(parameter):
            return {"exp_avg": EightBit(squares=False), "exp_avg_sq": EightBit(squares=True)}
        if self._moments == "bf16":
            return {"exp_avg": Bf16(), "exp_avg_sq": Bf16()}
        dtype = None if self._moments == "as_weights" else torch.float32
        return {"exp_avg": AsType(dtype), "exp_avg_sq": AsType(dtype)}

    def scalars(self, step: torch.Tensor) -> Scalars:
        ages = step.double()
        return 1 - self._beta1**ages, 1 - self._beta2**ages

    def direction(self, gradient: torch.Tensor, moments: Moments, scalars: Scalars) -> tuple[torch.Tensor, Moments]:
        first = moments["exp_avg"] * self._beta1 + gradient * (1 - self._beta1)
        second = moments["exp_avg_sq"] * self._beta2 + gradient * gradient * (1 - self._beta2)
        share_of_first, share_of_second = scalars
        mean = first / share_of_first
        root = (second / share_of_second).sqrt()
        return mean / (root + self._eps), {"exp_avg": first, "exp_avg_sq": second}


class SgdRule:
    """Moves by gradients, or by their running sum."""

    def __init__(self, chosen: SgdOptimizer) -> None:
        self._momentum, self._nesterov = chosen.momentum, chosen.nesterov

    def kept(self, parameter: torch.Tensor) -> Mapping[str, Kept]:
        return {"momentum": AsType()} if self._momentum else {}

    def scalars(self, step: torch.Tensor) -> Scalars:
        return ()

    def direction(self, gradient: torch.Tensor, moments: Moments, scalars: Scalars) -> tuple[torch.Tensor, Moments]:
        if not self._momentum:
            return gradient, {}
        sum_ = moments["momentum"] * self._momentum + gradient
        return gradient + sum_ * self._momentum if self._nesterov else sum_, {"momentum": sum_}


class LionRule:
    """Moves by the sign of a mean of gradients: every weight moves by the learning rate."""

    def __init__(self, chosen: LionOptimizer) -> None:
        self._beta1, self._beta2 = chosen.beta1, chosen.beta2

    def kept(self, parameter: torch.Tensor) -> Mapping[str, Kept]:
        return {"exp_avg": AsType()}

    def scalars(self, step: torch.Tensor) -> Scalars:
        return ()

    def direction(self, gradient: torch.Tensor, moments: Moments, scalars: Scalars) -> tuple[torch.Tensor, Moments]:
        mean = moments["exp_avg"]
        sign = (mean * self._beta1 + gradient * (1 - self._beta1)).sign()
        return sign, {"exp_avg": mean * self._beta2 + gradient * (1 - self._beta2)}


RULES: Mapping[str, Callable[[Any], Rule]] = {"sgd": SgdRule, "lion": LionRule}
"""The rules that are made of a section of `optim.optimizer` alone, by its type."""


class Elementwise(Updates):
    """An optimizer that applies a rule to every weight."""

    def __init__(self, weights: Trained, rule: Rule, execution: Execution = BY_OPERATION) -> None:
        super().__init__(weights, execution)
        self._kept = {name: rule.kept(parameter) for name, parameter in weights.named.items()}
        self._rule = rule

    def _moments(self, name: str, parameter: nn.Parameter) -> Mapping[str, torch.Tensor]:
        return {
            moment + suffix: tensor
            for moment, kept in self._kept[name].items()
            for suffix, tensor in kept.zeros(parameter).items()
        }

    def _take(self, lr_factor: float, skip: torch.Tensor) -> None:
        taken = self._trained.taken()
        # Counted as 0 if the first step is skipped: the result of 0/0 is not written.
        steps = self._trained.count([name for name, _ in taken], skip)
        scalars = self._execution.scalars(self._rule.scalars, steps)
        for (name, group), step, of_step in zip(taken, steps, scalars, strict=True):
            self._update(name, group, lr_factor, step, of_step, skip)

    def _update(
        self, name: str, group: Group, lr_factor: float, step: torch.Tensor, scalars: Scalars, skip: torch.Tensor
    ) -> None:
        parameter, state, kept = self._trained.named[name], self._trained.state[name], self._kept[name]
        assert parameter.grad is not None
        lr, device = self._trained.rate(group, lr_factor), step.device
        numbers = [self._execution.number(value, device) for value in (lr, 1 - lr * group.weight_decay)]
        tables = {moment: each.tables(device) for moment, each in kept.items()}
        grouped = any(each.grouped for each in kept.values())
        size = group_of(columns_of(local_piece(parameter))) if grouped else 1
        for rows in in_parts(parameter, at_once=self._execution.at_once, group=size):
            part = partial(_in_groups, rows, min(size, rows.right - rows.left)) if grouped else rows.of
            stored = {
                moment: {
                    key.removeprefix(moment): part(state[key]) if key == moment else _scales(rows, state[key])
                    for key in (moment, f"{moment}_scale")  # whole names: one moment's name may begin another's
                    if key in state
                }
                for moment in kept
            }
            noise = {moment: self._trained.noise(name, moment, rows) for moment, each in kept.items() if each.rounded}
            self._execution(
                _change, (part(parameter), stored), part(parameter.grad), self._rule, kept, tables, numbers,
                scalars, step, noise, self._trained.noise_of_weight(name, rows), skip,
            )  # fmt: skip


def _in_groups(rows: Rows, size: int, tensor: torch.Tensor) -> torch.Tensor:
    return rows.of(tensor).view(rows.stop - rows.start, -1, size)


def _scales(rows: Rows, tensor: torch.Tensor) -> torch.Tensor:
    return rows.of(tensor, MOMENT_GROUP).unsqueeze(-1)


def _change(
    into: tuple[torch.Tensor, Mapping[str, Tensors]],
    gradient: torch.Tensor,
    rule: Rule,
    kept: Mapping[str, Kept],
    tables: Mapping[str, Tensors],
    numbers: Sequence[Any],
    scalars: Scalars,
    step: torch.Tensor,
    noise: Tensors,
    noise_of_weight: torch.Tensor | None,
    skip: torch.Tensor,
) -> None:
    """Update some rows of a weight and its moments. `numbers`: the learning rate, and what remains by decay."""
    (weight, stored), (lr, remains) = into, numbers
    dtype = update_dtype(weight)
    moments = {moment: each.read(stored[moment], tables[moment], dtype) for moment, each in kept.items()}
    direction, new = rule.direction(gradient.to(dtype), moments, scalars)
    write(weight, decayed(weight, remains) - direction * lr, noise_of_weight, step, skip)
    for moment, each in kept.items():
        drawn_now = drawn(noise[moment], step, weight) if each.rounded else None
        for suffix, tensor in each.write(new[moment], tables[moment], drawn_now).items():
            replace(stored[moment][suffix], tensor, skip)
