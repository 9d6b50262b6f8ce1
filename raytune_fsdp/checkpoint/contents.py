"""The tensors of a run's state, under flat names: `model.<name>`, `optim.<parameter>.<moment>`, `initial.<name>`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from raytune_fsdp.base.measured import Digest
from raytune_fsdp.base.row_hashes import root
from raytune_fsdp.model.adapters.attach import adapter_tensors, initial_adapters, is_adapted
from raytune_fsdp.model.weights.keys import owned_tensors
from raytune_fsdp.step.optim.update import Optimizer

MODEL = "model."
"""Prefix of the model's own tensors."""

INITIAL = "initial."
"""Prefix of what adapters began as, if that was taken out of their weights."""


def roots_of(digests: Mapping[str, str]) -> Digest:
    """Return the digest of a checkpoint's weights, and that of everything in it, from those of tensors and state."""
    weights = {name: each for name, each in digests.items() if name.startswith(MODEL)}
    return Digest(weights=root(weights), everything=root(digests))


def tensors_of(model: PreTrainedModel, optimizer: Optimizer | None) -> dict[str, torch.Tensor]:
    """Return this rank's part of every tensor in a checkpoint: of a network with adapters these, never their base.

    The optimizer must have its state already.
    """
    own = adapter_tensors(model) if is_adapted(model) else owned_tensors(model)
    state = {MODEL + name: tensor.detach() for name, tensor in own.items()}
    state.update((INITIAL + name, tensor) for name, tensor in initial_adapters(model).items())
    if optimizer is not None:
        state.update((f"optim.{name}", tensor) for name, tensor in optimizer.state_tensors().items())
    return state
