"""The leaderboard of a sweep, and its trials compared over seeds, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, stdev
from typing import Any

from raytune_fsdp.tune.history import State, histories, rank
from raytune_fsdp.tune.log import Entry, SweepBegun, Trial, changes_now, trials_in


@dataclass(frozen=True, slots=True)
class Standing:
    """A trial's place in the sweep."""

    trial: Trial
    changes: Mapping[str, Any]
    """What it changes of the base now: of a fork, that fork's."""
    step: int
    """The step of its last value on the log; 0: there is none."""
    value: float | None
    """That value. None: there is none."""
    state: State
    """`open`: it may go on; `stopped`: a decision has stopped it."""
    error: str | None
    """Why it failed for good."""


def leaderboard(log: Sequence[Entry]) -> list[Standing]:
    """Return all trials on the log, the best first: complete ones, then those that came furthest, then failed ones."""
    standings = [
        Standing(
            each.trial,
            changes_now(each.trial, log),
            each.step,
            each.last if each.values else None,
            each.state,
            None if each.ended is None else each.ended.error,
        )
        for each in histories(trials_in(log), log).values()
    ]
    highest = _highest(log)
    return sorted(standings, key=lambda each: (*_order(each, highest), each.trial.number))


def _highest(log: Sequence[Entry]) -> bool:
    return bool(log) and isinstance(log[0], SweepBegun) and log[0].highest


def _order(each: Standing, highest: bool) -> tuple[bool, bool, int, tuple[bool, float]]:
    """Return what standings are sorted by. Complete runs are compared whatever their lengths: some end early."""
    complete = each.state == "complete"
    value = math.nan if each.value is None else each.value
    return each.state == "failed", not complete, 0 if complete else -each.step, rank(value, highest)


def best_of(log: Sequence[Entry]) -> Trial | None:
    """Return the best trial: of several seeds, the first of those whose mean is best. None: there is no value yet."""
    highest = _highest(log)
    by_variant = sorted(leaderboard(log), key=lambda each: each.trial.number)
    ranked = []
    for _, group in groupby(by_variant, key=lambda each: each.trial.variant):
        seeds = list(group)
        last = max(_order(each, highest)[:3] for each in seeds)  # as far as the last of its seeds
        values = [math.nan if each.value is None else each.value for each in seeds]
        ranked.append((*last, rank(fmean(values), highest), seeds[0].trial.number, seeds[0].trial))
    # Who has come furthest is no winner without a finite value.
    there = [each for each in ranked if not each[0] and not each[3][0]]
    return min(there, key=lambda each: each[:5])[5] if there else None


@dataclass(frozen=True, slots=True)
class OverSeeds:
    """One metric of one variant over the seeds."""

    variant: int
    metric: str
    seeds: int
    """How many of its trials have the metric."""
    mean: float
    spread: float | None
    """The standard deviation over the seeds. None: there is one seed."""
    difference: float | None
    """The mean of its difference to the compared variant, seed by seed. None: it is that one, or no seed is in both."""
    spread_of_difference: float | None
    """Its standard deviation over the seeds. None: fewer than two seeds are in both."""
    exceeds: bool | None
    """Whether the difference is more than seeds explain: a paired t-test at 5 %. None: fewer than two are in both."""


def over_seeds(
    trials: Sequence[Trial], measured: Mapping[int, Mapping[str, float]], compared_with: int
) -> list[OverSeeds]:
    """Return every metric of every variant over its seeds, compared with one variant (the best, say).

    `measured`: what the last evaluation of each trial has measured, by the trial's number.
    """
    found: dict[tuple[str, int], dict[int, float]] = {}
    for trial in trials:
        for metric, value in measured.get(trial.number, {}).items():
            if math.isfinite(value):
                found.setdefault((metric, trial.variant), {})[trial.seed or 0] = value
    rows = []
    for (metric, variant), values in sorted(found.items()):
        other = {} if variant == compared_with else found.get((metric, compared_with), {})
        pairs = [value - other[seed] for seed, value in sorted(values.items()) if seed in other]
        several = len(pairs) > 1
        rows.append(
            OverSeeds(
                variant,
                metric,
                len(values),
                fmean(values.values()),
                stdev(values.values()) if len(values) > 1 else None,
                fmean(pairs) if pairs else None,
                stdev(pairs) if several else None,
                _exceeds(pairs) if several else None,
            )
        )
    return rows


_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""The 97.5 % point of Student's t with 1 to 30 degrees of freedom; with more, the last is a little strict."""


def _exceeds(differences: Sequence[float]) -> bool:
    error = stdev(differences) / math.sqrt(len(differences))
    return abs(fmean(differences)) > _T[min(len(differences) - 1, len(_T)) - 1] * error
