"""Optimizers over a sharded model, and the learning rate as a pure function of the step.

A new optimizer is a class with the three methods of `Optimizer`, a branch in `build_optimizer`, and a field in
`OptimConfig` that chooses it, with its entry in `identity.ABSENT`. How an optimizer whose kernel knows no `found_inf`
skips an update: `Momentum` in tests/distributed/test_precision.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from raytune_fsdp.config import OptimConfig
from raytune_fsdp.plan import Plan


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
    """Fused AdamW with no decay on norms, biases and embeddings."""

    def __init__(self, model: nn.Module, config: OptimConfig) -> None:
        plain = undecayed_names(model)
        self._named = dict(model.named_parameters())
        decayed = [p for name, p in self._named.items() if name not in plain]
        undecayed = [p for name, p in self._named.items() if name in plain]
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": undecayed, "weight_decay": 0.0},
        ]
        self._peak = config.lr
        # Fused, because only that kernel takes a `found_inf` flag on the device: if it is 1, weights, moments and the
        # step count of the bias correction stay as they are, and the host never waits for the flag.
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )

    @property
    def groups(self) -> list[dict[str, object]]:
        """The weights with decay and those without."""
        return self._adamw.param_groups

    def init_state(self) -> None:
        for parameter in self._named.values():
            if parameter not in self._adamw.state:
                self._adamw.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"{name}.{moment}": tensor
            for name, parameter in self._named.items()
            for moment, tensor in self._adamw.state.get(parameter, {}).items()
        }

    def step(self, lr_factor: float, found_inf: torch.Tensor) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = self._peak * lr_factor
        # The attribute through which torch's GradScaler hands the flag to the fused kernel.
        place = next(iter(self._named.values())).device
        self._adamw.found_inf = at(place, found_inf)  # type: ignore[attr-defined]
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)


def build_optimizer(model: nn.Module, config: OptimConfig) -> Optimizer:
    """The optimizer of a run, over a model that is already sharded."""
    return AdamW(model, config)


def undecayed_names(model: nn.Module) -> set[str]:
    """Parameters without weight decay: everything with fewer than two dimensions, and the embeddings.

    An output embedding that is tied to the input embedding is the same parameter; an untied one is a matrix like any
    other and decays.
    """
    embeddings = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        for name, _ in module.named_parameters(recurse=False)
    }
    return embeddings | {name for name, p in model.named_parameters() if p.ndim < 2}


def lr_factor(step: int, config: OptimConfig, plan: Plan) -> float:
    """Fraction of the peak learning rate at a step (1 for the first). Pure."""
    return multiplier(step, config, schedule_steps=plan.schedule_steps, warmup_steps=plan.warmup_steps)


def multiplier(step: int, config: OptimConfig, *, schedule_steps: int, warmup_steps: int) -> float:
    """The same, for a schedule of this length.

    Warmup reaches the peak at its last step. The decay starts from the peak one step later and would reach the floor
    one step after the schedule's end, where a run that goes on longer then stays.
    """
    if step <= warmup_steps:
        return step / warmup_steps
    progress = min(1.0, (step - 1 - warmup_steps) / max(1, schedule_steps - warmup_steps))
    schedule = config.schedule
    if schedule.type == "constant":
        return 1.0
    if schedule.type == "linear":
        shape = 1.0 - progress
    elif schedule.type == "cosine":
        shape = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        decay_steps = max(1, round(schedule.decay * schedule_steps))
        shape = min(1.0, max(0, schedule_steps - (step - 1)) / decay_steps)
    return schedule.floor + (1.0 - schedule.floor) * shape


def at(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """A number where weights and gradients are, or back. With parallel.cpu_offload that is another place, and the host
    waits; otherwise nothing is done."""
    return tensor if tensor.device == device else tensor.to(device)


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """This rank's shard of every gradient, as plain tensors that share memory with it."""
    grads = (p.grad for p in parameters if p.grad is not None)
    return [g.to_local() if isinstance(g, DTensor) else g for g in grads]
