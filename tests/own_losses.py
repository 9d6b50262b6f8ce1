"""A loss as a user would write it, in a module that imports torch alone: each run looks at it in a fresh process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from raytune_fsdp import LossDocument


def by_length(log_probabilities: torch.Tensor, document: LossDocument) -> torch.Tensor:
    """Documents weigh the same whatever their length; inside of them early targets weigh more, and so do odd ones."""
    early = torch.linspace(1, 0, len(log_probabilities), dtype=log_probabilities.dtype)
    return -log_probabilities * (early + document.targets % 2) / len(log_probabilities)
