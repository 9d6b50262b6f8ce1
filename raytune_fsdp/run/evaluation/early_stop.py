"""End a run before its last step once its evaluations have not improved for a while.

The evaluations on record decide that, and nothing else, so a run that has crashed, or continues with other ranks, ends
at the step at which it would have ended anyway. Checkpoints hold nothing of it: with another `eval.early_stop`, a run
that has ended is judged again, and may continue.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from raytune_fsdp.base.errors import RaytuneError
from raytune_fsdp.config.sections.eval import EarlyStopConfig
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record.jsonl import read_evaluations
from raytune_fsdp.record.names import higher_is_better, score

T = TypeVar("T")

_ROUNDING = 1e-6
"""A relative difference that is no improvement. Losses in fp32 differ by 1e-7 with the number of ranks
(docs/architecture.md), and a model that has stopped learning must not seem to improve with only some of these
numbers."""


def ended_by(rule: EarlyStopConfig | None, evaluations: Mapping[int, Mapping[str, float]]) -> dict[str, Any] | None:
    """Return why the last of these evaluations ends the run, as the fields of an event; None if it does not.

    An evaluation whose value is not finite has not improved. One that lacks the metric, which the config may have named
    later, does not count.
    """
    if rule is None:
        return None
    sign = 1.0 if higher_is_better(rule.metric) else -1.0
    best, best_step, waited, step = -math.inf, None, 0, 0
    for step in sorted(evaluations):
        values = evaluations[step]
        if rule.metric not in values and not (rule.metric is None and any(name.endswith("/loss") for name in values)):
            continue
        found = score(values, rule.metric)
        now = -math.inf if found is None else sign * found
        # The first one is compared with nothing: a run is not over before it has had a chance to improve.
        least = best + max(rule.min_delta, _ROUNDING * abs(best)) if math.isfinite(best) else -math.inf
        if best_step is None or now > least:
            best, best_step, waited = now, step, 0
        else:
            waited += 1
    if best_step is None or waited < rule.patience:
        return None
    ended = {"step": step, "metric": rule.metric or "the mean loss", "best": sign * best, "best_step": best_step}
    return {**ended, "min_delta": rule.min_delta} if rule.min_delta else ended


def ended_on_record(rule: EarlyStopConfig | None, place: RunDir, step: int) -> bool:
    """Return whether the evaluations on a run's record, up to that of its checkpoint's step, end it.

    Without a checkpoint they do not: what earlier attempts have measured after it is cut from the record.
    """
    if rule is None or step == 0:
        return False
    try:
        found = read_evaluations(place.metrics, step)
    except RaytuneError:  # a broken record: the next attempt mends it, and then looks again
        return False
    return ended_by(rule, found) is not None


@dataclass(slots=True)
class EarlyStop:
    """The evaluations of a run so far, and whether they have ended it; equal on every rank."""

    rule: EarlyStopConfig | None
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    """Values by step, including those of earlier attempts."""
    over: dict[str, Any] | None = None
    """Why the run is over. None: it is not."""

    def add(self, step: int, values: Mapping[str, float]) -> dict[str, Any] | None:
        """Add an evaluation. Return why it ends the run; None if it does not."""
        self.evaluations[step] = dict(values)
        self.over = ended_by(self.rule, self.evaluations)
        return self.over

    def until(self, items: Iterator[T]) -> Iterator[T]:
        """Yield the items until the run is over."""
        while self.over is None and (item := next(items, None)) is not None:
            yield item
