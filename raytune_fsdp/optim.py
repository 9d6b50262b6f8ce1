"""AdamW over a sharded model, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from raytune_fsdp.config import OptimConfig
from raytune_fsdp.plan import Plan


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Fused AdamW with no decay on norms, biases and embeddings.

    Fused, because that kernel takes a `found_inf` flag on the device: a step can be skipped without asking the host.
    """
    plain = undecayed_names(model)
    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if name not in plain], "weight_decay": config.weight_decay},
        {"params": [p for name, p in named if name in plain], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def undecayed_names(model: nn.Module) -> set[str]:
    """Parameters that weight decay leaves alone: everything of one dimension, and the embeddings.

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


def lr_at(step: int, config: OptimConfig, plan: Plan) -> float:
    """Learning rate of a step (1 for the first)."""
    return config.lr * multiplier(step, config, schedule_steps=plan.schedule_steps, warmup_steps=plan.warmup_steps)


def multiplier(step: int, config: OptimConfig, *, schedule_steps: int, warmup_steps: int) -> float:
    """Fraction of the peak learning rate at a step (1 for the first). Pure.

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


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """This rank's shard of every gradient, as plain tensors that share memory with it."""
    from torch.distributed.tensor import DTensor

    grads = (p.grad for p in parameters if p.grad is not None)
    return [g.to_local() if isinstance(g, DTensor) else g for g in grads]
