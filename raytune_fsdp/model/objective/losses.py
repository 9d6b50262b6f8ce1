"""The results of a forward pass for its target tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class Recorded(NamedTuple):
    """What a step records of a micro-batch, to be summed by dataset."""

    figures: torch.Tensor
    """[kinds, targets or groups]."""
    datasets: torch.Tensor
    """int64: the dataset of each target or group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """The losses of a micro-batch's target tokens, in the order of its `Targets`."""

    total: torch.Tensor
    """The sum of the losses, through which gradients flow."""
    each: torch.Tensor
    """The loss of each target, in at least fp32, without gradients."""
    right: torch.Tensor
    """Whether the most likely token is the target."""
    groups: Recorded | None = None
    """What is recorded of groups, or of what is learned from a teacher; None: the losses of targets, and how many are
    right."""
    scores: torch.Tensor | None = None
    """[documents, outputs]: what a head that scores has computed for the last token of each, without gradients."""
    load: tuple[torch.Tensor, ...] = ()
    """How many tokens went to each expert, for each layer whose router is watched."""
