"""What sums over groups come to: loss, rewards, accuracy, log-probabilities, under the names that TRL gives them; and
what is recorded where a teacher is learned from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raytune_fsdp.config.sections.objectives import DistillObjective, KtoObjective, ObjectiveChoice, SftObjective
from raytune_fsdp.model.objective.judged import KINDS

PAIRS_RIGHT = "rewards/accuracies"


def taught_values(objective: ObjectiveChoice) -> list[str]:
    """Return what is recorded of each target besides loss and right choices: divergences from the teacher that have a
    weight, at the run's temperature and without weights, and the cross-entropy of the data's tokens."""
    if not isinstance(objective, DistillObjective):
        return []
    weights = {"kl/forward": objective.forward, "kl/reverse": objective.reverse}
    return [*(name for name, weight in weights.items() if weight), "nll"]


def values_of(objective: ObjectiveChoice) -> list[str]:
    """Return what `group_values` names for groups of every kind."""
    return list(group_values([1.0] * len(KINDS), objective))


def group_values(sums: Sequence[float], objective: ObjectiveChoice, *, compared: bool = True) -> dict[str, float]:
    """Return the means over groups, from the sums of `KINDS` over some of them; of no groups there are none.

    `compared`: whether the reference was known, where the objective has one; if not, only log-probabilities are.
    """
    found: Mapping[str, float] = dict(zip(KINDS, sums, strict=True))
    groups, values = found["groups"], dict[str, float]()
    if not groups:
        return values
    sides = [side for side in ("chosen", "rejected") if found[side]]
    for side in sides:
        values[f"logps/{side}"] = found[f"{side}_logps"] / found[side]
    if objective.compares and not compared:
        return values
    term = found["terms"] / found["tokens"] if found["tokens"] else 0.0
    weight = 0.0 if isinstance(objective, SftObjective | KtoObjective) else objective.sft.weight
    rewards = {f"rewards/{side}": found[f"{side}_rewards"] / found[side] for side in sides}
    if len(sides) == 2:
        rewards["rewards/margins"] = rewards["rewards/chosen"] - rewards["rewards/rejected"]
    if objective.type == "kto":
        rewards["kl"] = max(0.0, found["kl"] / groups)
    else:
        rewards[PAIRS_RIGHT] = found["right"] / groups
    loss = {"loss": found["losses"] / groups + weight * term, **({"nll_loss": term} if weight else {})}
    return {**loss, **rewards, **values}
