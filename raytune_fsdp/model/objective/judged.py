"""What the loss of a group is computed from, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

KINDS = (
    "groups", "losses", "terms", "tokens", "chosen", "rejected", "chosen_rewards", "rejected_rewards", "right",
    "chosen_logps", "rejected_logps", "kl",
)  # fmt: skip
"""What is recorded as sums over groups: their number, their losses, their terms of cross-entropy and the tokens of
these; how many answers are chosen (of KTO: desirable) and how many rejected, their rewards and log-probabilities; the
pairs whose chosen answer has the higher reward; how much likelier mismatched answers are than by the reference."""

SCORE_KINDS = ("groups", "losses", "right", "chosen_rewards", "rejected_rewards", "scores", "errors", "confidence")
"""The same of scores: the pairs whose chosen answer has the higher one, or the documents whose class has the highest;
the scores of a pair's answers; all scores, where there is one of each document, of a pair their mean; how far numbers
are off; the probability of the most likely class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDocuments:
    """The documents of a micro-batch that have targets, in order: vectors in fp64."""

    answers: torch.Tensor
    """The log-probability of each answer."""
    whole: torch.Tensor
    """The log-probability of all its targets, those before the answer included."""
    lengths: torch.Tensor
    """The targets of each answer."""
    targets: torch.Tensor
    """All its targets."""
    role: torch.Tensor
    weight: torch.Tensor
    margin: torch.Tensor
    reference: torch.Tensor | None
    """The reference's log-probability of each answer; None: it is not known, and only log-probabilities can be
    recorded."""


class Judged(NamedTuple):
    """The groups of a micro-batch, in order."""

    losses: torch.Tensor
    """The loss of each, as a function of `GroupDocuments.answers`."""
    terms: torch.Tensor
    """The cross-entropy of each, as a function of `GroupDocuments.whole`."""
    figures: torch.Tensor
    """[KINDS, groups]: what is recorded."""


def figures_of(like: torch.Tensor, kinds: Sequence[str] = KINDS, /, **found: torch.Tensor | float) -> torch.Tensor:
    """Return [kinds, groups] with these kinds; others are 0. `like`: a number of each group."""
    figures = like.new_zeros(len(kinds), len(like))
    for kind, values in found.items():
        figures[kinds.index(kind)] = values.detach() if isinstance(values, torch.Tensor) else values
    return figures
