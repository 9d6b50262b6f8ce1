"""An objective of scores: a reward model's pairs, documents with a class, documents with a number.

Each document has one target, its last token's place, where a head has computed its scores (model/score_head.py). What
is minimised of them is computed in fp64, and torch finds its slopes by the scores. A step divides by its targets; these
losses are to be divided by its groups, so they are multiplied by the ratio of the two, as those of groups.py are.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from raytune_fsdp.base.batch import GROUP_COLUMNS, MicroBatch, Targets
from raytune_fsdp.config.sections.objectives import (
    ClassificationObjective,
    ObjectiveChoice,
    RegressionObjective,
    RewardObjective,
)
from raytune_fsdp.model.objective.groups import GroupObjective, GroupStandIn, SumOverStep
from raytune_fsdp.model.objective.judged import SCORE_KINDS, figures_of
from raytune_fsdp.model.objective.loss import micro_batch_loss
from raytune_fsdp.model.objective.losses import Recorded
from raytune_fsdp.model.objective.own_loss import Bent
from raytune_fsdp.model.objective.told import Told
from raytune_fsdp.plan.step_counts import GROUPS, TARGETS

ScoreConfig = RewardObjective | ClassificationObjective | RegressionObjective


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredDocuments:
    """The documents of a micro-batch, in order, in fp64."""

    scores: torch.Tensor
    """[documents, outputs]."""
    weight: torch.Tensor
    wanted: torch.Tensor
    """The number of its class, its score, or for a pair how far its answers are to be apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreObjective:
    """The loss of a run's scores."""

    config: ScoreConfig
    group: ProcessGroup | None = None
    """The ranks that share the tokens of each micro-batch; None: no ranks do."""
    per_group: torch.Tensor | float = 1.0
    """In a step: its targets, divided by its groups."""

    @classmethod
    def of(cls, objective: ObjectiveChoice, group: ProcessGroup | None = None) -> Self:
        assert isinstance(objective, ScoreConfig)
        return cls(config=objective, group=group)

    @property
    def size(self) -> int:
        """How many documents make a group."""
        return 2 if isinstance(self.config, RewardObjective) else 1

    def of_step(self, counts: torch.Tensor, over_step: SumOverStep) -> Self:
        """Return the loss in a step with these `StepCounts`."""
        targets, groups = (counts[place].clamp(min=1).double() for place in (TARGETS, GROUPS))
        return replace(self, per_group=targets / groups)

    def of_batch(self, model: PreTrainedModel, batch: MicroBatch) -> Self:
        return self

    def bend(self, scores: torch.Tensor, targets: Targets) -> Bent:
        """Return the losses of a micro-batch's documents, from the scores of this rank's."""
        told = Told.of(targets, scores.device, self.size)
        documents = self._documents(scores, targets, told)
        with torch.enable_grad():
            given = documents.scores.clone().requires_grad_()
            losses, figures = self.judge(replace(documents, scores=given))
            each = losses * self.per_group
            (slopes,) = torch.autograd.grad(each.sum(), given)
        mine = slice(targets.before, targets.before + len(targets.ids))
        wide = torch.promote_types(scores.dtype, torch.float32)
        return Bent(
            losses.detach().repeat_interleave(self.size)[mine].to(wide), slopes[mine].to(scores.dtype),
            total=each.detach()[told.groups].sum(),
            recorded=Recorded(figures[:, told.groups], told.datasets(targets, self.size)),
        )  # fmt: skip

    def own(self, model: PreTrainedModel, batch: MicroBatch) -> ScoredDocuments:
        """Return the documents of the groups of a micro-batch that this rank counts. Collective, without gradients."""
        told = Told.of(batch.targets, batch.input_ids.device, self.size)
        found = micro_batch_loss(model, replace(batch, counts=True)).scores  # also where it does not count
        assert found is not None, "a head that scores"
        documents = self._documents(found, batch.targets, told)
        groups = told.groups if batch.counts else slice(0, 0)
        mine = slice(self.size * groups.start, self.size * groups.stop)
        return replace(documents, **{each.name: getattr(documents, each.name)[mine] for each in fields(documents)})

    def judge(self, documents: ScoredDocuments) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of each group, and [SCORE_KINDS, groups] of what is recorded."""
        weight, wanted = documents.weight[:: self.size], documents.wanted[:: self.size]
        known: dict[str, torch.Tensor | float]
        match self.config:
            case RewardObjective(center=center):
                chosen, rejected = documents.scores[::2, 0], documents.scores[1::2, 0]
                losses = -F.logsigmoid(chosen - rejected - wanted) + center * (chosen + rejected).square()
                known = {
                    "right": chosen > rejected, "chosen_rewards": chosen, "rejected_rewards": rejected,
                    "scores": (chosen + rejected) / 2,
                }  # fmt: skip
            case ClassificationObjective(class_weights=weights):
                classes = wanted.long()
                losses = F.cross_entropy(documents.scores, classes, reduction="none")
                if weights is not None:
                    losses = losses * losses.new_tensor(weights)[classes]
                known = {
                    "right": documents.scores.argmax(-1) == classes,
                    "confidence": documents.scores.softmax(-1).amax(-1),
                }
            case RegressionObjective():
                apart = documents.scores[:, 0] - wanted
                losses, known = apart.square(), {"errors": apart.abs(), "scores": documents.scores[:, 0]}
        losses = losses * weight
        return losses, figures_of(losses, SCORE_KINDS, groups=1, losses=losses, **known)

    def _documents(self, scores: torch.Tensor, targets: Targets, told: Told) -> ScoredDocuments:
        if told.total != told.documents.shape[1]:
            raise RuntimeError(f"{told.documents.shape[1]} documents with {told.total} targets: each is scored once")
        weight, wanted = (told.documents[2 + GROUP_COLUMNS.index(name)] for name in ("weight", "margin"))
        return ScoredDocuments(scores=told.gathered(scores, targets, self.group), weight=weight, wanted=wanted)


LossOfGroups = GroupObjective | ScoreObjective


def loss_of(objective: ObjectiveChoice, group: ProcessGroup | None = None) -> LossOfGroups:
    """Return the loss of an objective of groups or scores, without what only a run knows."""
    return ScoreObjective.of(objective, group) if objective.scores else GroupObjective.of(objective, group)


class ScoreStandIn(GroupStandIn):
    """Stands for a loss of scores where tensors have no values."""

    def bend(self, scores: torch.Tensor, targets: Targets) -> Bent:
        return Bent(scores[:, 0], torch.ones_like(scores))
