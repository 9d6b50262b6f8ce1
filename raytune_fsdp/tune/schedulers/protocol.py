"""What a scheduler is: two pure functions of the sweep's log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from raytune_fsdp.tune.log import Entry, Trial, TrialEnded, Value

Found = Value | TrialEnded
"""What has been found in the record of a trial's newest run: the value of an evaluation, or that the run has ended."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps that a trial may train now."""

    trial: int
    """The number of the trial."""

    until: int | None
    """The step that it trains to, and stops after (`run.stop_after`): one with an evaluation. None: to its end."""

    fork: tuple[int, int] | None = None
    """None: the trial goes on with the run that it has, or begins. Otherwise its run is a fork of another trial's:
    (trial, step), of the run of that trial that has trained the step (`tune/log.py:generation`). Later stretches of the
    same run say so, too."""

    generation: int = 0
    """Which of the trial's runs this is: 0 for the first; each fork is the next one."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    """All changes of the base that the run is trained with: those of the trial, or of a fork."""


@dataclass(frozen=True, slots=True)
class Next:
    """What a scheduler says at a point of the log."""

    entries: Sequence[Entry]
    """Decisions and draws that belong on the log before anything else is started."""

    stretches: Sequence[Stretch]
    """What may run now, the most urgent first. Those that are done already (their values are found, but not on the log
    yet) are among them. A trial that runs and is not among them is to be stopped."""

    over: bool
    """Whether nothing is left to do for these trials."""


class Scheduler(Protocol):
    def taken(self, trials: Sequence[Trial], log: Sequence[Entry], found: Sequence[Found]) -> Sequence[Found]:
        """Return what of that which was found belongs on the log now, in order; what is not taken is given again.

        `found`: all that the records of the trials' newest runs hold, in the order in which it was found.
        """
        ...

    def next(self, trials: Sequence[Trial], log: Sequence[Entry]) -> Next:
        """Return what follows from the log."""
        ...
