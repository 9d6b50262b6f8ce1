"""What a step minimises: the cross-entropy of its targets, a loss of the user's own, one of groups of documents
(groups.py), or a divergence from a teacher's predictions (distillation.py), and what a run adds to it.

Each token's loss is computed in two ways, which are next to each other here: from all logits of a micro-batch, where
torch finds the gradient (`losses_of_targets`), and from a chunk's, with the gradient (`losses_and_gradients`).
tests/unit/test_head.py compares both with the book.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from raytune_fsdp.base.batch import MicroBatch
from raytune_fsdp.config.sections.train import TrainConfig
from raytune_fsdp.model.pieces.sums import summed
from raytune_fsdp.model.pieces.vocabulary import VocabularyPart

if TYPE_CHECKING:
    from raytune_fsdp.model.objective.distillation import Distillation
    from raytune_fsdp.model.objective.documents import DocumentLosses
    from raytune_fsdp.model.objective.groups import GroupStandIn, SumOverStep
    from raytune_fsdp.model.objective.own_loss import Bends
    from raytune_fsdp.model.objective.routers import Routers
    from raytune_fsdp.model.objective.scores import LossOfGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What is added to the cross-entropy. The default is plain cross-entropy, as in evaluation."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    neftune_noise_alpha: float | None = None
    routers: Routers | None = None
    """Watches the routers of a mixture of experts, and adds their losses."""

    documents: DocumentLosses | None = None
    """Notes the losses of documents, which do not change what is minimised."""

    own: Bends | None = None
    """Puts values of the user's own in the place of the cross-entropies."""

    groups: LossOfGroups | GroupStandIn | None = None
    """Minimises the losses of groups in their place."""

    distillation: Distillation | None = None
    """Minimises the divergence from a teacher's predictions in their place."""

    @classmethod
    def of(
        cls,
        train: TrainConfig,
        routers: Routers | None = None,
        documents: DocumentLosses | None = None,
        own: Bends | None = None,
        groups: LossOfGroups | GroupStandIn | None = None,
        distillation: Distillation | None = None,
    ) -> Objective:
        return cls(
            label_smoothing=train.label_smoothing,
            z_loss=train.z_loss,
            neftune_noise_alpha=train.neftune_noise_alpha,
            routers=routers,
            documents=documents,
            own=own,
            groups=groups,
            distillation=distillation,
        )

    def of_step(self, counts: torch.Tensor, over_step: SumOverStep) -> Objective:
        """Return what a step with these `StepCounts` minimises. Collective."""
        return self if self.groups is None else replace(self, groups=self.groups.of_step(counts, over_step))

    def of_batch(self, model: PreTrainedModel, batch: MicroBatch) -> Objective:
        """Return what is minimised of a micro-batch. Collective."""
        return self if self.groups is None else replace(self, groups=self.groups.of_batch(model, batch))

    @property
    def bends(self) -> Bends | None:
        """What needs the log-probabilities of a micro-batch before there are losses; None: nothing."""
        return self.own or self.groups

    @property
    def experts(self) -> tuple[int, int]:
        """The number of layers with watched routers, and of experts in each."""
        return (0, 0) if self.routers is None else (self.routers.layers, self.routers.experts)

    @property
    def bends_losses(self) -> bool:
        """Whether the loss of a token is not its plain cross-entropy."""
        return bool(self.label_smoothing or self.z_loss)


CROSS_ENTROPY = Objective()


def losses_of_targets(
    logits: torch.Tensor, log_probabilities: torch.Tensor, places: torch.Tensor, ids: torch.Tensor, objective: Objective
) -> torch.Tensor:
    """Compute the targets' losses with label smoothing and z-loss, the square of the logarithm of the softmax's sum."""
    each = -log_probabilities[places, ids]
    if objective.label_smoothing:
        each = torch.lerp(each, -log_probabilities.mean(-1)[places], objective.label_smoothing)
    if objective.z_loss:
        each = each + objective.z_loss * logits.to(each.dtype).logsumexp(-1)[places].square()
    return each


def losses_and_gradients(
    logits: torch.Tensor, ids: torch.Tensor, objective: Objective, vocabulary: VocabularyPart | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return losses, and whether the most likely token is right. Leave the gradient of the losses' sum in `logits`."""
    smoothing, z = objective.label_smoothing, objective.z_loss
    count, own, mine = (logits.shape[-1], ids, None) if vocabulary is None else (vocabulary.whole, *vocabulary.own(ids))
    best, at = logits.max(-1) if vocabulary is None else vocabulary.best(logits)
    picked = logits.gather(-1, own[:, None])[:, 0]
    mean = picked
    if smoothing:
        mean = logits.mean(-1) if vocabulary is None else logits.sum(-1) / count
    sums = logits.sub_(best[:, None]).exp_().sum(-1)
    if vocabulary is not None and mine is not None:
        sums, picked, mean = summed(vocabulary.group, torch.stack([sums, torch.where(mine, picked, 0), mean]))
    losses = sums.log() + (best - picked)
    logits.div_(sums[:, None])
    if z:
        whole = sums.log() + best
        losses += z * whole.square()
        logits.mul_(1 + 2 * z * whole[:, None])
    if smoothing:
        losses += smoothing * (picked - mean)
        logits.sub_(smoothing / count)
    # Not scatter_add_, which on a GPU has no kernel that repeats its bits for matrices.
    taken = 1 - smoothing if mine is None else (1 - smoothing) * mine[:, None].to(logits.dtype)
    logits.scatter_(-1, own[:, None], logits.gather(-1, own[:, None]) - taken)
    return losses, at == ids
