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
    judged: tuple[float, float] | None = None,
    group: ProcessGroup | None = None,
    reference: Reference | None = None,
) -> GroupObjective | None:
    """Return the loss of a run's groups; None: its documents stand alone.

    `judged`: how many desirable and undesirable answers there are, for weights by a count. `group`: the ranks that
    share the tokens of each micro-batch. `reference`: computes what the columns of documents do not hold.
    """
    match train.objective:
        case SftObjective():
            return None
        case KtoObjective() as kto:
            loss: KtoLoss | PairLoss = KtoLoss(kto, judged)
        case pairs:
            loss = PairLoss(pairs)
    return GroupObjective(config=train.objective, formula=loss, group=group, reference=reference)
