"""A trial stops when its best value is worse than the median of what the others had on average up to its step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from raytune_fsdp.tune.history import TrialHistory, histories, news
from raytune_fsdp.tune.log import Decision, Entry, Trial, Value
from raytune_fsdp.tune.schedulers.protocol import Found, Next, Stretch


@dataclass(frozen=True, slots=True)
class Median:
    grace: int
    others: int
    highest: bool
    last: int | None
    """The last step of the trials, if it is known: nobody stops there."""

    def taken(self, trials: Sequence[Trial], log: Sequence[Entry], found: Sequence[Found]) -> Sequence[Found]:
        return next((new[:1] for new in news(found, histories(trials, log)).values()), [])

    def next(self, trials: Sequence[Trial], log: Sequence[Entry]) -> Next:
        known = histories(trials, log)
        # Decided when a value comes, and not again: what others measure later changes nothing.
        newest = next((entry for entry in reversed(log) if isinstance(entry, Value)), None)
        if newest is not None and known[newest.trial].state == "open" and self._is_worse(known, newest):
            return Next([Decision(newest.step, (), (newest.trial,))], (), over=False)
        here = [each for each in known.values() if each.state == "open"]
        return Next((), [Stretch(each.number, None, changes=each.trial.changes) for each in here], over=not here)

    def _is_worse(self, known: dict[int, TrialHistory], newest: Value) -> bool:
        if newest.step <= self.grace or newest.step == self.last:
            return False
        come = [each for number, each in known.items() if number != newest.trial and each.step >= newest.step]
        means = [fmean(there) for each in come if (there := _finite(each, newest.step))]
        if len(means) < self.others:
            return False
        own = _finite(known[newest.trial], newest.step)
        if not own:
            return True
        return max(own) < median(means) if self.highest else min(own) > median(means)


def _finite(history: TrialHistory, step: int) -> list[float]:
    return [value for at, value in history.values.items() if at <= step and math.isfinite(value)]
