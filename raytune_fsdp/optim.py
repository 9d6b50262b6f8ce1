"""Optimizers over a sharded model, and the learning rate as a pure function of the step.

A new optimizer is a class with the three methods of `Optimizer`, a branch in `build_optimizer`, and a field in
`OptimConfig` that chooses it, with its entry in `identity.ABSENT`. How an optimizer whose kernel knows no `found_inf`
skips an update: `Momentum` in tests/distributed/test_precision.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from raytune_fsdp.config import OptimConfig
from raytune_fsdp.config.method import Method
from raytune_fsdp.config.optim import OneCycleSchedule
from raytune_fsdp.plan import Plan

_SECOND = re.compile(r"\.lora_(B|embedding_B)\.")


class Optimizer(Protocol):
    """What training and checkpoints require of an optimizer. No method waits for the device."""

    def init_state(self) -> None:
        """Make the state that the first step would make, to load into it or to save it before any step."""

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """This rank's part of every tensor of the state, by `<parameter>.<moment>`. Call `init_state` first."""

    def step(self, lr_factor: float, found_inf: torch.Tensor) -> None:
        """Update the weights from their gradients at this fraction of the peak learning rate, and drop the gradients.

        Where `found_inf` (a number on the device) is 1, weights and state stay as they are, bit for bit.
        """


class AdamW:
    """Fused AdamW with no decay on norms, biases and embeddings.

    It works on this rank's pieces as plain tensors. Given DTensors, torch asks of every list of them how the operation
    would have to be sharded: 1.0 s in the first step with 147 weights, and 10 ms in every other one (the kernel: 3.5).
    """

    def __init__(self, model: nn.Module, config: OptimConfig, method: Method | None = None) -> None:
        self._config = config
        self._named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._state: dict[str, dict[str, torch.Tensor]] = {}
        self.groups = _groups(list(self._named), undecayed_names(model), config, method)

    def init_state(self) -> None:
        for name, parameter in self._named.items():
            if name not in self._state:
                self._state[name] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"{name}.{moment}": tensor for name in self._named for moment, tensor in self._state.get(name, {}).items()
        }

    @torch.no_grad()
    def step(self, lr_factor: float, found_inf: torch.Tensor) -> None:
        self.init_state()
        found_inf = at(next(iter(self._named.values())).device, found_inf)
        for group in self.groups:
            taken = [name for name in group.names if self._named[name].grad is not None]
            # Fused, because only that kernel takes a flag on the device: if it is 1, weights, moments and the count of
            # steps stay as they are, and the host never waits for it.
            adamw(
                [local_piece(self._named[name]) for name in taken],
                local_gradients(self._named[name] for name in taken),
                [local_piece(self._state[name]["exp_avg"]) for name in taken],
                [local_piece(self._state[name]["exp_avg_sq"]) for name in taken],
                [],
                [self._state[name]["step"] for name in taken],
                fused=True,
                found_inf=found_inf,
                amsgrad=False,
                maximize=False,
                lr=self._config.lr * group.lr_ratio * lr_factor,
                beta1=self._config.beta1,
                beta2=self._config.beta2,
                eps=self._config.eps,
                weight_decay=group.weight_decay,
            )
        for parameter in self._named.values():
            parameter.grad = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Weights that are updated alike, by name."""

    names: tuple[str, ...]
    weight_decay: float
    lr_ratio: float = 1.0
    """Their learning rate, as a multiple of the others'."""


def _groups(names: Sequence[str], plain: Set[str], config: OptimConfig, method: Method | None) -> tuple[Group, ...]:
    """The weights with decay and those without; with LoRA+ the second matrices of adapters apart from both."""
    ratio = getattr(method, "lr_ratio", None)
    fast = [name for name in names if ratio is not None and _SECOND.search(name)]
    rest = [name for name in names if name not in set(fast)]
    groups = (
        Group(names=tuple(name for name in rest if name not in plain), weight_decay=config.weight_decay),
        Group(names=tuple(name for name in rest if name in plain), weight_decay=0.0),
        Group(names=tuple(fast), weight_decay=config.weight_decay, lr_ratio=ratio or 1.0),
    )
    return tuple(group for group in groups if group.names)


def build_optimizer(model: nn.Module, config: OptimConfig, method: Method | None = None) -> Optimizer:
    """The optimizer of a run, over a model that is already sharded."""
    return AdamW(model, config, method)


def undecayed_names(model: nn.Module) -> set[str]:
    """Parameters without weight decay: everything with fewer than two dimensions, factors, and the embeddings.

    An output embedding that is tied to the input embedding is the same parameter; an untied one is a matrix like any
    other and decays.
    """
    embeddings = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        for name, _ in module.named_parameters(recurse=False)
    }
    # IA3's factors are vectors in the form of a matrix, and around one.
    return embeddings | {name for name, p in model.named_parameters() if p.ndim < 2 or ".ia3_l." in name}


def lr_factor(step: int, config: OptimConfig, plan: Plan) -> float:
    """Fraction of the peak learning rate at a step (1 for the first). Pure."""
    return multiplier(step, config, schedule_steps=plan.schedule_steps, warmup_steps=plan.warmup_steps)


def multiplier(step: int, config: OptimConfig, *, schedule_steps: int, warmup_steps: int) -> float:
    """The same, for a schedule of this length.

    Warmup reaches the peak at its last step. The decay starts from the peak one step later and would reach the floor
    one step after the schedule's end, where a run that goes on longer then stays.
    """
    schedule = config.schedule
    if step <= warmup_steps:
        return step / warmup_steps
    after = step - 1 - warmup_steps
    if schedule.type == "constant":
        return 1.0
    if schedule.type == "inverse_sqrt":
        timescale = schedule.timescale or warmup_steps or 10_000
        return math.sqrt(timescale / (timescale + after))
    if schedule.type == "one_cycle":
        return _one_cycle(step, schedule, schedule_steps)
    progress = min(1.0, after / max(1, schedule_steps - warmup_steps))
    if schedule.type == "linear":
        shape = 1.0 - progress
    elif schedule.type == "cosine":
        shape = _half_cosine(1.0, 0.0, progress)
    elif schedule.type == "polynomial":
        shape = (1.0 - progress) ** schedule.power
    else:
        decay_steps = max(1, round(schedule.decay * schedule_steps))
        shape = min(1.0, max(0, schedule_steps - (step - 1)) / decay_steps)
    return schedule.floor + (1.0 - schedule.floor) * shape


def _one_cycle(step: int, schedule: OneCycleSchedule, steps: int) -> float:
    """From the first step to the peak, and from there to the last one."""
    peak = max(0.0, schedule.rise * steps - 1)
    if step - 1 < peak:
        return _half_cosine(schedule.start, 1.0, (step - 1) / peak)
    return _half_cosine(1.0, schedule.floor, min(1.0, (step - 1 - peak) / max(1.0, steps - 1 - peak)))


def _half_cosine(first: float, last: float, progress: float) -> float:
    return last + (first - last) * 0.5 * (1.0 + math.cos(math.pi * progress))


def at(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """A number where weights and gradients are, or back. With parallel.cpu_offload that is another place, and the host
    waits; otherwise nothing is done."""
    return tensor if tensor.device == device else tensor.to(device)


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """This rank's shard of every gradient, as plain tensors that share memory with it."""
    return [local_piece(p.grad) for p in parameters if p.grad is not None]


def local_piece(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, without a copy."""
    with torch.no_grad():  # without gradients to_local looks it up; with them it is an operation of autograd
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
