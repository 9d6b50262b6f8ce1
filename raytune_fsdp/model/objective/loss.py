"""Compute the loss of a micro-batch: a sum over its targets, to be divided by the targets of the whole global batch."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from raytune_fsdp.base.batch import IGNORE, MicroBatch
from raytune_fsdp.model.attention.choose import inputs_of, logits_of
from raytune_fsdp.model.objective.chunked_head import LossHead
from raytune_fsdp.model.objective.embedding_noise import noisy_embeddings
from raytune_fsdp.model.objective.losses import Losses
from raytune_fsdp.model.objective.objective import CROSS_ENTROPY, Objective, losses_of_targets
from raytune_fsdp.model.objective.own_loss import bent_sum
from raytune_fsdp.model.objective.score_head import ScoreHead


def micro_batch_loss(model: PreTrainedModel, batch: MicroBatch, objective: Objective = CROSS_ENTROPY) -> Losses:
    """Compute the losses of a micro-batch from its tokens. All ranks must call this (sharded forward)."""
    objective = objective.of_batch(model, batch)
    routers = objective.routers
    if routers is None:
        losses = _token_losses(model, batch, objective)
    else:
        with routers.watching(batch):
            losses = _token_losses(model, batch, objective)
        losses = routers.add_to(losses, batch)
    if not batch.counts:
        losses = _not_counted(losses)
    if objective.documents is not None:
        objective.documents.add(losses, batch)
    return losses


def _not_counted(losses: Losses) -> Losses:
    """Return losses of zero, for sums over ranks, that keep their (zero) gradients."""
    return replace(
        losses,
        total=losses.total - losses.total.detach(),
        each=torch.zeros_like(losses.each),
        right=torch.zeros_like(losses.right),
        groups=None if losses.groups is None else losses.groups._replace(figures=0 * losses.groups.figures),
        load=tuple(torch.zeros_like(each) for each in losses.load),
    )


def _token_losses(model: PreTrainedModel, batch: MicroBatch, objective: Objective) -> Losses:
    head = model.get_output_embeddings()
    with noisy_embeddings(model, batch, objective.neftune_noise_alpha):
        if not isinstance(head, LossHead | ScoreHead):
            logits = logits_of(model, batch.input_ids, batch.position_ids, batch.borders)
            return plain_losses(logits, batch, objective)
        with head.aimed_at(batch.targets, objective):
            model(**inputs_of(model, batch.input_ids, batch.position_ids, batch.borders))
    assert head.losses is not None
    return head.losses


def plain_losses(logits: torch.Tensor, batch: MicroBatch, objective: Objective = CROSS_ENTROPY) -> Losses:
    """Compute the losses of a micro-batch from all of its logits, (samples, tokens, vocabulary)."""
    total, log_probabilities = _summed(logits, _targets_of(batch))
    places, ids = batch.targets.places, batch.targets.ids
    fixed = log_probabilities.detach()
    each, right = -fixed[places, ids], fixed.argmax(-1)[places] == ids
    if objective.bends_losses:
        bent = losses_of_targets(logits.reshape(len(log_probabilities), -1), log_probabilities, places, ids, objective)
        total, each = bent.sum(), bent.detach()
    groups = None
    if objective.bends is not None:
        total, found = bent_sum(objective.bends, log_probabilities[places, ids], batch.targets)
        each, groups = found.values, found.recorded
    if objective.distillation is not None:
        return objective.distillation.lesson(batch.targets, each).losses(logits, log_probabilities, right)
    return Losses(total=total, each=each, right=right, groups=groups)


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum the cross-entropies of all target tokens, in at least float32."""
    # Position i predicts token i+1, so the labels move by one, and not the logits, which would have to be copied.
    return _summed(logits, F.pad(labels[:, 1:], (0, 1), value=IGNORE).reshape(-1))[0]


def _targets_of(batch: MicroBatch) -> torch.Tensor:
    """Return the target at each place, with the samples laid out one after another."""
    # Not from the labels: the last token of a part predicts the first token of the next part.
    targets = torch.full((batch.input_ids.numel(),), IGNORE, device=batch.input_ids.device)
    targets[batch.targets.places] = batch.targets.ids
    return targets


def _summed(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the cross-entropies of the targets, and the logarithms of all probabilities."""
    flat = logits.reshape(-1, logits.shape[-1])
    if flat.dtype in (torch.bfloat16, torch.float16):
        flat = flat.float()
    log_probabilities = F.log_softmax(flat, -1)
    return F.nll_loss(log_probabilities, targets, ignore_index=IGNORE, reduction="sum"), log_probabilities
