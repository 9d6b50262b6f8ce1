"""The loss of a block: a sum over its target tokens, to be divided by the targets of the whole global batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from raytune_fsdp.model.attention import logits_of
from raytune_fsdp.types import IGNORE, Batch


def block_loss(model: PreTrainedModel, block: Batch) -> torch.Tensor:
    """The loss of a block, from its tokens on. All ranks must call this (sharded forward)."""
    return token_loss_sum(logits_of(model, block.input_ids, block.position_ids), block.labels)


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the cross-entropies of all target tokens, in at least float32.

    Position i predicts token i+1, so the labels move by one instead of the logits, which would have to be copied.
    """
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE).reshape(-1)
    flat = logits.reshape(-1, logits.shape[-1])
    if flat.dtype in (torch.bfloat16, torch.float16):
        flat = flat.float()
    return F.cross_entropy(flat, targets, ignore_index=IGNORE, reduction="sum")
