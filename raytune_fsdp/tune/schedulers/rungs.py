"""Successive halving by full rungs; and `none`, which lets all trials train to their ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

from raytune_fsdp.tune.history import TrialHistory, end_of, has_failed, histories, news, rank
from raytune_fsdp.tune.log import Decision, Entry, Trial, TrialEnded, Value
from raytune_fsdp.tune.schedulers.protocol import Found, Next, Stretch


def arrivals(members: Sequence[TrialHistory], found: Sequence[Found], until: int | None) -> list[Found]:
    """Return what belongs on the log once all members have come to a step, in the order of trials; until then nothing.

    A run that has ended before has come, too, with its last value.
    """
    taken: list[Found] = []
    there = {member.number: member for member in members}
    news_of = news([each for each in found if each.trial in there], there)
    for member in members:
        new = news_of.get(member.number, [])
        at = [each for each in new if isinstance(each, Value) and each.step == until]
        if has_failed(new, until):
            taken += end_of(new, until)
        elif at or (until is not None and until in member.values) or member.state != "open":
            taken += at
        elif not new or not isinstance(new[-1], TrialEnded):
            return []
        else:
            taken += end_of(new, until)
    return taken


@dataclass(frozen=True, slots=True)
class Rungs:
    steps: Sequence[int]
    """The rungs below the end, upwards."""
    eta: int
    highest: bool

    def taken(self, trials: Sequence[Trial], log: Sequence[Entry], found: Sequence[Found]) -> Sequence[Found]:
        members, until = self._rung(trials, log)
        return arrivals(members, found, until)

    def next(self, trials: Sequence[Trial], log: Sequence[Entry]) -> Next:
        members, until = self._rung(trials, log)
        here = [each for each in members if each.state == "open" and (until is None or until not in each.values)]
        if here:
            return Next((), [Stretch(each.number, until, changes=each.trial.changes) for each in here], over=False)
        if until is None or not members:
            return Next((), (), over=True)
        on = self._best(members, until)
        stop = tuple(each.number for each in members if each.number not in on)
        return Next([Decision(until, on, stop)], (), over=False)

    def _rung(self, trials: Sequence[Trial], log: Sequence[Entry]) -> tuple[list[TrialHistory], int | None]:
        """Return who trains to which step now."""
        known = histories(trials, log)
        decided = [entry for entry in log if isinstance(entry, Decision)]
        numbers = decided[-1].on if decided else sorted(known)
        members = [known[number] for number in numbers]
        # One variant alone has nobody to be compared with.
        left = self.steps[len(decided) :] if len({each.trial.variant for each in members}) > 1 else ()
        return members, left[0] if left else None

    def _best(self, members: Sequence[TrialHistory], step: int) -> tuple[int, ...]:
        """Return the trials of the best variants, by the mean over their seeds; of equal ones the first."""
        variants = [list(each) for _, each in groupby(members, key=lambda member: member.trial.variant)]
        ranked = []
        for variant in variants:
            failed = any(each.state == "failed" for each in variant)
            mean = float("nan") if failed else fmean(each.values.get(step, each.last) for each in variant)
            ranked.append((rank(mean, self.highest), [each.number for each in variant]))
        ranked.sort()
        best = ranked[: max(1, len(ranked) // self.eta)]
        return tuple(sorted(number for (strange, _), numbers in best if not strange for number in numbers))


@dataclass(frozen=True, slots=True)
class ToTheEnd:
    """All trials train to their ends. What they measure is on the log in the order of trials."""

    def taken(self, trials: Sequence[Trial], log: Sequence[Entry], found: Sequence[Found]) -> Sequence[Found]:
        known = histories(trials, log)
        first = next((number for number in known if known[number].state == "open"), -1)
        return news(found, known).get(first, [])

    def next(self, trials: Sequence[Trial], log: Sequence[Entry]) -> Next:
        here = [each for each in histories(trials, log).values() if each.state == "open"]
        return Next((), [Stretch(each.number, None, changes=each.trial.changes) for each in here], over=not here)
