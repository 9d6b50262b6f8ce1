"""The scheduler of a sweep."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import takewhile

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.run.forks.changes import MAY_CHANGE, may_change
from raytune_fsdp.tune.schedulers.asha import Asha
from raytune_fsdp.tune.schedulers.median import Median
from raytune_fsdp.tune.schedulers.pbt import Pbt
from raytune_fsdp.tune.schedulers.protocol import Scheduler
from raytune_fsdp.tune.schedulers.rungs import Rungs, ToTheEnd
from raytune_fsdp.tune.spec import AshaScheduler, MedianScheduler, PbtScheduler, RungsScheduler, SweepSpec


def scheduler_of(spec: SweepSpec, configs: Sequence[FinetuneConfig]) -> Scheduler:
    """Return the scheduler of a sweep whose trials have these configs (`tune/space.py:check_trials`).

    Raises ConfigError if its steps do not suit them, such as a rung at a step without an evaluation.
    """
    rule = spec.scheduler
    lengths = [config.train.max_steps for config in configs]
    known = [length for length in lengths if length is not None]
    last = max(known) if len(known) == len(lengths) and known else None
    if isinstance(rule, RungsScheduler | AshaScheduler):
        steps = _rungs(rule, len(configs) // spec.seeds, _evaluated_every(configs), last)
        kind = Rungs if isinstance(rule, RungsScheduler) else Asha
        return kind(steps, rule.eta, spec.highest)
    if isinstance(rule, MedianScheduler):
        return Median(rule.grace, rule.others, spec.highest, last)
    if isinstance(rule, PbtScheduler):
        if last is None:
            raise ConfigError(
                "scheduler.type=pbt with train.epochs: members are compared before their end, which must be known: set "
                "train.max_steps in the base, or another scheduler.type"
            )
        _check_step("scheduler.every", rule.every, _evaluated_every(configs), last)
        _check_changes(rule, spec, configs)
        return Pbt(rule, spec.values, spec.highest, last)
    return ToTheEnd()


def _shared(values: Iterable[str | None]) -> str | None:
    """Return the value that all members have; None: they differ."""
    found = {*values}
    return found.pop() if len(found) == 1 else None


def _check_changes(rule: PbtScheduler, spec: SweepSpec, configs: Sequence[FinetuneConfig]) -> None:
    """Refuse fields that a member would change as a fork of another one, which no fork may change."""
    optimizer = _shared(config.optim.optimizer.type for config in configs)
    over = _shared(getattr(getattr(config.train.objective, "sft", None), "over", None) for config in configs)
    for field, values in spec.values.items():
        changes = field != "train.max_steps" and (rule.change is None or field in rule.change)
        first = values.items[0]  # from which all others may come where each may come from each
        allowed = [may_change(field, first, each, optimizer=optimizer, over=over) for each in values.items]
        if changes and not all(allowed):
            others = [each for each in spec.values if each != field]
            raise ConfigError(
                f"space.{field} with scheduler.type=pbt: members go on as forks of others, and {MAY_CHANGE}: name in "
                f"scheduler.change what may change (of {', '.join(others) or 'no other field'}), leave {field} out, or "
                "set another scheduler.type"
            )


def _rungs(rule: RungsScheduler | AshaScheduler, variants: int, every: int | None, last: int | None) -> list[int]:
    """Return the steps of the rungs below the end, as many as it takes until one variant is left."""
    count, left = 0, variants
    while left > 1:
        count, left = count + 1, max(1, left // rule.eta) if isinstance(rule, RungsScheduler) else left // rule.eta
    count -= left == 0  # nobody goes on from a rung that fewer than eta come to
    if not count:
        return []
    first = rule.first or every or 0
    _check_step("scheduler.first" if rule.first else "eval.every", first, every, last)
    return list(takewhile(lambda step: last is None or step < last, (first * rule.eta**rung for rung in range(count))))


def _evaluated_every(configs: Sequence[FinetuneConfig]) -> int | None:
    """Return after which multiple of steps all trials are evaluated. None: there is none, or it depends on the data."""
    every = [config.eval.every for config in configs]
    known = [each for each in every if isinstance(each, int)]
    return math.lcm(*known) if len(known) == len(every) and known else None


def _check_step(field: str, step: int, every: int | None, last: int | None) -> None:
    """Refuse comparisons at steps at which trials are not evaluated, or which are not below their ends."""
    if every is None:
        raise ConfigError(
            f"{field}: trials are compared at steps, so all of them must be evaluated every so many steps: set "
            "eval.every in the base to a number, or scheduler.type=none"
        )
    if step % every:
        raise ConfigError(
            f"{field}={step} is not a multiple of the trials' eval.every={every}, so there is nothing to compare: set "
            f"it to {-(-step // every) * every}, or change eval.every in the base"
        )
    if last is not None and step >= last:
        raise ConfigError(
            f"{field}={step} is not below train.max_steps={last}, so trials would be compared only at their ends: set "
            "it lower, or scheduler.type=none"
        )
