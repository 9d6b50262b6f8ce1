"""Count the time in which the driver has listened: what it cannot have heard counts against nobody.

A driver may be away: stopped, its output blocked, its machine asleep or starved. What the ranks said meanwhile is on
the board, and the driver hears it when it is back.
"""

from __future__ import annotations

import time

_STRIDE_SECONDS = 2.0
"""The most that counts between two looks at the board, which come twice a second: a busy machine is slower."""
_AWAY_SECONDS = 5.0
"""Longer than this between two looks, and the driver was away."""
_DRAIN_SECONDS = 3.0
"""How long a driver that is back listens before it judges: the board may have been away, too, and must hear first."""


class Listening:
    """A clock that stands still while the driver is away."""

    def __init__(self) -> None:
        self.now = 0.0
        self._looked = time.monotonic()
        self._back: float | None = None
        """When the driver came back the last time, by this clock."""
        self.away = 0.0
        """For how many seconds the driver was away then."""

    def look(self) -> float:
        """Advance, as the driver looks at the board. Return for how many seconds it was away, 0 if it was not."""
        now = time.monotonic()
        passed, self._looked = now - self._looked, now
        self.now += min(passed, _STRIDE_SECONDS)
        if passed < _AWAY_SECONDS:
            return 0.0
        self._back, self.away = self.now, passed
        return passed

    def drains(self) -> bool:
        """Return whether the driver came back so recently that it may not have heard everything."""
        return self._back is not None and self.now - self._back < _DRAIN_SECONDS

    def was_away_at(self, moment: float) -> bool:
        """Return whether what began at this time, by this clock, may have begun before the driver was back."""
        return self._back is not None and moment < self._back + _DRAIN_SECONDS
