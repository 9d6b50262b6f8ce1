"""One turn of a sweep: from the log and what trials have measured to what is decided, and what may run now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytune_fsdp.tune.log import Entry
from raytune_fsdp.tune.schedulers.protocol import Found, Scheduler, Stretch
from raytune_fsdp.tune.spec import SweepSpec


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

    `found`: as `schedulers/protocol.py:Scheduler.taken` gets it.
    """
    raise NotImplementedError
