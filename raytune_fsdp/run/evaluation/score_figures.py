"""What an evaluation says of scores and classes, from those of all its documents.

Everything is a function of the documents alone, so it does not depend on which rank had which of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from raytune_fsdp.base.collectives import on_all_ranks
from raytune_fsdp.config.sections.objectives import ClassificationObjective, ObjectiveChoice, RewardObjective
from raytune_fsdp.data.batches import FILLER_INDEX
from raytune_fsdp.model.objective.scores import ScoredDocuments, ScoreObjective

Vector = np.ndarray[Any, np.dtype[np.float64]]

BINS = 10
"""Of the confidences between 0 and 1 that a reliability curve is made of."""


def figures_of(objective: ScoreObjective, mine: Sequence[tuple[int, ScoredDocuments]]) -> dict[str, float]:
    """Return the figures of a dataset. `mine`: this rank's documents, by the index of their micro-batch. Collective."""
    own = [
        (index, documents.scores.cpu().numpy(), documents.wanted.cpu().numpy())
        for index, documents in mine
        if index != FILLER_INDEX and len(documents.scores)
    ]
    gathered: list[Any] = on_all_ranks(lambda: own)
    every = sorted((part for parts in gathered for part in parts), key=lambda part: part[0])
    scores, wanted = (np.concatenate([part[place] for part in every]) for place in (1, 2))
    if isinstance(objective.config, ClassificationObjective):
        return of_classes(scores, wanted)
    if isinstance(objective.config, RewardObjective):
        return of_pairs(scores[::2, 0] - scores[1::2, 0])
    return of_numbers(scores[:, 0], wanted)


def names_of(objective: ObjectiveChoice) -> list[str]:
    """Return what `figures_of` may find besides what training records, without the points of curves."""
    if isinstance(objective, ClassificationObjective):
        return ["f1", "auc", "calibration_error"]
    if isinstance(objective, RewardObjective):
        return ["calibration_error"]
    return ["r2", "pearson"] if objective.scores else []


def of_classes(scores: Vector, classes: Vector) -> dict[str, float]:
    """Return figures of classification. `scores`: [documents, classes]; `classes`: the number of each document's own.

    `f1` and `auc` are means over the classes that documents have; of two classes both are told apart equally well, so
    `auc` is what it usually is.
    """
    own = classes.astype(np.int64)
    finite = np.isfinite(scores).all(1)
    likely = np.where(finite, scores.argmax(1), -1)  # no class, where `argmax` takes the first NaN
    probabilities = np.exp(scores - scores.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    there = np.unique(own)
    f1 = []
    for each in there:
        hits = int(((likely == each) & (own == each)).sum())
        f1.append(2 * hits / (int((likely == each).sum()) + int((own == each).sum())))
    found = {"accuracy": float((likely == own).mean()), "f1": float(np.mean(f1))}
    if not finite.all():
        found["auc"] = math.nan
    elif len(there) > 1:
        # The score less the others' is in the order of the probability, and tells those apart that round to 1.
        apart = [area_under_curve(_over_others(scores, int(each)), own == each) for each in there]
        found["auc"] = float(np.mean(apart))
    return found | calibration(probabilities.max(1), likely == own)


def of_pairs(margins: Vector) -> dict[str, float]:
    """Return figures of pairs, of which each is right with the probability sigmoid(margin), besides their means."""
    confident = 1 / (1 + np.exp(-np.abs(margins)))
    return calibration(confident, margins > 0)


def of_numbers(scores: Vector, wanted: Vector) -> dict[str, float]:
    """Return figures of regression: the mean absolute error and, where the numbers differ, the share of their variance
    that scores explain and Pearson's correlation."""
    found = {"mae": float(np.abs(scores - wanted).mean())}
    spread = float(np.square(wanted - wanted.mean()).sum())
    if spread:
        found["r2"] = 1 - float(np.square(scores - wanted).sum()) / spread
        if own := float(np.square(scores - scores.mean()).sum()):
            together = float(((scores - scores.mean()) * (wanted - wanted.mean())).sum())
            found["pearson"] = together / float(np.sqrt(own) * np.sqrt(spread))
    return found


def calibration(confident: Vector, right: Any) -> dict[str, float]:
    """Return the expected calibration error, and the points of the reliability curve: for each tenth of confidence in
    which there are documents, their mean confidence and the share of them that is right."""
    if not np.isfinite(confident).all():
        return {"calibration_error": math.nan}
    place = np.minimum((confident * BINS).astype(np.int64), BINS - 1)
    many = np.bincount(place, minlength=BINS)
    sums = np.bincount(place, weights=confident, minlength=BINS)
    hits = np.bincount(place, weights=right.astype(np.float64), minlength=BINS)
    found = {"calibration_error": float(np.abs(hits - sums).sum() / len(confident))}
    for each in np.flatnonzero(many):
        name = f"calibration/{100 * int(each) // BINS:02d}"
        found[f"{name}/confidence"], found[f"{name}/right"] = sums[each] / many[each], hits[each] / many[each]
    return {name: float(value) for name, value in found.items()}


def area_under_curve(values: Vector, positive: Any) -> float:
    """Return the probability that a positive document has a higher value than another one; a tie counts half."""
    _, inverse, many = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(many) - (many - 1) / 2)[inverse]
    yes = int(positive.sum())
    no = len(values) - yes
    return float((ranks[positive].sum() - yes * (yes + 1) / 2) / (yes * no))


def _over_others(scores: Vector, each: int) -> Vector:
    """Return the logarithm of the odds of a class."""
    others = np.delete(scores, each, axis=1)
    most = others.max(1)
    odds: Vector = scores[:, each] - most - np.log(np.exp(others - most[:, None]).sum(1))
    return odds
