"""What optimizers whose kernels know no `found_inf` have in common: nothing changes where it is 1, and nobody waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from raytune_fsdp.step.optim.groups import Group
from raytune_fsdp.step.optim.noise import Noise, to_bf16
from raytune_fsdp.step.optim.pieces import Rows, at


class Trained:
    """The trained weights of an optimizer, how many updates each has had, and how an update is written to one."""

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        groups: Sequence[Group],
        *,
        lr: float,
        seed: int,
        stochastic_rounding: bool,
    ) -> None:
        self.named = {name: named[name] for group in groups for name in group.names}
        self.groups = [group for group in groups if group.names]
        self.state: dict[str, dict[str, torch.Tensor]] = {}
        self._lr = lr
        self._seed = seed
        self._stochastic = stochastic_rounding

    def taken(self) -> list[tuple[str, Group]]:
        """The weights that have a gradient."""
        return [(name, group) for group in self.groups for name in group.names if self.named[name].grad is not None]

    def rate(self, group: Group, lr_factor: float) -> float:
        return self._lr * group.lr_ratio * lr_factor

    def skipped(self, found_inf: torch.Tensor) -> torch.Tensor:
        """Whether nothing may change, where the weights are."""
        return at(next(iter(self.named.values())).device, found_inf) > 0

    def start(self, name: str) -> dict[str, torch.Tensor]:
        """The state that every weight has, before its moments."""
        return {"step": torch.zeros((), dtype=torch.float32, device=self.named[name].device)}

    def count(self, name: str, skip: torch.Tensor) -> torch.Tensor:
        """The number of this update, by which its noise is looked up: one that is skipped is not counted."""
        step = self.state[name]["step"]
        step.add_(1 - skip.to(step.dtype))
        return step

    def noise(self, name: str, what: str, step: torch.Tensor, rows: Rows, like: torch.Tensor) -> torch.Tensor:
        count, columns = like.shape
        return Noise(self._seed, name, what).of(step, rows.first, count, columns, rows.first_column)

    def write(
        self, name: str, weight: torch.Tensor, value: torch.Tensor, step: torch.Tensor, rows: Rows, skip: torch.Tensor
    ) -> None:
        """Give these rows of a weight their new value, rounded to its type."""
        if self._stochastic and weight.dtype == torch.bfloat16:
            value = to_bf16(value.float(), self.noise(name, "weight", step, rows, value))
        replace(weight, value, skip)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {f"{name}.{key}": tensor for name in self.named for key, tensor in self.state.get(name, {}).items()}

    def drop_gradients(self) -> None:
        for parameter in self.named.values():
            parameter.grad = None


def replace(tensor: torch.Tensor, value: torch.Tensor, skip: torch.Tensor) -> None:
    """The new value, in place, unless the update is skipped. A new value that is not finite is then never looked at."""
    tensor.copy_(torch.where(skip, tensor, value.to(tensor.dtype)))


def computes_in(weight: torch.Tensor) -> torch.dtype:
    """The type of an update: fp32 for 16-bit weights."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def decayed(weight: torch.Tensor, lr: float, weight_decay: float) -> torch.Tensor:
    """The weight, in the type of its update, after decoupled decay."""
    wide = weight.to(computes_in(weight))
    return wide * (1 - lr * weight_decay) if weight_decay else wide
