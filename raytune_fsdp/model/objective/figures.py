"""What sums over groups come to: loss, rewards, accuracy, log-probabilities, under the names that TRL gives them; and
what is recorded where a teacher is learned from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raytune_fsdp.config.sections.objectives import DistillObjective, ObjectiveChoice
from raytune_fsdp.model.objective.judged import KINDS, SCORE_KINDS
from raytune_fsdp.model.objective.preference import PairObjective

PAIRS_RIGHT = "rewards/accuracies"

_OF_SCORES: Mapping[str, Mapping[str, str]] = {
    "reward": {
        "loss": "losses", "rewards/chosen": "chosen_rewards", "rewards/rejected": "rejected_rewards",
        PAIRS_RIGHT: "right", "score": "scores",
    },
    "classification": {"loss": "losses", "accuracy": "right", "confidence": "confidence"},
    "regression": {"loss": "losses", "mae": "errors", "score": "scores"},
}  # fmt: skip
"""What is said of scores, and the kind of `SCORE_KINDS` whose mean over groups it is."""


def kinds_of(objective: ObjectiveChoice) -> tuple[str, ...]:
    """Return what is recorded as sums over groups."""
    return SCORE_KINDS if objective.scores else KINDS


def right_of(values: Mapping[str, float]) -> float | None:
    """Return the share of pairs in the right order, or of documents whose class was found; None: there is no such."""
    return values.get(PAIRS_RIGHT, values.get("accuracy"))


def taught_values(objective: ObjectiveChoice) -> list[str]:
    """Return what is recorded of each target besides loss and right choices: divergences from the teacher that have a
    weight, at the run's temperature and without weights, and the cross-entropy of the data's tokens."""
    if not isinstance(objective, DistillObjective):
        return []
    weights = {"kl/forward": objective.forward, "kl/reverse": objective.reverse}
    return [*(name for name, weight in weights.items() if weight), "nll"]


def values_of(objective: ObjectiveChoice) -> list[str]:
    """Return what `group_values` names for groups of every kind."""
    return list(group_values([1.0] * len(kinds_of(objective)), objective))


def group_values(sums: Sequence[float], objective: ObjectiveChoice, *, compared: bool = True) -> dict[str, float]:
    """Return the means over groups, from the sums of `kinds_of` over some of them; of no groups there are none.

    `compared`: whether the reference was known, where the objective has one; if not, only log-probabilities are.
    """
    found: Mapping[str, float] = dict(zip(kinds_of(objective), sums, strict=True))
    groups, values = found["groups"], dict[str, float]()
    if not groups:
        return values
    if objective.scores:
        means = {name: found[kind] / groups for name, kind in _OF_SCORES[objective.type].items()}
        if "rewards/chosen" in means:
            means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
        return means
    sides = [side for side in ("chosen", "rejected") if found[side]]
    for side in sides:
        values[f"logps/{side}"] = found[f"{side}_logps"] / found[side]
    if objective.compares and not compared:
        return values
    term = found["terms"] / found["tokens"] if found["tokens"] else 0.0
    weight = objective.sft.weight if isinstance(objective, PairObjective) else 0.0
    rewards = {f"rewards/{side}": found[f"{side}_rewards"] / found[side] for side in sides}
    if len(sides) == 2:
        rewards["rewards/margins"] = rewards["rewards/chosen"] - rewards["rewards/rejected"]
    if objective.type == "kto":
        rewards["kl"] = max(0.0, found["kl"] / groups)
    else:
        rewards[PAIRS_RIGHT] = found["right"] / groups
    loss = {"loss": found["losses"] / groups + weight * term, **({"nll_loss": term} if weight else {})}
    return {**loss, **rewards, **values}
