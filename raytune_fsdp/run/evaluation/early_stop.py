"""When a run ends before its last step: its evaluations have not improved for a while.

That follows from the evaluations on record and nothing else, so a run that has crashed, or goes on with other ranks,
ends at the step at which it would have ended anyway. Nothing of it is in a checkpoint: with another
`eval.early_stop`, also a run that has ended is looked at anew, and may go on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from raytune_fsdp.config.sections.eval import EarlyStopConfig
from raytune_fsdp.record.names import higher_is_better, score

T = TypeVar("T")

_ROUNDING = 1e-6
"""Relative. Losses in fp32 differ by 1e-7 with the number of ranks (docs/architecture.md), and a model that has stopped
learning must not seem to improve on one of them only."""


def ended_by(rule: EarlyStopConfig | None, evaluations: Mapping[int, Mapping[str, float]]) -> dict[str, Any] | None:
    """Why the last of these evaluations ends the run, as the fields of an event; None if it does not.

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
        # The first one is compared with nothing: a run is not over before it has got a chance to improve.
        least = best + max(rule.min_delta, _ROUNDING * abs(best)) if math.isfinite(best) else -math.inf
        if best_step is None or now > least:
            best, best_step, waited = now, step, 0
        else:
            waited += 1
    if best_step is None or waited < rule.patience:
        return None
    return {"step": step, "metric": rule.metric or "the mean loss", "best": sign * best, "best_step": best_step}


@dataclass(slots=True)
class EarlyStop:
    """The evaluations of a run so far, and whether they have ended it. The same on every rank."""

    rule: EarlyStopConfig | None
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    """By step, those of earlier attempts too."""
    over: dict[str, Any] | None = None
    """Why the run is over, once it is."""

    def add(self, step: int, values: Mapping[str, float]) -> dict[str, Any] | None:
        """Take an evaluation; why it ends the run, if it does."""
        self.evaluations[step] = dict(values)
        self.over = ended_by(self.rule, self.evaluations)
        return self.over

    def until(self, items: Iterator[T]) -> Iterator[T]:
        """The items, until the run is over."""
        while self.over is None and (item := next(items, None)) is not None:
            yield item
