"""The loss of a block: a sum over its target tokens, to be divided by the targets of the whole global batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from raytune_fsdp.model.attention import inputs_of, logits_of
from raytune_fsdp.model.head import Losses, LossHead
from raytune_fsdp.types import IGNORE, Batch


def block_loss(model: PreTrainedModel, block: Batch) -> Losses:
    """The losses of a block, from its tokens on. All ranks must call this (sharded forward)."""
    head = model.get_output_embeddings()
    if not isinstance(head, LossHead):
        return plain_losses(logits_of(model, block.input_ids, block.position_ids, block.borders), block)
    with head.aimed_at(block.targets):
        model(**inputs_of(model, block.input_ids, block.position_ids, block.borders))
    assert head.losses is not None
    return head.losses


def plain_losses(logits: torch.Tensor, block: Batch) -> Losses:
    """The losses of a block whose logits are all there, (samples, tokens, vocabulary)."""
    total, minus = _summed(logits, block.labels)
    places, ids = block.targets.places, block.targets.ids
    return Losses(total=total, each=-minus[places, ids], right=minus.argmax(-1)[places] == ids)


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the cross-entropies of all target tokens, in at least float32."""
    return _summed(logits, labels)[0]


def _summed(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """That sum, and without gradients the logarithms of all probabilities."""
    # Position i predicts token i+1, so the labels move by one instead of the logits, which would have to be copied.
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE).reshape(-1)
    flat = logits.reshape(-1, logits.shape[-1])
    if flat.dtype in (torch.bfloat16, torch.float16):
        flat = flat.float()
    log_probabilities = F.log_softmax(flat, -1)
    return F.nll_loss(log_probabilities, targets, ignore_index=IGNORE, reduction="sum"), log_probabilities.detach()
