"""What a user may write in sweep.yaml: `SweepSpec`, read and checked as a run's config is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, field_validator, model_validator

from raytune_fsdp.base.errors import ConfigError, Interrupted
from raytune_fsdp.config.load import ROOT, ReadConfig, merged, read_file, settle, validated
from raytune_fsdp.config.problems import shown
from raytune_fsdp.config.recorded import recorded
from raytune_fsdp.config.rules import Section, local_path, run_name
from raytune_fsdp.config.schema import ANYTHING, Option, Place, find_place
from raytune_fsdp.config.text import Loc, dump
from raytune_fsdp.record.lines import is_number
from raytune_fsdp.record.names import highest_is_best

KINDS = ("grid", "choice", "uniform", "loguniform", "int")
"""How a field's values may be given: one of a list, the numbers between two, the same by their logarithms, integers."""
RECIPE = "recipe"
"""In a space, the name of what each trial's base is: a recipe, or the path of a config."""
MOST_TRIALS = 1000
"""So that their numbers have three digits."""
_LARGEST = 1 << 53
"""Above this not every integer is a float."""
_SET_BY_SWEEP = ("run.name", "run.storage", "run.resume", "run.stop_after", "run.fork")


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


def _values(value: Any) -> Any:
    """Check how the values of a field are given."""
    kind, items = next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else (None, None)
    if kind not in KINDS or not isinstance(items, list | tuple):
        kinds = ", ".join(KINDS)
        raise ValueError(f"must be a map with a list under one of {kinds}, such as {{loguniform: [1e-5, 1e-3]}}")
    if kind in ("grid", "choice"):
        if not items:
            raise ValueError("names no value: name at least one, or leave the field out")
        return value
    whole = kind == "int"
    if len(items) != 2 or not all(type(each) is int if whole else is_number(each) for each in items):
        raise ValueError(f"{kind} needs two {'integers' if whole else 'numbers'}, the lowest and the highest")
    if any(type(each) is int and abs(each) > _LARGEST for each in items):
        raise ValueError(f"{kind} needs numbers of at most {_LARGEST:,}")
    low, high = items
    if not math.isfinite(low) or not math.isfinite(high) or low >= high:
        raise ValueError(f"{kind} needs two finite numbers, the lower one first")
    if kind == "loguniform" and low <= 0:
        raise ValueError("loguniform needs numbers above 0: raise the lowest, or use uniform")
    return value


class GridSearch(Section):
    type: Literal["grid"] = "grid"
    """Every combination of the values in `space`, in the order in which they are written; the last field varies
    fastest."""


class RandomSearch(Section):
    type: Literal["random"]
    """Values drawn at random. They follow from the seed, the trial's number and the field's name, and nothing else."""

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
    """Seed of the draws."""


SearchChoice = Annotated[GridSearch | RandomSearch | OptunaSearch, Field(discriminator="type")]


class RungsScheduler(Section):
    type: Literal["rungs"] = "rungs"
    """Successive halving by full rungs: all trials train to the first rung, the best of them to the second, and so on.
    No trial goes on before all have arrived, so the same sweep has the same log and the same winner, whatever is killed
    meanwhile."""

    first: int | None = Field(default=None, ge=1)
    """Step of the first rung; the others are at this times eta, eta squared, and so on. Trials must be evaluated there.
    Null: the first evaluation (`eval.every`)."""

    eta: int = Field(default=2, ge=2)
    """One in this many trials goes on from each rung."""


class AshaScheduler(Section):
    type: Literal["asha"]
    """Asynchronous successive halving: a trial goes on as soon as it is among the best of those that have arrived at
    its rung so far. Nobody waits; which trials go on depends on who arrives first, and is on the log."""

    first: int | None = Field(default=None, ge=1)
    """Step of the first rung; the others are at this times eta, eta squared, and so on. Trials must be evaluated there.
    Null: the first evaluation (`eval.every`)."""

    eta: int = Field(default=2, ge=2)
    """One in this many trials goes on from each rung."""


class MedianScheduler(Section):
    type: Literal["median"]
    """A trial stops when its best value so far is worse than the median of what the others had on average up to its
    step."""

    grace: int = Field(default=0, ge=0)
    """No trial stops at this step or before."""

    others: int = Field(default=3, ge=1)
    """How many other trials must have come as far before one is compared with them."""


