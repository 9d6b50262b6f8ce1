"""The loss of a run's groups, with everything that the reference says of them."""

from __future__ import annotations

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.model.objective.groups import GroupObjective
from raytune_fsdp.model.objective.scores import LossOfGroups, ScoreObjective
from raytune_fsdp.run.build import Build
from raytune_fsdp.run.fetching import Say
from raytune_fsdp.run.reference.attempt import Reference
from raytune_fsdp.run.reference.during import asked_in_steps
from raytune_fsdp.run.resume_point import ResumePoint, RunInputs


def loss_of_groups(
    config: FinetuneConfig,
    prepared: RunInputs,
    standing: ResumePoint,
    built: Build,
    reference: Reference | None,
    say: Say,
) -> LossOfGroups | None:
    """Return the loss of the run's groups of documents; None: they stand alone.

    What a kept reference lacks is computed with this network, which has its values if the run begins now. Collective.
    """
    if config.train.objective.rows is None:
        return None
    if config.train.objective.scores:
        return ScoreObjective.of(config.train.objective, built.groups.sequence)
    groups = GroupObjective.of(config.train.objective, built.groups.sequence, judged=prepared.judged)
    if reference is not None:
        reference.complete(built.model, groups)
    return asked_in_steps(groups, config, prepared, standing, built.site.device, say)
