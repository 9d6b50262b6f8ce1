"""Successive halving without waiting: a trial goes on once it is among the best that have come to its rung so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from raytune_fsdp.tune.history import TrialHistory, end_of, has_failed, histories, news, rank
from raytune_fsdp.tune.log import Decision, Entry, Trial, TrialEnded, Value
from raytune_fsdp.tune.schedulers.protocol import Found, Next, Stretch


@dataclass(slots=True)
class _Ladder:
    """Where all trials are, from the log up to some entry."""

    known: dict[int, TrialHistory]
    rung: dict[int, int] = field(default_factory=dict)
    """The rung that each trial is at, or on its way to."""
    come: list[dict[int, float]] = field(default_factory=list)
    """Who has come to each rung, with their values."""


@dataclass(frozen=True, slots=True)
class Asha:
    steps: Sequence[int]
    """The rungs below the end, upwards."""
    eta: int
    highest: bool

    def taken(self, trials: Sequence[Trial], log: Sequence[Entry], found: Sequence[Found]) -> Sequence[Found]:
        ladder = self._ladder(trials, log)
        new = news(found, ladder.known)
        for each in found:  # in the order in which they came
            own, until = new.get(each.trial, []), self._until(ladder, each.trial)
            if each.step == until and isinstance(each, Value) and each in own and not has_failed(own, until):
                return [each]
            if isinstance(each, TrialEnded) and each in own and not self._waits(ladder, each.trial):
                return end_of(own, until)
        return []

    def next(self, trials: Sequence[Trial], log: Sequence[Entry]) -> Next:
        ladder = self._ladder(trials, log)
        for rung in reversed(range(len(self.steps))):
            if waiting := self._waiting(ladder, rung, len(ladder.come[rung]) // self.eta):
                return Next([Decision(self.steps[rung], (waiting[0],), ())], (), over=False)
        known = ladder.known
        here = [number for number in known if known[number].state == "open" and not self._waits(ladder, number)]
        # Those that came further first: a new trial begins where nobody may go on.
        here.sort(key=lambda number: (-ladder.rung[number], number))
        if not here and (last := self._last(ladder)) is not None:
            return Next([last], (), over=False)
        stretches = [
            Stretch(number, self._until(ladder, number), changes=known[number].trial.changes) for number in here
        ]
        return Next((), stretches, over=not here)

    def _last(self, ladder: _Ladder) -> Decision | None:
        """Let the best of the highest rung go on where all others have failed, or wait below it: somebody trains to the
        end, unless somebody has."""
        if any(each.state == "complete" for each in ladder.known.values()):
            return None
        for rung in reversed(range(len(self.steps))):
            for number in self._waiting(ladder, rung, len(ladder.come[rung])):
                if ladder.known[number].state == "open":
                    return Decision(self.steps[rung], (number,), ())
        return None

    def _waiting(self, ladder: _Ladder, rung: int, many: int) -> list[int]:
        """Return who waits at a rung among the best that have come to it, the best first."""
        ranked = sorted((rank(value, self.highest), number) for number, value in ladder.come[rung].items())
        return [number for (strange, _), number in ranked[:many] if not strange and ladder.rung[number] == rung]

    def _ladder(self, trials: Sequence[Trial], log: Sequence[Entry]) -> _Ladder:
        ladder = _Ladder(histories(trials, log), {trial.number: 0 for trial in trials}, [{} for _ in self.steps])
        for entry in log:
            if isinstance(entry, Decision):
                for number in entry.on:
                    ladder.rung[number] += 1
        for number, each in ladder.known.items():
            top = ladder.rung[number]
            for rung, step in enumerate(self.steps[: top + 1]):
                if step in each.values:
                    ladder.come[rung][number] = each.values[step]
                elif each.ended is not None:  # it ended on its way there
                    failed = each.state == "failed"
                    ladder.come[rung][number] = math.nan if failed else each.last
        return ladder

    def _until(self, ladder: _Ladder, number: int) -> int | None:
        rung = ladder.rung[number]
        return self.steps[rung] if rung < len(self.steps) else None

    def _waits(self, ladder: _Ladder, number: int) -> bool:
        rung = ladder.rung[number]
        return rung < len(self.steps) and number in ladder.come[rung]
