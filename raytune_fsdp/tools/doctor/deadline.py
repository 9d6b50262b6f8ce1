"""Keep the time of a checkup: one deadline that all checks share, and how long each question has not been answered.

Something outside (storage, a server, a cluster) hangs if it does not answer while this process runs and waits. If this
machine or its imports are slow, the check was not made, which is not a problem yet.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

SECONDS = 20.0
"""The time from the start of the command to its end, without --network."""
_END_SECONDS = 2.0
"""The part of it that is kept to remove what was written, print the page and end."""
_LEAST_SECONDS = 3.0
"""The least time for checks, even if the start of the command took long."""
HANGS_SECONDS = 8.0
TICK = 0.1


@dataclass(frozen=True, slots=True)
class Deadline:
    """A deadline on the clock that all processes of a machine share, so that it can be handed to them."""

    began: float
    at: float

    @classmethod
    def of(cls, began: float) -> Deadline:
        """Return the deadline of a command that began at this time."""
        return cls(began, max(began + SECONDS - _END_SECONDS, time.monotonic() + _LEAST_SECONDS))

    def sooner(self, seconds: float) -> Deadline:
        return Deadline(self.began, self.at - seconds)

    @property
    def seconds(self) -> float:
        """The time from the start of the command to the deadline."""
        return self.at - self.began

    def left(self) -> float:
        return max(0.0, self.at - time.monotonic())


@dataclass(slots=True)
class Asked:
    """What a check waits for outside of this command, and how long it has waited while this process ran.

    Whoever waits adds the time up by ticks, so that time in which the process was stopped or starved does not count.
    """

    what: str = ""
    seconds: float = 0.0

    def begin(self, what: str) -> None:
        self.what, self.seconds = what, 0.0

    def answered(self) -> None:
        self.what = ""

    def tick(self, seconds: float) -> None:
        self.seconds += min(seconds, TICK) if self.what else 0.0

    def hangs(self) -> bool:
        return bool(self.what) and self.seconds >= HANGS_SECONDS
