"""What a user may write in sweep.yaml: `SweepSpec`, read and checked as a run's config is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from raytune_fsdp.config.rules import Section, local_path, run_name
from raytune_fsdp.config.schema import Option, Place
from raytune_fsdp.record.names import highest_is_best

KINDS = ("grid", "choice", "uniform", "loguniform", "int")
"""How a field's values may be given: one of a list, the numbers between two, the same by their logarithms, integers."""
RECIPE = "recipe"
"""In a space, the name of what each trial's base is: a recipe, or the path of a config."""
MOST_TRIALS = 10_000
_SET_BY_SWEEP = {
    "run.name": "from the sweep's name and the trial's number",
    "run.storage": "to the sweep's storage",
    "run.resume": "so that the same command goes on",
    "run.stop_after": "by its scheduler",
    "run.fork": "by its scheduler",
}


@dataclass(frozen=True, slots=True)
class Values:
    """The values that a field may get."""

    kind: str
    """One of KINDS."""
    items: tuple[Any, ...]
    """The values themselves, or of a range the lowest and the highest."""

    @property
    def listed(self) -> bool:
        return self.kind in ("grid", "choice")


class GridSearch(Section):
    type: Literal["grid"] = "grid"
    """Every combination of the values in `space`, in the order in which they are written: the last field changes first."""


class RandomSearch(Section):
    type: Literal["random"]
    """Values drawn at random. A trial's values follow from the seed, its number and the field's name, and nothing else."""

    trials: int = Field(ge=1, le=MOST_TRIALS)
    """How many trials."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the draws."""


class OptunaSearch(Section):
    type: Literal["optuna"]
    """Optuna's sampler (TPE) proposes each trial from the values of those that have ended. Needs the extra `optuna`."""

    trials: int = Field(ge=1, le=MOST_TRIALS)
    """How many trials."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the sampler."""


SearchChoice = Annotated[GridSearch | RandomSearch | OptunaSearch, Field(discriminator="type")]


class RungsScheduler(Section):
    type: Literal["rungs"] = "rungs"
    """Successive halving by full rungs: all trials train to the first rung, the best of them to the second, and so on. No
    trial goes on before all have arrived, so the same sweep has the same log and the same winner, whatever happens to it."""

    first: int | None = Field(default=None, ge=1)
    """Step of the first rung; the others are at this times eta, eta squared, and so on. Trials must be evaluated there. Null:
    the first evaluation (`eval.every`)."""

    eta: int = Field(default=2, ge=2)
    """One in this many trials goes on from each rung."""


class AshaScheduler(Section):
    type: Literal["asha"]
    """Asynchronous successive halving: a trial goes on as soon as it is among the best of those that have arrived at its rung
    so far. Nobody waits; which trials go on depends on who arrives first, and is on the log."""

    first: int | None = Field(default=None, ge=1)
    """Step of the first rung, as with `rungs`."""

    eta: int = Field(default=2, ge=2)
    """One in this many trials goes on from each rung."""


class MedianScheduler(Section):
    type: Literal["median"]
    """A trial stops when its best value so far is worse than the median of what the others had on average up to that step."""

    grace: int = Field(default=0, ge=0)
    """No trial stops at this step or before."""

    others: int = Field(default=3, ge=1)
    """How many other trials must have come as far before one is compared with them."""


class PbtScheduler(Section):
    type: Literal["pbt"]
    """Population-based training, in step: every so many steps the worst members go on as forks of the best ones, with some of
    their values changed. Draws follow from the seed and are on the log."""

    every: int = Field(ge=1)
    """Steps between two comparisons. Members must be evaluated there."""

    quantile: float = Field(default=0.25, gt=0, le=0.5)
    """The share of members that are replaced, and the share of those that replace them."""

    change: list[str] | None = None
    """Fields of `space` that a fork changes. Null: all of them."""

    factors: list[Annotated[float, Field(gt=0)]] = Field(default=[0.8, 1.25], min_length=1)
    """A number is multiplied by one of these, within its range; of listed values, a neighbour is taken."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the draws."""


class NoScheduler(Section):
    type: Literal["none"]
    """All trials train to their ends."""


SchedulerChoice = Annotated[
    RungsScheduler | AshaScheduler | MedianScheduler | PbtScheduler | NoScheduler, Field(discriminator="type")
]


class BudgetConfig(Section):
    gpu_hours: float | None = Field(default=None, gt=0)
    """Nothing is started any more once all trials together have used this much. Null: no limit."""

    until: str | None = None
    """Nothing runs after this time, such as `2026-12-01 08:00` (of this machine's zone, unless it says which). The same
    command, with a later time, goes on. Null: no limit."""

    @field_validator("until")
    @classmethod
    def _time(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                datetime.fromisoformat(value)
            except ValueError:
                raise ValueError("is not a date and a time: write it like 2026-12-01 08:00") from None
        return value


class SweepSpec(Section):
    """Everything a user may say about a sweep, exactly as written."""

    name: Annotated[str, AfterValidator(run_name), Field(max_length=100)]
    """Name of the sweep and of its directory below `storage`. Its trials are runs of this name with a number: `<name>-007`.
    The same name continues the same sweep."""

    storage: Annotated[str, AfterValidator(local_path)] = "runs"
    """Directory that every machine of the trials can write to; `run.storage` of all of them."""

    base: str | dict[str, Any] = Field(default_factory=dict)
    """The config that all trials share: a YAML file, a recipe's name, or the sections themselves."""

    space: dict[str, Any] = Field(default_factory=dict)
    """Which values fields get, by their dotted names: `{grid: [...]}` or `{choice: [...]}`, `{uniform: [from, to]}`,
    `{loguniform: [from, to]}`, `{int: [from, to]}`. `recipe` stands for the base itself."""

    search: SearchChoice = Field(default_factory=GridSearch)
    """Which values the trials get."""

    scheduler: SchedulerChoice = Field(default_factory=RungsScheduler)
    """Which trials go on, and how far."""

    metric: str | None = None
    """The metric that trials are compared by, such as `eval/<dataset>/loss`. Null: the mean loss over all datasets."""

    best_is: Literal["auto", "lowest", "highest"] = "auto"
    """Whether the lowest or the highest value of the metric is best. `auto`: the highest of metrics whose names end in
    `accuracy`, `accuracy_normalised` or `exact_match`, the lowest of all others."""

    seeds: int = Field(default=1, ge=1, le=100)
    """Train every trial with this many seeds: the base's `run.seed`, and those after it. The samples of a seed are the same in
    all trials. Only with the schedulers `rungs`, which compares means over the seeds, and `none`."""

    concurrent: int = Field(default=1, ge=1, le=1000)
    """How many trials run at the same time."""

    budget: BudgetConfig = Field(default_factory=BudgetConfig)
    """When the sweep stops though it is not over."""

    @property
    def highest(self) -> bool:
        """Whether the highest value of the metric is the best."""
        return highest_is_best(self.metric, self.best_is)

    @property
    def values(self) -> dict[str, Values]:
        """The space, by the names of the fields, in the order in which it is written."""
        return {name: Values(*next(iter((kind, tuple(items)) for kind, items in each.items()))) for name, each in self.space.items()}


SWEEP = Place((Option(SweepSpec),))


def load_sweep(sweep: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> SweepSpec:
    """Return a validated sweep. Raises ConfigError naming every problem.

    `sweep`: a YAML file, or what it would say. `overrides`: flags as on the command line, such as "--search.trials=8".
    The trials' configs are checked by `tune/space.py:check_trials`.
    """
    raise NotImplementedError
