"""What optimizers without a kernel that takes `found_inf` share: if it is 1 nothing changes, and no host waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from raytune_fsdp.base.random import derive_key
from raytune_fsdp.step.optim.groups import Group
from raytune_fsdp.step.optim.pieces import Rows, at


class Optimizer(Protocol):
    """What training and checkpoints need from an optimizer. No method waits for the device."""

    def init_state(self) -> None:
        """Make the state that the first step would make, to load into it or to save it before any step."""

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's piece of every tensor of the state, by `<parameter>.<moment>`. Call `init_state` first."""

    def step(self, lr_factor: float, found_inf: torch.Tensor) -> None:
        """Update the weights from their gradients at this fraction of the peak learning rate, and drop the gradients.

        If `found_inf` (a number on the device) is 1, weights and state stay as they are, bit for bit.
        """


class Trained:
    """The trained weights of an optimizer, their state, and how an update is written to one."""

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
        """Return the weights that have a gradient, with their groups."""
        return [(name, group) for group in self.groups for name in group.names if self.named[name].grad is not None]

    def rate(self, group: Group, lr_factor: float) -> float:
        return self._lr * group.lr_ratio * lr_factor

    def skipped(self, found_inf: torch.Tensor) -> torch.Tensor:
        """Return whether nothing may change, on the device of the weights."""
        return at(next(iter(self.named.values())).device, found_inf) > 0

    def start(self, name: str) -> dict[str, torch.Tensor]:
        """Return the state that every weight has besides its moments."""
        return {"step": torch.zeros((), dtype=torch.float32, device=self.named[name].device)}

    def count(self, name: str, skip: torch.Tensor) -> torch.Tensor:
        """Count this update and return its number, which keys its noise. A skipped update is not counted."""
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
    """Write the new value in place, unless the update is skipped; a value that is not finite then has no effect."""
    tensor.copy_(torch.where(skip, tensor, value.to(tensor.dtype)))


def update_dtype(weight: torch.Tensor) -> torch.dtype:
    """Return the type in which an update is computed: fp32 for 16-bit weights."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def decayed(weight: torch.Tensor, lr: float, weight_decay: float) -> torch.Tensor:
    """Return the weight after decoupled decay, in the type of its update."""
    wide = weight.to(update_dtype(weight))
    return wide * (1 - lr * weight_decay) if weight_decay else wide


# Rounding that is right on average, with noise that is keyed by seed, parameter, step and place.
#
# Rounded to the nearest, a bf16 weight does not move unless an update is at least 1/512 of it, and a moment with
# `beta2=0.999`, which changes by 1/1000, stays where it is. Rounded up with a probability that is the remainder's size,
# both move.

LEVELS = 1 << 16
"""Noise is a whole number in [0, LEVELS): as many bits as bf16 leaves out of fp32."""

_LOW = 0xFFFF


class Noise:
    """The noise of one tensor of a run. It depends on a number's place in the whole tensor, never on the rank."""

    def __init__(self, seed: int, name: str, what: str) -> None:
        key = derive_key("rounding", seed, name, what)
        self._keys = tuple(_signed(key >> shift & 0xFFFFFFFF) for shift in (0, 32))

    def of(self, step: torch.Tensor, first: int, rows: int, columns: int, left: int = 0) -> torch.Tensor:
        """Return the noise of these rows and columns (a matrix of int32) at a step, which is a number on the device."""
        places = torch.arange(first, first + rows, device=step.device, dtype=torch.int32)
        now = _mix(step.to(torch.int32) + self._keys[0])
        lines = _mix(_mix(places + self._keys[1]) ^ now)
        # Columns are hashed, too: added as they are, two rows with close hashes would have the same noise, shifted.
        across = _mix(torch.arange(left, left + columns, device=step.device, dtype=torch.int32))
        return (_mix(lines[:, None] ^ across) >> 16).bitwise_and_(_LOW)


def _mix(value: torch.Tensor) -> torch.Tensor:
    """Scramble 32 bits, in place (a bijection: two rounds of shift, xor and multiply, with constants found by search).

    In int32: int64 takes twice the memory, and torch has few operations for unsigned numbers.
    """
    value.bitwise_xor_((value >> 16).bitwise_and_(_LOW))
    value.mul_(0x7FEB352D)
    value.bitwise_xor_((value >> 15).bitwise_and_(0x1FFFF))
    value.mul_(_signed(0x846CA68B))
    return value.bitwise_xor_((value >> 16).bitwise_and_(_LOW))


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def to_bf16(value: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Round fp32 to one of its two neighbours in bf16; the nearer one is the likelier."""
    # bf16 is the upper half of fp32. Infinities have only zeros in the lower half, and stay.
    bits = value.contiguous().view(torch.int32) + noise
    return bits.bitwise_and_(~_LOW).view(torch.float32).bfloat16()
