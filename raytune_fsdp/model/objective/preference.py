"""Losses of pairs, a chosen answer and a rejected one: those of TRL 1.16.

Where they say more: a row may have a weight, which multiplies its loss and its term of cross-entropy, and a margin,
which is taken off the difference of its rewards (of ORPO: of its log odds). TRL has margins for reward models alone,
where they are taken off likewise. TRL's DPO smooths labels with `robust` alone; `sigmoid` with `label_smoothing` is the
conservative loss, which its CPO has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from raytune_fsdp.config.sections.objectives import (
    CpoObjective,
    DpoObjective,
    IpoObjective,
    OrpoObjective,
    SimpoObjective,
)
from raytune_fsdp.model.objective.judged import GroupDocuments, Judged, figures_of

PairObjective = DpoObjective | IpoObjective | SimpoObjective | CpoObjective | OrpoObjective


class _Scored(NamedTuple):
    losses: torch.Tensor
    """Of each pair."""
    rewards: torch.Tensor
    """Of each document."""
    log_probabilities: torch.Tensor
    """Of each document, as TRL records them."""


class PairLoss:
    """The loss of an objective of pairs."""

    def __init__(self, objective: PairObjective) -> None:
        self._objective = objective
        self.sft_weight = objective.sft.weight

    def judge(self, documents: GroupDocuments, kl: torch.Tensor | None) -> Judged:
        weight = documents.weight[::2]
        terms = -documents.whole[::2] * weight
        if self._objective.compares and documents.reference is None:
            chosen, rejected = documents.answers[::2], documents.answers[1::2]
            known = figures_of(chosen, groups=1, chosen=1, rejected=1, chosen_logps=chosen, rejected_logps=rejected)
            return Judged(0 * chosen, terms, known)
        scored = _SCORED[type(self._objective)](self._objective, documents)
        losses, rewards = scored.losses * weight, scored.rewards.detach()
        figures = figures_of(
            losses, groups=1, losses=losses, terms=terms, tokens=documents.targets[::2], chosen=1, rejected=1,
            chosen_rewards=rewards[::2], rejected_rewards=rewards[1::2], right=rewards[::2] > rewards[1::2],
            chosen_logps=scored.log_probabilities[::2], rejected_logps=scored.log_probabilities[1::2],
        )  # fmt: skip
        return Judged(losses, terms, figures)


def _dpo(objective: DpoObjective, documents: GroupDocuments) -> _Scored:
    gains = _gains(documents)
    compared = gains / documents.lengths if objective.normalize == "length" else gains
    apart = objective.beta * _difference(compared) - documents.margin[::2]
    losses = _LOSSES[objective.loss](apart, objective.label_smoothing)
    return _Scored(losses, objective.beta * gains, documents.answers)


def _ipo(objective: IpoObjective, documents: GroupDocuments) -> _Scored:
    gains, beta = _gains(documents), objective.beta
    # The authors of IPO told TRL's that their results are of means over tokens.
    apart = _difference(gains / documents.lengths) - documents.margin[::2] / beta
    return _Scored((apart - 1 / (2 * beta)).square(), beta * gains, documents.answers)


def _simpo(objective: SimpoObjective, documents: GroupDocuments) -> _Scored:
    means = documents.answers / documents.lengths
    apart = objective.beta * _difference(means) - objective.gamma - documents.margin[::2]
    return _Scored(_sigmoid(apart, objective.label_smoothing), objective.beta * means, means)


def _cpo(objective: CpoObjective, documents: GroupDocuments) -> _Scored:
    rewards = objective.beta * documents.answers
    losses = _LOSSES[objective.loss](_difference(rewards) - documents.margin[::2], objective.label_smoothing)
    return _Scored(losses, rewards, documents.answers)


def _orpo(objective: OrpoObjective, documents: GroupDocuments) -> _Scored:
    means = documents.answers / documents.lengths
    odds = means - _log_of_rest(means)
    losses = -objective.beta * F.logsigmoid(_difference(odds) - documents.margin[::2])
    return _Scored(losses, objective.beta * means, means)


_SCORED: dict[type[PairObjective], Callable[[Any, GroupDocuments], _Scored]] = {
    DpoObjective: _dpo,
    IpoObjective: _ipo,
    SimpoObjective: _simpo,
    CpoObjective: _cpo,
    OrpoObjective: _orpo,
}


def _gains(documents: GroupDocuments) -> torch.Tensor:
    """Return how much likelier each answer is than by the reference."""
    assert documents.reference is not None
    return documents.answers - documents.reference


def _difference(of_documents: torch.Tensor) -> torch.Tensor:
    return of_documents[::2] - of_documents[1::2]


def _log_of_rest(log_probabilities: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(x)), by whichever way keeps its digits, and finite where x rounds to 0."""
    small = log_probabilities < -math.log(2)
    near = torch.where(small, -1.0, log_probabilities).clamp(max=-torch.finfo(log_probabilities.dtype).tiny)
    far = torch.where(small, log_probabilities, -1.0)
    return torch.where(small, torch.log1p(-far.exp()), (-torch.expm1(near)).log())


def _sigmoid(apart: torch.Tensor, smoothing: float) -> torch.Tensor:
    return -(1 - smoothing) * F.logsigmoid(apart) - smoothing * F.logsigmoid(-apart)


def _hinge(apart: torch.Tensor, smoothing: float) -> torch.Tensor:
    return torch.relu(1 - apart)


def _robust(apart: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Return a loss whose mean over pairs is that of pairs none of which is the wrong way round."""
    return (-(1 - smoothing) * F.logsigmoid(apart) + smoothing * F.logsigmoid(-apart)) / (1 - 2 * smoothing)


_LOSSES: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "robust": _robust,
}
