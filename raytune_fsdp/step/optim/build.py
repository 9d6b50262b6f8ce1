"""Build the optimizer of a run."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from raytune_fsdp.config import OptimConfig
from raytune_fsdp.config.sections.method import Method
from raytune_fsdp.step.optim.adafactor import Adafactor
from raytune_fsdp.step.optim.adamw import AdamW
from raytune_fsdp.step.optim.elementwise import RULES, AdamWRule, Elementwise
from raytune_fsdp.step.optim.groups import Group, groups_of, trained
from raytune_fsdp.step.optim.matrices import hidden_matrices
from raytune_fsdp.step.optim.muon import Muon
from raytune_fsdp.step.optim.update import Optimizer, Trained


def build_optimizer(
    model: PreTrainedModel, config: OptimConfig, method: Method | None = None, *, seed: int = 0, exact: bool = False
) -> Optimizer:
    """Build the optimizer of a run, over a model that is already sharded.

    `exact`: the bits of an update must not depend on how the weights are sharded.
    """
    chosen, groups, named = config.optimizer, groups_of(model, config, method), trained(model)

    def weights(mine: tuple[Group, ...]) -> Trained:
        return Trained(named, mine, lr=config.lr, seed=seed, stochastic_rounding=config.stochastic_rounding)

    def adamw(mine: tuple[Group, ...], moments: str) -> Optimizer:
        same = all(named[name].dtype == torch.float32 for group in mine for name in group.names)
        # The kernel keeps moments in the type of the weights, and rounds both to the nearest.
        if not config.stochastic_rounding and (moments == "as_weights" or (moments == "fp32" and same)):
            return AdamW(named, mine, config, exact=exact)
        return Elementwise(weights(mine), AdamWRule(config, moments))

    if chosen.type == "adamw":
        return adamw(groups, chosen.moments)
    if chosen.type == "muon":
        parts = hidden_matrices(model)
        rest = [group.only(set(named) - set(parts), chosen.rest_lr_ratio) for group in groups]
        rest = [group for group in rest if group.names]
        mine = tuple(group.only(parts) for group in groups)
        return Muon(weights(mine), parts, adamw(tuple(rest), "as_weights") if rest else None, chosen)
    if chosen.type == "adafactor":
        return Adafactor(weights(groups), chosen, exact=exact)
    return Elementwise(weights(groups), RULES[chosen.type](chosen))
