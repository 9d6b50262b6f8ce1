"""What optimizers share: if `found_inf` is 1 nothing changes, and no host waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from raytune_fsdp.base.random import derive_key
from raytune_fsdp.step.optim.execution import BY_OPERATION, Execution
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


@dataclass(frozen=True, slots=True)
class UpdatesAfter:
    """An optimizer that has something else done before each update."""

    before: Callable[[], None]
    optimizer: Optimizer

    def init_state(self) -> None:
        self.optimizer.init_state()

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return self.optimizer.state_tensors()

    def step(self, lr_factor: float, found_inf: torch.Tensor) -> None:
        self.before()
        self.optimizer.step(lr_factor, found_inf)


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
        self._noise: dict[tuple[str, str, int, int], torch.Tensor] = {}

    def taken(self) -> list[tuple[str, Group]]:
        """Return the weights that have a gradient, with their groups."""
        return [(name, group) for group in self.groups for name in group.names if self.named[name].grad is not None]

    def rate(self, group: Group, lr_factor: float) -> float:
        return self._lr * group.lr_ratio * lr_factor

    def count(self, names: Sequence[str], skip: torch.Tensor) -> list[torch.Tensor]:
        """Count these updates and return their numbers, which key their noise. A skipped update is not counted."""
        steps = [self.state[name]["step"] for name in names]
        if steps:
            torch._foreach_add_(steps, [1 - skip.to(steps[0].dtype)] * len(steps))
        return steps

    def noise(self, name: str, what: str, rows: Rows) -> torch.Tensor:
        """Return what the noise of these rows depends on besides the step."""
        key = name, what, rows.first, rows.first_column
        if key not in self._noise:
            device = self.named[name].device
            self._noise[key] = Noise(self._seed, name, what).at(rows.first, rows.first_column, device)
        return self._noise[key]

    def noise_of_weight(self, name: str, rows: Rows) -> torch.Tensor | None:
        """Return the same for the weight itself; None: its new values are rounded to the nearest."""
        rounded = self._stochastic and self.named[name].dtype == torch.bfloat16
        return self.noise(name, "weight", rows) if rounded else None

    def to_weights(self, flag: torch.Tensor) -> torch.Tensor:
        """Return a flag on the device of the weights."""
        return at(next(iter(self.named.values())).device, flag)

    def drop_gradients(self) -> None:
        for parameter in self.named.values():
            parameter.grad = None


class Updates:
    """An optimizer of trained weights: a kind of it says what their moments begin as, and how they are updated."""

    def __init__(self, weights: Trained, execution: Execution = BY_OPERATION) -> None:
        self._trained, self._execution = weights, execution
        self._agreed = False
        self.groups = weights.groups

    def init_state(self) -> None:
        for name, parameter in self._trained.named.items():
            if name not in self._trained.state:
                counted = torch.zeros((), dtype=torch.float32, device=parameter.device)
                self._trained.state[name] = {"step": counted, **self._moments(name, parameter)}

    def state_tensors(self) -> dict[str, torch.Tensor]:
        state = self._trained.state
        return {f"{name}.{key}": each for name in self._trained.named for key, each in state.get(name, {}).items()}

    @torch.no_grad()
    def step(self, lr_factor: float, found_inf: torch.Tensor) -> None:
        self.init_state()
        skip = self._trained.to_weights(found_inf) > 0
        if self._execution.needs_trial and not self._agreed:  # tried without effect, for ranks to agree on how it runs
            self._take(lr_factor, torch.ones_like(skip))
            self._execution.agree()
            self._agreed = True
        self._take(lr_factor, skip)
        self._trained.drop_gradients()

    def _moments(self, name: str, parameter: nn.Parameter) -> Mapping[str, torch.Tensor]:
        """Return the moments that a weight begins with."""
        raise NotImplementedError

    def _take(self, lr_factor: float, skip: torch.Tensor) -> None:
        """Update the weights that have a gradient; none changes where `skip` is true."""
        raise NotImplementedError


def replace(tensor: torch.Tensor, value: torch.Tensor, skip: torch.Tensor) -> None:
    """Write the new value in place, unless the update is skipped; a value that is not finite then has no effect."""
    tensor.copy_(torch.where(skip, tensor, value.to(tensor.dtype)))


def write(
    weight: torch.Tensor, value: torch.Tensor, noise: torch.Tensor | None, step: torch.Tensor, skip: torch.Tensor
) -> None:
    """Give rows of a weight their new value, rounded to its type: by `noise` if there is some."""
    if noise is not None:
        value = to_bf16(value.float(), drawn(noise, step, value))
    replace(weight, value, skip)


def update_dtype(weight: torch.Tensor) -> torch.dtype:
    """Return the type in which an update is computed: fp32 for 16-bit weights."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def decayed(weight: torch.Tensor, kept: torch.Tensor | float) -> torch.Tensor:
    """Return the weight after decoupled decay, in the type of its update. `kept`: what it is multiplied with."""
    return weight.to(update_dtype(weight)) * kept


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

    def at(self, first: int, left: int, device: torch.device) -> torch.Tensor:
        """Return all that `drawn` needs to know of rows and columns that begin here, besides the step."""
        return torch.tensor([*self._keys, first, left], dtype=torch.int32, device=device)


def drawn(noise: torch.Tensor, step: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return noise (`Noise.at`) for a matrix like this, at a step: int32. Its columns may have any number of axes."""
    rows, *columns = like.shape
    places = torch.arange(rows, device=noise.device, dtype=torch.int32) + (noise[2] + noise[1])
    lines = _mix(_mix(places) ^ _mix(step.to(torch.int32) + noise[0]))
    # Columns are hashed, too: added as they are, two rows with close hashes would have the same noise, shifted.
    across = _mix(torch.arange(math.prod(columns), device=noise.device, dtype=torch.int32) + noise[3])
    lines, across = lines.view(rows, *(1 for _ in columns)), across.view(columns)
    return (_mix(lines ^ across) >> 16).bitwise_and_(_LOW)


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
