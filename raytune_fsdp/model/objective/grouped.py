"""Which loss of groups a run has."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from raytune_fsdp.config.sections.objectives import KtoObjective, SftObjective
from raytune_fsdp.config.sections.train import TrainConfig
from raytune_fsdp.model.objective.groups import GroupObjective, Reference
from raytune_fsdp.model.objective.kto import KtoLoss
from raytune_fsdp.model.objective.preference import PairLoss


def group_objective(
    train: TrainConfig,
    *,
    desirable_weight: float | None = None,
    group: ProcessGroup | None = None,
    reference: Reference | None = None,
) -> GroupObjective | None:
    """Return the loss of a run's groups; None: its documents stand alone.

    `desirable_weight`: what `auto` comes to. `group`: the ranks that share the tokens of each micro-batch. `reference`:
    computes what the columns of documents do not hold.
    """
    match train.objective:
        case SftObjective():
            return None
        case KtoObjective(desirable_weight="auto") as kto:
            assert desirable_weight is not None, "nobody has counted the data"
            loss: KtoLoss | PairLoss = KtoLoss(kto, desirable_weight)
        case KtoObjective(desirable_weight=weight) as kto:
            loss = KtoLoss(kto, float(weight))
        case pairs:
            loss = PairLoss(pairs)
    return GroupObjective(formula=loss, group=group, reference=reference)
