"""One turn of a sweep: from the log and what trials have measured to what is decided, and what may run now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytune_fsdp.base.errors import ResumeError
from raytune_fsdp.config.problems import shown
from raytune_fsdp.tune.log import Draw, Entry, SweepBegun, trials_in
from raytune_fsdp.tune.schedulers.protocol import Found, Scheduler, Stretch
from raytune_fsdp.tune.space import trials_of
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
    """Return what follows from the log and from what the trials' records hold. Pure; an empty log begins the sweep.

    `found`: as `schedulers/protocol.py:Scheduler.taken` gets it. Raises ResumeError if the log is of another sweep.
    """
    _check_same(spec, log)
    entries = list(log)
    # One entry at a time, so that each follows from those before it: a log that a crash has cut anywhere goes on to the
    # same end.
    given = None if isinstance(spec.search, OptunaSearch) else trials_of(spec)
    while True:
        if not entries:
            entries.append(SweepBegun(spec.decides, spec.highest))
            continue
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


def _check_same(spec: SweepSpec, log: Sequence[Entry]) -> None:
    """Refuse to go on with a sweep that was begun otherwise."""
    if not log or not isinstance(log[0], SweepBegun):
        return
    now = {**spec.decides, "highest": spec.highest}
    was = {**log[0].decides, "highest": log[0].highest}
    other = [
        f"{field}={shown(now.get(field))}: the sweep {spec.name} was begun with {shown(was.get(field))}, and its log "
        "follows from that: set it back, or give the sweep another name"
        for field in dict.fromkeys([*now, *was])
        if now.get(field) != was.get(field)
    ]
    if other:
        raise ResumeError(*other)
