"""One turn of a sweep: from the log and what trials have measured to what is decided, and what may run now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytune_fsdp.base.errors import ResumeError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.problems import shown
from raytune_fsdp.tune.log import WAY_OUT, Draw, Entry, SweepBegun, trials_in
from raytune_fsdp.tune.schedulers.protocol import Found, Scheduler, Stretch
from raytune_fsdp.tune.space import base_of, differing, trials_of
from raytune_fsdp.tune.spec import OptunaSearch, SweepSpec


@dataclass(frozen=True, slots=True)
class Turn:
    entries: Sequence[Entry]
    """What belongs on the log, before anything is started."""

    stretches: Sequence[Stretch]
    """What may run now, the most urgent first; what `schedulers/protocol.py:Next.stretches` says of it holds here."""

    over: bool
    """Whether the sweep is over."""


def turn(spec: SweepSpec, scheduler: Scheduler, log: Sequence[Entry], found: Sequence[Found]) -> Turn:
    """Return what follows from the log and from what the trials' records hold. Pure.

    `log`: of this sweep (`check_same`). `found`: as `schedulers/protocol.py:Scheduler.taken` gets it.
    """
    entries = list(log)
    # One entry at a time, so that each follows from those before it: a log that a crash has cut anywhere goes on to the
    # same end.
    given = None if isinstance(spec.search, OptunaSearch) else trials_of(spec)
    while True:
        trials, known = given or trials_of(spec, entries), trials_in(entries)
        if len(known) < len(trials):
            entries.append(trials[len(known)])
            continue
        said = scheduler.next(known, entries)
        if said.entries:
            entries.append(entry := said.entries[0])
            if isinstance(entry, Draw):  # what was found of this trial is of a run that is no longer its newest
                found = [each for each in found if each.trial != entry.trial]
            continue
        if taken := scheduler.taken(known, entries, found):
            entries.append(taken[0])
            continue
        return Turn(entries[len(log) :], said.stretches, said.over)


def begun_of(spec: SweepSpec, first: FinetuneConfig, threads: int | None = None) -> SweepBegun:
    """Return the first entry of a sweep's log. `first`: the config of its first trial. `threads`: what it says."""
    return SweepBegun(spec.decides, base_of(first), spec.highest, threads)


def check_same(spec: SweepSpec, now: SweepBegun, log: Sequence[Entry]) -> None:
    """Refuse to go on with a log of another sweep. `now`: what its first entry would be. Raises ResumeError."""
    was = next((entry for entry in log if isinstance(entry, SweepBegun)), now)
    decides = {**was.decides, "highest": was.highest}, {**now.decides, "highest": now.highest}
    follows = [(each, "and its log follows from that") for each in differing(*decides)]
    follows += [(each, "and so are the trials that it compares") for each in differing(was.base, now.base)]
    other = [
        f"{field}={shown(new)}: the sweep {spec.name} was begun with {shown(old)}, {why}: set it back, or give the "
        "sweep another name"
        for (field, old, new), why in follows
    ]
    if other:
        raise ResumeError(*other)
    known = trials_in(log)
    drawn = [(each.trial, each.changes) for each in log if isinstance(each, Draw)]
    if isinstance(spec.search, OptunaSearch):
        drawn += [(each.number, each.changes) for each in known]
    elif strange := [each.number for each, own in zip(known, trials_of(spec), strict=False) if each != own]:
        raise ResumeError(f"the log of {spec.name} has another trial {strange[0]} than its space gives: {WAY_OUT}")
    for trial, changes in drawn:
        if strange_fields := sorted(set(changes) - set(spec.values)):
            raise ResumeError(
                f"the log of {spec.name} changes {strange_fields[0]} of trial {trial}, which is not in space: {WAY_OUT}"
            )
