"""What a forward pass knows of its target tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """The losses of a block's target tokens, in the order of its `Targets`."""

    total: torch.Tensor
    """Their sum, through which gradients flow."""
    each: torch.Tensor
    """In at least fp32, without gradients."""
    right: torch.Tensor
    """Whether the most likely token is the target."""
    load: tuple[torch.Tensor, ...] = ()
    """Of each layer that is watched: how many tokens went to each of its experts."""
