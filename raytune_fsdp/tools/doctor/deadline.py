"""The time of a checkup: one deadline that all checks share, and for how long what one of them asks has not answered.

What is asked (storage, a server, a cluster) hangs if it does not answer although this machine let us wait for it. Where
the machine or its imports are slow, it was not checked, which is no problem yet.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

SECONDS = 20.0
"""From the start of the command to its end, without --network."""
_END_SECONDS = 2.0
"""Of those, to remove what was written, print the page and end."""
_LEAST_SECONDS = 3.0
"""For checks, where the start of the command alone took its time."""
HANGS_SECONDS = 8.0
TICK = 0.1


@dataclass(frozen=True, slots=True)
class Deadline:
    """On the clock that all processes of a machine share, so that it can be handed to them."""

    began: float
    at: float

    @classmethod
    def of(cls, began: float) -> Deadline:
        """That of a command which began then."""
        return cls(began, max(began + SECONDS - _END_SECONDS, time.monotonic() + _LEAST_SECONDS))

    def sooner(self, seconds: float) -> Deadline:
        return Deadline(self.began, self.at - seconds)

    @property
    def seconds(self) -> float:
        """What the command has until then."""
        return self.at - self.began

    def left(self) -> float:
        return max(0.0, self.at - time.monotonic())


@dataclass(slots=True)
class Asked:
    """What a check waits for outside of this command, and for how long: only while this process ran.

    One who waits adds it up by ticks, so that time in which the process was stopped or starved does not count.
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
