"""The leaderboard of a sweep, and its trials compared over seeds, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from raytune_fsdp.tune.log import Entry, Trial


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
    state: Literal["open", "stopped", "complete", "failed"]
    """`open`: it may go on; `stopped`: a decision has stopped it."""
    error: str | None
    """Why it failed for good."""


def leaderboard(log: Sequence[Entry]) -> list[Standing]:
    """Return all trials on the log, the best first: complete ones, then those that came furthest, then failed ones."""
    raise NotImplementedError


def best_of(log: Sequence[Entry]) -> Trial | None:
    """Return the best trial: of several seeds, the first of those whose mean is best. None: there is no value yet."""
    raise NotImplementedError


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
    """The mean of its difference to the compared variant, seed by seed. None: it is that variant, or no seed is in both."""
    spread_of_difference: float | None
    exceeds: bool | None
    """Whether the difference is more than seeds explain: a paired t-test at 5 %. None: fewer than two seeds are in both."""


def over_seeds(
    trials: Sequence[Trial], measured: Mapping[int, Mapping[str, float]], compared_with: int
) -> list[OverSeeds]:
    """Return every metric of every variant over its seeds, compared with one variant (the best, say).

    `measured`: what the last evaluation of each trial has measured, by the trial's number.
    """
    raise NotImplementedError
