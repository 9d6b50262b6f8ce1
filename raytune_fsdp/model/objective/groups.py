"""An objective of groups of documents: pairs of answers (preference.py), or judged ones (kto.py).

Its loss is a function of each answer's log-probability, a sum over the answer's tokens. So the head goes over its
chunks twice, as for a loss of the user's own: once for log-probabilities, without gradients, and once for the gradient,
each token with the slope of its document. Documents are summed in fp64 in an order that depends on nothing but the
document, so it does not matter what one is packed with; the loss of each group is computed in fp64, and torch finds its
slopes.

A step divides what it minimises by the targets of the global batch. Losses of groups are to be divided by its groups,
and terms of cross-entropy by the tokens of its chosen documents: here both are multiplied by the ratio of these counts.
So a router's loss has the divisor that it has in a supervised run, and gradients the size for which fp16 is scaled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from raytune_fsdp.base.batch import GROUP_COLUMNS, MicroBatch, Targets
from raytune_fsdp.config.sections.objectives import KtoObjective, ObjectiveChoice
from raytune_fsdp.model.objective.judged import GroupDocuments
from raytune_fsdp.model.objective.kto import KtoLoss
from raytune_fsdp.model.objective.loss import micro_batch_loss
from raytune_fsdp.model.objective.losses import Recorded
from raytune_fsdp.model.objective.own_loss import Bent, StandIn
from raytune_fsdp.model.objective.preference import PairLoss, PairObjective
from raytune_fsdp.model.objective.told import Told
from raytune_fsdp.plan.step_counts import GROUPS, TARGETS, TERM_TOKENS

Formula = KtoLoss | PairLoss
"""The loss of groups of two documents; `sft_weight` is the weight of their terms of cross-entropy. The loss of KTO
depends on all groups of the global batch."""

Reference = Callable[[PreTrainedModel, MicroBatch], torch.Tensor]
"""Returns the reference's log-probabilities of a micro-batch's answers, in fp64 on its device, in the order of its
documents with targets; of a part, those of the whole micro-batch. Collective."""

OfMicroBatch = Callable[[PreTrainedModel, MicroBatch], torch.Tensor]
SumOverStep = Callable[[OfMicroBatch], torch.Tensor]
"""Returns the sum of a number of each micro-batch of a step, over all ranks, by a pass without gradients. Collective.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """The targets of a micro-batch, in their documents: vectors of int64."""

    document: torch.Tensor
    position: torch.Tensor
    """The place of each in its document, from 0."""
    left: torch.Tensor
    """How many targets of its document there are from here on."""
    answers: torch.Tensor
    """Whether it belongs to the answer."""

    @classmethod
    def of(cls, told: Told) -> _Placed:
        first, counts, skipped = (told.documents[row].long() for row in (0, 1, 2 + GROUP_COLUMNS.index("skipped")))
        documents = torch.arange(len(counts), device=counts.device)
        document = documents.repeat_interleave(counts, output_size=told.total)
        position = torch.arange(told.total, device=counts.device) - first[document]
        return cls(
            document=document, position=position, left=counts[document] - position,
            answers=position >= skipped[document],
        )  # fmt: skip

    def sums(self, log_probabilities: torch.Tensor, told: Told) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums over answers and over all targets, by document.

        Neighbours are added, then neighbours of these sums, and so on: an order that only the document decides.
        """
        values, step = torch.stack([torch.where(self.answers, log_probabilities, 0), log_probabilities]), 1
        while step < told.longest:
            moved = torch.cat([values[:, step:], values.new_zeros(2, step)], 1)
            values = values + torch.where((self.position % (2 * step) == 0) & (self.left > step), moved, 0)
            step *= 2
        answers, whole = values[:, told.documents[0].long()]
        return answers, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupObjective:
    """The loss of a run's groups."""

    config: ObjectiveChoice
    formula: Formula
    group: ProcessGroup | None = None
    """The ranks that share the tokens of each micro-batch; None: no ranks do."""
    reference: Reference | None = None
    """Computes what the columns of documents do not hold; None: they do, or there is no reference."""

    per_group: torch.Tensor | float = 1.0
    """In a step: its targets, divided by its groups."""
    per_token: torch.Tensor | float = 1.0
    """In a step: its targets, divided by the tokens of the terms of cross-entropy."""
    kl: torch.Tensor | None = None
    """In a step: what the losses of all its groups depend on."""
    found: torch.Tensor | None = None
    """For a micro-batch: what `reference` has returned."""
    known: dict[int, torch.Tensor] | None = None
    """In a step: what `reference` has returned for its micro-batches so far, by their indices."""

    @classmethod
    def of(
        cls,
        objective: ObjectiveChoice,
        group: ProcessGroup | None = None,
        *,
        judged: tuple[float, float] | None = None,
    ) -> Self:
        """Return the loss of an objective of groups.

        `judged`: how many desirable and undesirable answers there are, for weights by a count.
        """
        assert isinstance(objective, KtoObjective | PairObjective)
        formula = KtoLoss(objective, judged) if isinstance(objective, KtoObjective) else PairLoss(objective)
        return cls(config=objective, formula=formula, group=group)

    def of_step(self, counts: torch.Tensor, over_step: SumOverStep) -> Self:
        """Return the loss in a step with these `StepCounts`. Collective."""
        targets, groups, tokens = (counts[place].clamp(min=1).double() for place in (TARGETS, GROUPS, TERM_TOKENS))
        step = replace(self, per_group=targets / groups, per_token=targets / tokens, known={})
        if not isinstance(self.formula, KtoLoss):
            return step
        return replace(step, kl=self.formula.estimate(over_step(step.ahead), groups))

    def of_batch(self, model: PreTrainedModel, batch: MicroBatch) -> Self:
        """Return the loss of a micro-batch; its reference is computed now, if that is to be. Collective."""
        if self.reference is None:
            return self
        if self.known is None:
            return replace(self, found=self.reference(model, batch))
        # On every rank or on none: of a step no rank has more than one filler.
        if batch.index not in self.known:
            self.known[batch.index] = self.reference(model, batch)
        return replace(self, found=self.known[batch.index])

    def ahead(self, model: PreTrainedModel, batch: MicroBatch) -> torch.Tensor:
        """Return what the groups of a micro-batch that begin on this rank add to what all losses depend on."""
        assert isinstance(self.formula, KtoLoss)
        return self.formula.ahead(self.own(model, batch)).sum()

    def own(self, model: PreTrainedModel, batch: MicroBatch) -> GroupDocuments:
        """Return the documents of the groups of a micro-batch that this rank counts. Collective, without gradients."""
        documents, mine = self.measured(model, batch)
        vectors = {each.name: getattr(documents, each.name) for each in fields(documents)}
        return replace(documents, **{name: vector[mine] for name, vector in vectors.items() if vector is not None})

    def measured(self, model: PreTrainedModel, batch: MicroBatch) -> tuple[GroupDocuments, slice]:
        """Return the documents of a micro-batch, of a part those of all of it; and which of them this rank counts.
        Collective, without gradients."""
        objective, told = self.of_batch(model, batch), Told.of(batch.targets, batch.input_ids.device)
        each = micro_batch_loss(model, replace(batch, counts=True)).each  # also where it does not count
        mine = slice(2 * told.groups.start, 2 * told.groups.stop) if batch.counts else slice(0)
        return objective._documents(-each, batch.targets, told, _Placed.of(told)), mine

    def bend(self, log_probabilities: torch.Tensor, targets: Targets) -> Bent:
        told = Told.of(targets, log_probabilities.device)
        placed = _Placed.of(told)
        documents = self._documents(log_probabilities, targets, told, placed)
        if self.config.compares and documents.reference is None:
            raise RuntimeError("nobody has computed the log-probabilities of the reference")
        with torch.enable_grad():
            answers, whole = (each.clone().requires_grad_() for each in (documents.answers, documents.whole))
            judged = self.formula.judge(replace(documents, answers=answers, whole=whole), self.kl)
            each = judged.losses * self.per_group + self.formula.sft_weight * judged.terms * self.per_token
            slopes = torch.autograd.grad(each.sum(), (answers, whole), allow_unused=True, materialize_grads=True)
        by_target = slopes[1][placed.document] + torch.where(placed.answers, slopes[0][placed.document], 0)
        mine = slice(targets.before, targets.before + len(targets.ids))
        return Bent(
            -log_probabilities, by_target[mine].to(log_probabilities.dtype),
            total=each.detach()[told.groups].sum(),
            recorded=Recorded(judged.figures[:, told.groups], told.datasets(targets)),
        )  # fmt: skip

    def _documents(
        self, log_probabilities: torch.Tensor, targets: Targets, told: Told, placed: _Placed
    ) -> GroupDocuments:
        answers, whole = placed.sums(told.gathered(log_probabilities, targets, self.group), told)
        role, weight, margin, skipped, *reference = told.documents[2:]
        if not told.total:  # nobody tells a filler
            reference = [answers]
        return GroupDocuments(
            answers=answers, whole=whole, lengths=told.documents[1] - skipped, targets=told.documents[1],
            role=role, weight=weight, margin=margin,
            reference=reference[0] if reference else self.found,
        )  # fmt: skip


class GroupStandIn(StandIn):
    """Stands for a loss of groups, likewise; a pass without gradients before the step's is not counted."""

    def of_step(self, counts: torch.Tensor, over_step: SumOverStep) -> Self:
        return self

    def of_batch(self, model: PreTrainedModel, batch: MicroBatch) -> Self:
        return self
