"""Decide when a recovery point is due: rank 0 looks at its clock, and all ranks agree on what it says.

What counts is training since the state of the newest checkpoint was taken, including that of lost attempts. Only what a
crash costs depends on the clock: nothing else follows from a recovery point.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """Seconds of training that a crash may cost."""

    first: float = 600.0
    """The interval while the run has no checkpoint."""
    later: float = 1800.0
    share: float | None = 0.02
    """The part of the time that saves may take; intervals are longer if they must be. None: any."""


class Clock:
    """The clock of a run, on rank 0."""

    def __init__(self, intervals: Intervals, *, fresh: bool, lost: float = 0.0) -> None:
        """`fresh`: the run has no checkpoint. `lost`: seconds that were trained since the newest one, and are lost."""
        self._intervals = intervals
        self._fresh = fresh
        now = time.monotonic()
        self._since = now - lost
        """When the newest committed state was taken."""
        self._tried = -math.inf
        """When a save was begun that is not committed yet, or could not be for lack of room."""
        self._began = now
        self._looked = now
        self._held = 0.0
        """How long the last save has held up training."""
        self._took = 0.0
        """How long the last save that was committed has taken."""

    def due(self) -> bool:
        """Return whether to save after the step that begins now. Call this once for each step."""
        now = time.monotonic()
        step, self._looked = now - self._looked, now
        least = self._intervals.first if self._fresh else self._intervals.later
        if self._intervals.share is not None:
            least = max(least, self._held / self._intervals.share)
        # What would be at stake when a save is complete that begins a step later than this one could.
        return now + 2 * step + self._took - self._since > least and now - self._tried >= least

    def put_off(self) -> None:
        """Note that there is no room: look again as late as after a save."""
        self._tried = time.monotonic()

    def begins(self) -> None:
        """Note that a save begins, of whatever kind."""
        self._tried = self._began = time.monotonic()

    def held(self) -> None:
        """Note that training goes on: the save that has begun no longer holds it up."""
        self._held = time.monotonic() - self._began

    def committed(self, seconds: float) -> None:
        """Note that the last save that was begun is committed."""
        self._since, self._tried, self._took, self._fresh = self._began, -math.inf, seconds, False
