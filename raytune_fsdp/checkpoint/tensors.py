"""The tensors of a run's state, under flat names: `model.<name>` and `optim.<parameter>.<moment>`."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from raytune_fsdp.model.keys import owned_tensors

MODEL = "model."
"""Before the names of the model's own tensors."""


def tensors_of(model: PreTrainedModel, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """Every tensor a checkpoint holds, as this rank has it. The optimizer must have its state already."""
    state = {MODEL + name: tensor.detach() for name, tensor in owned_tensors(model).items()}
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                state[f"optim.{name}.{key}"] = value
    return state


def init_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Give AdamW the state its first step would: zero moments, to load into or to save before any step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in optimizer.state:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
