"""The leaderboard of a sweep, and its trials compared over seeds, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from raytune_fsdp.tune.history import State, histories, rank
from raytune_fsdp.tune.log import Entry, SweepBegun, Trial, trials_in


@dataclass(frozen=True, slots=True)
class Standing:
    """A place in the sweep: that of a trial, or of all seeds of a variant together."""

    trial: Trial
    """Of several seeds the first."""
    changes: Mapping[str, Any]
    """What it changes of the base now: of a fork, that fork's."""
    step: int
    """The step of its last value on the log; 0: there is none. Of several seeds, that of the one furthest behind."""
    value: float | None
    """That value. None: there is none. Of several seeds their mean; None: one of them has none."""
    state: State
    """`open`: it may go on; `stopped`: a decision has stopped it. Of several seeds, that of the one furthest behind."""
    error: str | None
    """Why it failed for good."""
    generation: int = 0
    """Which of its runs is the newest."""
    seeds: int = 1
    """How many trials stand here together."""


def standings(log: Sequence[Entry]) -> list[Standing]:
    """Return where each trial stands, in the order of their numbers."""
    return [
        Standing(
            each.trial,
            each.changes,
            each.step,
            each.last if each.values else None,
            each.state,
            None if each.ended is None else each.ended.error,
            len(each.draws),
        )
        for each in histories(trials_in(log), log).values()
    ]


def leaderboard(log: Sequence[Entry]) -> list[Standing]:
    """Return all variants on the log, the best first: complete ones and those that came furthest, by their values;
    then those that are less far, then failed ones.

    Without seeds each trial is a variant. The seeds of one stand together where the last of them stands.
    """
    variants: dict[int, list[Standing]] = {}
    for each in standings(log):
        variants.setdefault(each.trial.variant, []).append(each)
    highest = bool(log) and isinstance(log[0], SweepBegun) and log[0].highest
    lasting = [seeds for seeds in variants.values() if all(each.state != "failed" for each in seeds)]
    furthest = max((min(each.step for each in seeds) for seeds in lasting), default=0)

    def place(row: Standing) -> tuple[bool, int, tuple[bool, float], int]:
        value = math.nan if row.value is None else row.value
        return *_behind(row, furthest), rank(value, highest), row.trial.number

    return sorted((_together(seeds, furthest) for seeds in variants.values()), key=place)


def _behind(each: Standing, furthest: int) -> tuple[bool, int]:
    """Return how far behind it is. Complete runs are compared whatever their lengths, as some end early: with each
    other, and in a sweep that is not over with those that came furthest, which may long be better."""
    return each.state == "failed", -(furthest if each.state == "complete" else each.step)


def _together(seeds: Sequence[Standing], furthest: int) -> Standing:
    if len(seeds) == 1:
        return seeds[0]
    values = [each.value for each in seeds if each.value is not None]
    mean: float | None = None
    if len(values) == len(seeds):
        mean = math.nan
        with suppress(OverflowError, ValueError):  # a stranger's log has any numbers
            mean = fmean(values)
    first, last = seeds[0], max(seeds, key=lambda each: (*_behind(each, furthest), each.state != "complete"))
    return replace(
        last, trial=first.trial, changes=first.changes, generation=first.generation, value=mean, seeds=len(seeds)
    )


def best_of(rows: Sequence[Standing]) -> Standing | None:
    """Return the best of a leaderboard; None: nobody has a value yet."""
    # Who has come furthest is no winner without a finite value.
    there = (row for row in rows if row.state != "failed" and row.value is not None and math.isfinite(row.value))
    return next(there, None)


@dataclass(frozen=True, slots=True)
class OverSeeds:
    """One metric of one variant over the seeds, after one step."""

    variant: int
    metric: str
    step: int
    """The last one at which all its trials have the metric, and those of the compared variant, too."""
    seeds: int
    """How many of its trials have a finite value there."""
    mean: float
    spread: float | None
    """The standard deviation over the seeds. None: there is one seed."""
    difference: float | None
    """The mean of its difference to the compared variant at this step, seed by seed. None: it is that one, or no seed
    is in both."""
    spread_of_difference: float | None
    """Its standard deviation over the seeds. None: fewer than two seeds are in both."""
    exceeds: bool | None
    """Whether the difference is more than seeds explain: a paired t-test at 5 %. None: fewer than two are in both."""


Measured = Mapping[int, Mapping[int, Mapping[str, float]]]
"""What evaluations have measured: of each trial, by its number, of each step, each metric."""


def over_seeds(trials: Sequence[Trial], measured: Measured, compared_with: int) -> list[OverSeeds]:
    """Return every metric of every variant over its seeds, compared with one variant (the best, say): each variant with
    what that one had when it was as far."""
    found: dict[tuple[str, int], dict[int, dict[int, float]]] = {}
    for trial in trials:
        for step, values in measured.get(trial.number, {}).items():
            for metric, value in values.items():
                found.setdefault((metric, trial.variant), {}).setdefault(trial.seed or 0, {})[step] = value
    rows = []
    for (metric, variant), seeds in sorted(found.items()):
        others = {} if variant == compared_with else found.get((metric, compared_with), {})
        step = _last_common(seeds, others)
        own, other = _finite(seeds, step), _finite(others, step)
        if own:
            pairs = [value - other[seed] for seed, value in sorted(own.items()) if seed in other]
            rows.append(_over(variant, metric, step, list(own.values()), pairs))
    return rows


def _last_common(seeds: Mapping[int, Mapping[int, float]], others: Mapping[int, Mapping[int, float]]) -> int:
    """Return the last step that all seeds have, and those of the other variant, too; else the last that there is.

    A value that is not finite counts as one: a step at which a seed has diverged is not passed over.
    """
    each = [set(values) for values in seeds.values()]
    own = each[0].intersection(*each[1:])
    return max(own.intersection(*others.values()) or own or each[0].union(*each[1:]))


def _finite(seeds: Mapping[int, Mapping[int, float]], step: int) -> dict[int, float]:
    return {seed: values[step] for seed, values in seeds.items() if math.isfinite(values.get(step, math.nan))}


def _over(variant: int, metric: str, step: int, values: Sequence[float], pairs: Sequence[float]) -> OverSeeds:
    several = len(pairs) > 1
    return OverSeeds(
        variant,
        metric,
        step,
        len(values),
        fmean(values),
        stdev(values) if len(values) > 1 else None,
        fmean(pairs) if pairs else None,
        stdev(pairs) if several else None,
        _exceeds(pairs) if several else None,
    )


_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""The 97.5 % point of Student's t with 1 to 30 degrees of freedom; with more, the last is a little strict."""


def _exceeds(differences: Sequence[float]) -> bool:
    error = stdev(differences) / math.sqrt(len(differences))
    return abs(fmean(differences)) > _T[min(len(differences) - 1, len(_T)) - 1] * error
