"""The output embedding of a network that scores documents: their scores and losses, at their last tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from raytune_fsdp.base.batch import Targets
from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config.sections.model import ModelConfig
from raytune_fsdp.model.attention.choose import KernelChoice, KernelNeeds
from raytune_fsdp.model.objective.chunked_head import Aimed
from raytune_fsdp.model.objective.losses import Losses
from raytune_fsdp.model.objective.objective import Objective
from raytune_fsdp.model.objective.own_loss import bent_sum

KERNEL = "scores"
"""What the loss of a run with such a head is called among its kernels."""


class ScoreHead(Aimed, nn.Linear):
    """Scores tokens; if it has targets, it computes the scores in their places alone, and the losses of these. Without
    an objective of scores these losses are 0."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._targets is None:
            return super().forward(hidden)
        chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, self._targets.places)
        # There are few of them, so in 16 bits, too, their products are summed and kept in fp32.
        wide = torch.promote_types(hidden.dtype, torch.float32)
        scores = F.linear(chosen.to(wide), self.weight.to(wide))
        return self._in_place_of_logits(_losses_of(scores, self._targets, self._objective))


def _losses_of(scores: torch.Tensor, targets: Targets, objective: Objective) -> Losses:
    fixed = scores.detach()
    right = torch.zeros(len(fixed), dtype=torch.bool, device=fixed.device)
    if objective.groups is None:
        return Losses(total=0 * scores.sum(), each=0 * fixed[:, 0], right=right, scores=fixed)
    total, bent = bent_sum(objective.groups, scores, targets)
    return Losses(total=total, each=bent.values, right=right, groups=bent.recorded, scores=fixed)


def choose_loss(config: ModelConfig, needs: KernelNeeds, *, kept: str | None) -> KernelChoice:
    """Choose how the losses of a run are computed; those of scores are in one way. `kept`: the choice of its
    checkpoint; None: no checkpoint yet."""
    if config.head is not None:
        return KernelChoice(name=KERNEL, why="model.head scores documents at their last tokens")
    if config.loss == "chunked" and needs.plain_loss:
        raise ConfigError(f"model.loss=chunked: {needs.plain_loss}; set model.loss=auto")
    if config.loss != "auto":
        return KernelChoice(name=config.loss, why="as model.loss says")
    if needs.plain_loss:
        return KernelChoice(name="plain", why=needs.plain_loss)
    if kept is not None:
        return KernelChoice(name=kept, why="as the run began")
    return KernelChoice(name="chunked", why="without the logits of a whole micro-batch")
