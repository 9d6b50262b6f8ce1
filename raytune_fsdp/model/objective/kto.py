"""KTO: the loss of single answers that are desirable or not (arXiv:2402.01306).

An answer is measured against how far the model has moved from its reference: the mean, over the global batch, of how
much likelier mismatched answers have become, each the answer of another row to a prompt. It is no function of a
micro-batch, so each step begins with a pass without gradients over all of its micro-batches, with dropout off, which
costs about a third of a step. TRL takes the mean of each micro-batch on each rank, and then over the ranks, so its loss
depends on how answers fall on these.
"""

from __future__ import annotations

import torch

from raytune_fsdp.base.batch import Role
from raytune_fsdp.config.sections.objectives import KtoObjective
from raytune_fsdp.model.objective.judged import GroupDocuments, Judged, figures_of


class KtoLoss:
    """The loss of judged answers, each followed by a mismatched one."""

    sft_weight = 0.0

    def __init__(self, objective: KtoObjective, judged: tuple[float, float] | None = None) -> None:
        """`judged`: how many desirable and undesirable answers there are, for `desirable_weight=auto`."""
        self._objective, self._beta = objective, objective.beta
        self._desirable, self._undesirable = objective.desirable_weight, objective.undesirable_weight
        if self._desirable == "auto" and judged is not None:
            good, bad = judged
            self._desirable = self._undesirable * (bad / good if good and bad else 1.0)

    def counted(self, desirable: float, undesirable: float) -> KtoLoss:
        """Return it with the weights that these many answers of both kinds ask for, if they are to be found so."""
        return KtoLoss(self._objective, (desirable, undesirable))

    def judge(self, documents: GroupDocuments, kl: torch.Tensor | None) -> Judged:
        """Return the losses of groups. `kl`: by `ahead`, of the whole global batch."""
        answers = documents.answers[::2]
        good = documents.role[::2] == Role.DESIRABLE
        known: dict[str, torch.Tensor | float] = {
            "groups": 1, "chosen": good, "rejected": ~good,
            "chosen_logps": torch.where(good, answers, 0), "rejected_logps": torch.where(good, 0, answers),
        }  # fmt: skip
        if documents.reference is None or kl is None:
            return Judged(0 * answers, 0 * answers, figures_of(answers, **known))
        assert not isinstance(self._desirable, str), "nobody has counted the answers"
        gains = answers - documents.reference[::2]
        apart = torch.where(good, gains - kl, kl - gains)
        weight = documents.weight[::2]
        weight = torch.where(good, self._desirable * weight, self._undesirable * weight)
        losses = weight * torch.sigmoid(-self._beta * apart)  # 1 - sigmoid(x), with all its digits
        rewards = self._beta * gains.detach()
        figures = figures_of(
            answers, **known, losses=losses, kl=self.ahead(documents),
            chosen_rewards=torch.where(good, rewards, 0), rejected_rewards=torch.where(good, 0, rewards),
        )  # fmt: skip
        return Judged(losses, 0 * answers, figures)

    def ahead(self, documents: GroupDocuments) -> torch.Tensor:
        """Return what each group adds to that which the losses of all depend on."""
        assert documents.reference is not None
        return documents.answers[1::2].detach() - documents.reference[1::2]

    def estimate(self, sum_: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        """Return what the losses of all groups depend on."""
        return (sum_ / groups).clamp(min=0)