class PbtScheduler(Section):
    type: Literal["pbt"]
    """Population-based training, in step: every so many steps the worst members go on as forks of the best ones, with
    some of their values changed. Draws follow from the seed and are on the log. Needs `train.max_steps`."""

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
                given = datetime.fromisoformat(value)
            except ValueError:
                raise ValueError("is not a date and a time: write it like 2026-12-01 08:00") from None
            try:
                given.astimezone()
            except (ValueError, OverflowError):  # the first or the last day of all, in some zones
                raise ValueError("is no time here: name one less far away, or leave budget.until out") from None
        return value

    def check_until(self) -> None:
        """Raise Interrupted if the time has come."""
        if self.until is not None and datetime.now().astimezone() >= datetime.fromisoformat(self.until).astimezone():
            raise Interrupted(f"budget.until={self.until} has come; with a later one the same command goes on")


class SweepSpec(Section):
    """Everything a user may say about a sweep, exactly as written."""

    name: Annotated[str, AfterValidator(run_name), Field(max_length=100)]
    """Name of the sweep and of its directory below `storage`. Its trials are runs of this name with a number:
    `<name>-007`. The same name continues the same sweep."""

    storage: Annotated[str, AfterValidator(local_path)] = "runs"
    """Directory that every machine of the trials can write to; `run.storage` of all of them."""

    base: str | dict[str, Any] = Field(default_factory=dict)
    """The config that all trials share: a YAML file, a recipe's name, or the sections themselves."""

    space: dict[str, Annotated[Any, AfterValidator(_values)]] = Field(default_factory=dict)
    """Which values fields get, by their dotted names: `{grid: [...]}` or `{choice: [...]}`, `{uniform: [from, to]}`,
    `{loguniform: [from, to]}`, `{int: [from, to]}`. `recipe` stands for the base itself."""

    search: SearchChoice = Field(default_factory=GridSearch)
    """Which values the trials get."""

    scheduler: SchedulerChoice = Field(default_factory=RungsScheduler)
    """Which trials go on, and how far."""

    metric: str | None = None
    """The metric that trials are compared by, such as `eval/<dataset>/loss`. Null: the mean loss over all datasets."""

    best_is: Literal["auto", "lowest", "highest"] = "auto"
    """Whether the lowest or the highest value of the metric is best. `auto`: that follows from its name,
    as for `checkpoint.best_is`."""

    seeds: int = Field(default=1, ge=1, le=100)
    """Train every trial with this many seeds: the base's `run.seed`, and those after it. The samples of a seed are the
    same in all trials. Only with the schedulers `rungs`, which compares means over the seeds, and `none`."""

    concurrent: int = Field(default=1, ge=1, le=1000)
    """How many trials run at the same time."""

    budget: BudgetConfig = Field(default_factory=BudgetConfig)
    """When the sweep stops though it is not over."""

    skip: list[str] = Field(default_factory=list)
    """Trials to leave out, by their runs' names: those that cannot be trained, so that the sweep goes on without them.
    They are ranked last. The name of a fork leaves its trial out while that is its newest run."""

    _files: dict[str, ReadConfig | ConfigError] = PrivateAttr(default_factory=dict)

    def read(self, file: str) -> ReadConfig:
        """Return a base as it was when the sweep was loaded: what becomes of the file meanwhile changes no trial.

        Raises ConfigError if it could not be read then.
        """
        if file not in self._files:
            try:
                self._files[file] = ReadConfig(*read_file(file))
            except ConfigError as error:
                self._files[file] = error
        if isinstance(found := self._files[file], ConfigError):
            raise ConfigError(*found.args)
        return found

    @property
    def highest(self) -> bool:
        """Whether the highest value of the metric is the best."""
        return highest_is_best(self.metric, self.best_is)

    @property
    def values(self) -> dict[str, Values]:
        """The space, by the names of the fields, in the order in which it is written."""
        return {name: Values(kind, tuple(items)) for name, each in self.space.items() for kind, items in each.items()}

    @property
    def decides(self) -> dict[str, Any]:
        """What decides how the sweep goes, as its log says it first."""
        return self.model_dump(mode="json", include={"space", "search", "scheduler", "metric", "seeds"})

    @model_validator(mode="after")
    def _space(self) -> Self:
        for field in self.space:
            for own in _SET_BY_SWEEP:
                if field == own or own.startswith(f"{field}.") or field.startswith(f"{own}."):
                    raise ValueError(
                        f"space.{field}: the sweep itself sets {own} of every trial: leave it out, and name other "
                        "fields one by one"
                    )
        if "run.seed" in self.space and self.seeds > 1:
            raise ValueError(
                f"space.run.seed with seeds={self.seeds}: the sweep then sets run.seed of every trial: leave one out"
            )
        if RECIPE in self.space and isinstance(self.base, str):
            raise ValueError(
                f"space.{RECIPE} with base={shown(self.base)}: each trial's base is its recipe: leave base out, or "
                "write there, as a map, what goes over all recipes"
            )
        return self

    @model_validator(mode="after")
    def _search(self) -> Self:
        if isinstance(self.search, GridSearch):
            ranges = [name for name, values in self.values.items() if not values.listed]
            if ranges:
                raise ValueError(
                    f"space.{ranges[0]}={shown(self.space[ranges[0]])} with search.type=grid: a grid needs the values "
                    "themselves: write {grid: [...]}, or set search.type=random"
                )
            trials = math.prod(len(values.items) for values in self.values.values())
        else:
            trials = self.search.trials
            if not self.space:
                raise ValueError(
                    f"search.trials={trials} without space: all trials would be the same: name fields in space, or "
                    "leave search out"
                )
        if trials * self.seeds > MOST_TRIALS:
            raise ValueError(
                f"search.type={self.search.type} makes {trials * self.seeds:,} trials of space and seeds, and a sweep "
                f"may have {MOST_TRIALS:,}: draw some with search.type=random"
            )
        return self

    @model_validator(mode="after")
    def _scheduler(self) -> Self:
        kind = self.scheduler.type
        if self.search.type == "optuna" and kind not in ("median", "none"):
            raise ValueError(
                f"scheduler.type={kind} with search.type=optuna: Optuna proposes a trial from those that have ended, "
                f"and {kind} needs all of them at once: set scheduler.type=median or none, or search.type=random"
            )
        if self.seeds > 1 and (kind not in ("rungs", "none") or self.search.type == "optuna"):
            other = f"scheduler.type={kind}" if kind not in ("rungs", "none") else "search.type=optuna"
            raise ValueError(
                f"seeds={self.seeds} with {other}: it compares single runs: sweep with one seed, and then the best "
                "values with several, or set scheduler.type=rungs with search.type=grid or random"
            )
        if isinstance(self.scheduler, PbtScheduler):
            if RECIPE in self.space:
                raise ValueError(
                    f"space.{RECIPE} with scheduler.type=pbt: a fork goes on in its parent's recipe: set another "
                    f"scheduler.type, or leave {RECIPE} out"
                )
            for field in self.scheduler.change or ():
                if field not in self.space:
                    raise ValueError(
                        f"scheduler.change names {field}, which is not in space: name fields of it "
                        f"({', '.join(self.space) or 'it has none'}), or leave change out"
                    )
        return self


