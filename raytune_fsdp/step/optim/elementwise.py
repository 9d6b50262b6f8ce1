"""Optimizers that update every number by its own gradient and moments. Each is a rule, and `Elementwise` applies it.

Every operation is one that IEEE rounds once, so a number's update has the same bits wherever the tensor is cut. `lerp`
and `addcmul` are not used: vector units fuse them, but not always at the ends of a tensor's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from raytune_fsdp.config import OptimConfig
from raytune_fsdp.config.sections.optimizers import LionOptimizer, SgdOptimizer
from raytune_fsdp.step.optim.moments import MOMENT_GROUP, AsType, Bf16, EightBit, Kept, is_quantized
from raytune_fsdp.step.optim.pieces import in_parts
from raytune_fsdp.step.optim.update import Trained, decayed, replace, update_dtype

Moments = Mapping[str, torch.Tensor]


class Rule(Protocol):
    """Turns a gradient into the direction in which its weight moves."""

    def kept(self, parameter: torch.Tensor) -> Mapping[str, Kept]:
        """Return how each moment of a parameter is kept, by the moment's name."""

    def direction(self, gradient: torch.Tensor, moments: Moments, step: torch.Tensor) -> tuple[torch.Tensor, Moments]:
        """Return what to subtract at a learning rate of 1, and the new moments. `step` is 1 in the first step."""


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

    def direction(self, gradient: torch.Tensor, moments: Moments, step: torch.Tensor) -> tuple[torch.Tensor, Moments]:
        first = moments["exp_avg"] * self._beta1 + gradient * (1 - self._beta1)
        second = moments["exp_avg_sq"] * self._beta2 + gradient * gradient * (1 - self._beta2)
        ages = step.double()
        mean = first / (1 - self._beta1**ages)
        root = (second / (1 - self._beta2**ages)).sqrt()
        return mean / (root + self._eps), {"exp_avg": first, "exp_avg_sq": second}


class SgdRule:
    """Moves by gradients, or by their running sum."""

    def __init__(self, chosen: SgdOptimizer) -> None:
        self._momentum, self._nesterov = chosen.momentum, chosen.nesterov

    def kept(self, parameter: torch.Tensor) -> Mapping[str, Kept]:
        return {"momentum": AsType()} if self._momentum else {}

    def direction(self, gradient: torch.Tensor, moments: Moments, step: torch.Tensor) -> tuple[torch.Tensor, Moments]:
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

    def direction(self, gradient: torch.Tensor, moments: Moments, step: torch.Tensor) -> tuple[torch.Tensor, Moments]:
        mean = moments["exp_avg"]
        sign = (mean * self._beta1 + gradient * (1 - self._beta1)).sign()
        return sign, {"exp_avg": mean * self._beta2 + gradient * (1 - self._beta2)}


RULES: Mapping[str, Callable[[Any], Rule]] = {"sgd": SgdRule, "lion": LionRule}
"""The rules that are made of a section of `optim.optimizer` alone, by its type."""


class Elementwise:
    """An optimizer that applies a rule to every weight."""

    def __init__(self, weights: Trained, rule: Rule) -> None:
        self._trained = weights
        self._kept = {name: rule.kept(parameter) for name, parameter in weights.named.items()}
        self._rule = rule
        self.groups = weights.groups

    def init_state(self) -> None:
        for name, parameter in self._trained.named.items():
            if name not in self._trained.state:
                moments = {
                    moment + suffix: tensor
                    for moment, kept in self._kept[name].items()
                    for suffix, tensor in kept.zeros(parameter).items()
                }
                self._trained.state[name] = {**self._trained.start(name), **moments}

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return self._trained.state_tensors()

    @torch.no_grad()
    def step(self, lr_factor: float, found_inf: torch.Tensor) -> None:
        self.init_state()
        skip = self._trained.skipped(found_inf)
        for name, group in self._trained.taken():
            self._update(name, self._trained.rate(group, lr_factor), group.weight_decay, skip)
        self._trained.drop_gradients()

    def _update(self, name: str, lr: float, weight_decay: float, skip: torch.Tensor) -> None:
        parameter, state, kept = self._trained.named[name], self._trained.state[name], self._kept[name]
        assert parameter.grad is not None
        step = self._trained.count(name, skip)  # 0 if the first step is skipped: the result of 0/0 is not written
        for rows in in_parts(parameter):
            weight = rows.of(parameter)
            dtype = update_dtype(weight)
            stored = {
                moment: {
                    key.removeprefix(moment): rows.of(state[key], 1 if key == moment else MOMENT_GROUP) for key in keys
                }
                for moment, keys in _keys(state, kept).items()
            }
            moments = {moment: kept[moment].read(stored[moment], dtype) for moment in kept}
            gradient = rows.of(parameter.grad).to(dtype)
            direction, new = self._rule.direction(gradient, moments, step)
            value = decayed(weight, lr, weight_decay) - direction * lr
            self._trained.write(name, weight, value, step, rows, skip)
            for moment, each in kept.items():
                noise = self._trained.noise(name, moment, step, rows, weight) if each.rounded else None
                for suffix, tensor in each.write(new[moment], noise).items():
                    replace(stored[moment][suffix], tensor, skip)


def _keys(state: Mapping[str, torch.Tensor], kept: Mapping[str, Kept]) -> dict[str, list[str]]:
    """Return the tensors of each moment. Compared by whole names: one moment's name may begin another's."""
    return {moment: [key for key in state if key in (moment, f"{moment}_scale")] for moment in kept}
