"""Decide when a peer copy is due, so that all of them take two percent of the time at most. Rank 0 looks at its clock.

What a copy takes is measured: how much longer than usual the steps are from its beginning to its end.
"""

from __future__ import annotations

import math
import time
from collections import deque
from statistics import fmean, median

_SHARE = 0.015
"""Copies may take 2 % of the time; 0.5 % is kept for what the steps during a copy do not show."""
_LEAST_SECONDS = 5.0
"""Each copy also brings the record to the disk, which other processes use, too."""
_AFTER_FAILURE_SECONDS = 60.0
_FEWEST = 3
"""Steps without a copy from which the usual time of a step is known."""


class CopyClock:
    """The clock of an attempt's peer copies, on rank 0."""

    def __init__(self) -> None:
        self._looked = self._began = time.monotonic()
        self._usual: deque[float] = deque(maxlen=20)
        """Seconds of steps while nothing was written."""
        self._during: list[float] = []
        """Those of the steps since the last copy was begun."""
        self._copying = False
        self._took: deque[float] = deque(maxlen=3)
        """What the last copies have taken of training's time."""
        self._held: float | None = None
        """How long training has waited for the beginning of the last one; None: it still waits."""
        self._next = -math.inf

    def due(self, *, busy: bool) -> bool:
        """Return whether to copy after the step that begins now. Call this once for each step. `busy`: something is
        being written."""
        now = time.monotonic()
        seconds, self._looked = now - self._looked, now
        if self._copying:
            self._during.append(seconds)
        elif not busy:
            self._usual.append(seconds)
        # `Saves.agree` asks this before it calls `ended` for a copy that has just ended.
        return not busy and not self._copying and len(self._usual) >= _FEWEST and now >= self._next

    def begins(self) -> None:
        """Note that a copy begins."""
        self._began, self._copying, self._during, self._held = time.monotonic(), True, [], None

    def held(self) -> None:
        """Note that training goes on: the copy that has begun no longer holds it up."""
        self._held = time.monotonic() - self._began

    def ended(self, seconds: float | None) -> None:
        """Note that the copy has ended, so many seconds after training went on; None: it has failed."""
        self._copying = False
        # Where it waits for the whole copy (`checkpoint.asynchronous=false`), that ends before training goes on.
        held = time.monotonic() - self._began if self._held is None else self._held
        longer = sum(self._during) - len(self._during) * median(self._usual or [0.0])
        # An evaluation between two steps is not the copy's doing: that can take no longer than it was there.
        most = math.inf if seconds is None else held + seconds
        self._took.append(min(max(longer, held), most))
        pause = max(_LEAST_SECONDS, fmean(self._took) / _SHARE)
        self._next = self._began + max(pause, _AFTER_FAILURE_SECONDS if seconds is None else 0.0)
