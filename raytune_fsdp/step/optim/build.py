"""Build the optimizer of a run."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from raytune_fsdp.config import OptimConfig
from raytune_fsdp.config.sections.method import Method
from raytune_fsdp.step.optim.adafactor import Adafactor
from raytune_fsdp.step.optim.adamw import AdamW
from raytune_fsdp.step.optim.elementwise import RULES, AdamWRule, Elementwise
from raytune_fsdp.step.optim.execution import BY_OPERATION, Execution
from raytune_fsdp.step.optim.groups import Group, groups_of, trained
from raytune_fsdp.step.optim.matrices import hidden_matrices
from raytune_fsdp.step.optim.muon import Muon
from raytune_fsdp.step.optim.update import Optimizer, Trained


def is_fused(config: OptimConfig, *, fp32: bool) -> bool:
    """Return whether torch's own kernel updates all weights. `fp32`: this is their type."""
    moments = getattr(config.optimizer, "moments", None)
    # The kernel keeps moments in the type of the weights, and rounds both to the nearest.
    return not config.stochastic_rounding and (moments == "as_weights" or (moments == "fp32" and fp32))


def build_optimizer(
    model: PreTrainedModel,
    config: OptimConfig,
    method: Method | None = None,
    *,
    seed: int = 0,
    exact: bool = False,
    execution: Execution = BY_OPERATION,
    states_apart: bool = False,
) -> Optimizer:
    """Build the optimizer of a run, over a model that is already sharded.

    `exact`: the bits of an update must not depend on how the weights are sharded. `execution`: how the updates run that
    torch has no kernel for. `states_apart` as in `groups_of`.
    """
    groups = groups_of(model, config, method, states_apart=states_apart)
    chosen, named = config.optimizer, trained(model)

    def weights(mine: tuple[Group, ...]) -> Trained:
        return Trained(named, mine, lr=config.lr, seed=seed, stochastic_rounding=config.stochastic_rounding)

    if chosen.type == "adamw":
        same = all(named[name].dtype == torch.float32 for group in groups for name in group.names)
        if is_fused(config, fp32=same):
            return AdamW(weights(groups), config, exact=exact)
        return Elementwise(weights(groups), AdamWRule(config, chosen.moments), execution)
    if chosen.type == "muon":
        parts = hidden_matrices(model)
        rest = [group.only(set(named) - set(parts), chosen.rest_lr_ratio) for group in groups]
        rest = [group for group in rest if group.names]
        mine = tuple(group.only(parts) for group in groups)
        other: Optimizer | None = None
        if rest and config.stochastic_rounding:
            other = Elementwise(weights(tuple(rest)), AdamWRule(config, "as_weights"), execution)
        elif rest:
            other = AdamW(weights(tuple(rest)), config, exact=exact)
        return Muon(weights(mine), parts, other, chosen, execution)
    if chosen.type == "adafactor":
        return Adafactor(weights(groups), chosen, execution, exact=exact)
    return Elementwise(weights(groups), RULES[chosen.type](chosen), execution)
