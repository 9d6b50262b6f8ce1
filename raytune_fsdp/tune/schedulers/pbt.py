"""Population-based training, in step: at every comparison the worst members become forks of the best ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raytune_fsdp.base.errors import ResumeError
from raytune_fsdp.base.random import derive_key
from raytune_fsdp.tune.history import TrialHistory, histories, rank
from raytune_fsdp.tune.log import WAY_OUT, Decision, Draw, Entry, Trial, changes_now
from raytune_fsdp.tune.schedulers.protocol import Found, Next, Stretch
from raytune_fsdp.tune.schedulers.rungs import arrivals
from raytune_fsdp.tune.search import rounded
from raytune_fsdp.tune.spec import PbtScheduler, Values


@dataclass(frozen=True, slots=True)
class Pbt:
    rule: PbtScheduler
    space: Mapping[str, Values]
    highest: bool
    last: int
    """The last step of the members."""

    def taken(self, trials: Sequence[Trial], log: Sequence[Entry], found: Sequence[Found]) -> Sequence[Found]:
        return arrivals(list(histories(trials, log).values()), found, self._until(log))

    def next(self, trials: Sequence[Trial], log: Sequence[Entry]) -> Next:
        known, until = histories(trials, log), self._until(log)
        decision = next((entry for entry in reversed(log) if isinstance(entry, Decision)), None)
        if decision is not None:
            lost = [n for n in decision.stop if not any(draw.step == decision.step for draw in known[n].draws)]
            if lost:
                return Next([self._draw(lost[0], decision, known, log)], (), over=False)
        here = [each for each in known.values() if each.state == "open" and until not in each.values]
        if here:
            # Forks first: what they begin from must not be pruned while they wait.
            here.sort(key=lambda each: (not (decision and each.number in decision.stop), each.number))
            return Next((), [_stretch(each, until) for each in here], over=False)
        if until is None or not self._sources(known, until):
            return Next((), (), over=True)
        return Next([self._compared(known, until)], (), over=False)

    def _until(self, log: Sequence[Entry]) -> int | None:
        """Return the step of the next comparison. None: the end comes first."""
        step = self.rule.every * (1 + sum(isinstance(entry, Decision) for entry in log))
        return step if step < self.last else None

    def _sources(self, known: Mapping[int, TrialHistory], step: int) -> list[int]:
        """Return the members that have a checkpoint of this step, the best first."""
        there = [each for each in known.values() if math.isfinite(each.values.get(step, math.nan))]
        there.sort(key=lambda each: (rank(each.values[step], self.highest), each.number))
        return [each.number for each in there]

    def _compared(self, known: Mapping[int, TrialHistory], step: int) -> Decision:
        best = self._sources(known, step)[: self._share(known)]
        worst = sorted(known.values(), key=lambda each: (*self._rank(each, step), each.number))[-self._share(known) :]
        failed = [each for each in known.values() if each.state == "failed"]
        stop = {each.number for each in (*worst, *failed)} - set(best)
        return Decision(step, tuple(sorted(set(known) - stop)), tuple(sorted(stop)))

    def _rank(self, each: TrialHistory, step: int) -> tuple[bool, tuple[bool, float]]:
        return each.state == "failed", rank(each.values.get(step, each.last), self.highest)

    def _share(self, known: Mapping[int, TrialHistory]) -> int:
        return max(1, math.floor(len(known) * self.rule.quantile))

    def _draw(self, trial: int, at: Decision, known: Mapping[int, TrialHistory], log: Sequence[Entry]) -> Draw:
        best = [number for number in self._sources(known, at.step) if number in at.on][: self._share(known)]
        if not best:
            raise ResumeError(f"after step {at.step} no trial goes on that was measured: {WAY_OUT}")
        source = best[derive_key("pbt", self.rule.seed, trial, at.step) % len(best)]
        own = changes_now(known[source].trial, log, at.step)
        changes = dict(own)
        for field in self.space if self.rule.change is None else self.rule.change:
            if field in changes:
                key = derive_key("pbt", self.rule.seed, trial, at.step, field)
                changes[field] = self._changed(changes[field], self.space[field], key)
        if _LENGTH in changes:  # a fork that would end where it begins is refused
            lengths = (changes[_LENGTH], own[_LENGTH], self.last)
            changes[_LENGTH] = next((each for each in lengths if each > at.step), self.last)
        return Draw(trial, at.step, source, changes)

    def _changed(self, value: Any, values: Values, key: int) -> Any:
        if values.listed:
            place = values.items.index(value) + (1 if key % 2 else -1)
            return values.items[min(max(place, 0), len(values.items) - 1)]
        low, high = values.items
        moved = min(max(value * self.rule.factors[key % len(self.rule.factors)], low), high)
        return round(moved) if values.kind == "int" else rounded(moved, low, high)


_LENGTH = "train.max_steps"


def _stretch(each: TrialHistory, until: int | None) -> Stretch:
    fork = (each.draws[-1].source, each.draws[-1].step) if each.draws else None
    return Stretch(each.number, until, fork, len(each.draws), each.changes)