SWEEP = Place((Option(SweepSpec),))


def load_sweep(sweep: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> SweepSpec:
    """Return a validated sweep. Raises ConfigError naming every problem.

    `sweep`: a YAML file, or what it would say. `overrides`: flags as on the command line, such as "--search.trials=8".
    The trials' configs are checked by `tune/space.py:check_trials`.
    """
    tree, sources, problems = merged(sweep, overrides, SWEEP)
    # Values mean what they mean in the fields that they end up in: `2024` in a text field is text.
    if isinstance(base := tree.get("base"), dict):
        tree["base"] = settle(base, ROOT)
    if isinstance(space := tree.get("space"), dict):
        named = dict(_fields(space, ()))
        tree["space"] = {".".join(path): _meant(path, values) for path, values in named.items()}
        sources |= {("space", ".".join(loc[1:])): each for loc, each in sources.items() if loc[1:] in named}
    spec = validated(SweepSpec, tree, sources, problems)
    recipes = spec.values[RECIPE].items if RECIPE in spec.space else ()
    for file in (*map(str, recipes), *([spec.base] if isinstance(spec.base, str) else [])):
        with suppress(ConfigError):  # which its trials then raise
            spec.read(file)
    return spec


def _fields(space: Mapping[str, Any], path: Loc) -> Iterator[tuple[Loc, Any]]:
    """Yield the fields of a space, whether they are written `optim.lr: ...` or `optim: {lr: ...}`, as flags are."""
    for name, values in space.items():
        here = (*path, *str(name).split("."))
        if isinstance(values, dict) and values and not set(values) & set(KINDS):
            yield from _fields(values, here)
        else:
            yield here, values


def _meant(path: Loc, values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    place = find_place(ROOT, path) or ANYTHING
    lists = ("grid", "choice")
    return {
        kind: [settle(item, place) for item in items] if kind in lists and isinstance(items, list) else items
        for kind, items in values.items()
    }


def sweep_text(spec: SweepSpec) -> str:
    """Return the sweep as YAML for its directory: defaults included, without the secrets of its base."""
    tree = spec.model_dump(mode="json")
    return dump({**tree, "base": recorded(spec.base) if isinstance(spec.base, dict) else spec.base})
