"""Decide when an attempt makes way for a larger one: room that others give back for a moment does not count.

Each growth is a restart. So what would be added is reserved first, in a placement group that stands until the next
attempt asks for it; and after a growth that did not last, the next one waits longer each time.
"""

from __future__ import annotations

import time
from contextlib import suppress

from ray.exceptions import RayError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

from raytune_fsdp.launch.ray.resources import Request, bundle

_STANDS_SECONDS, _STANDS_AT_MOST_SECONDS = 60.0, 600.0
"""How long a group may wait to be made, and how long it then keeps what it has from others, at least and at most."""
_LONGER_THAN_LAST_TIME = 1.25
"""How much longer than the last attempt took to make way it keeps that for the next one."""

_LASTS_SECONDS = 120.0
_FIRST_PAUSE, _LONGEST_PAUSE = 120.0, 3600.0
"""After a larger size that did not last, the next growth waits this long, twice as long each time."""


class Growth:
    """Whether to grow now; asked about once a second."""

    def __init__(self, asked: Request) -> None:
        self._asked = asked
        self._group: tuple[PlacementGroup, int, float] | None = None
        """The group that is reserved, for which size, and when it was asked for."""
        self._hoped_for: int | None = None
        """The last larger size, until it is known whether it lasts."""
        self._decided_at: float | None = None
        """When the attempt was asked to make way for that size; None: it has."""
        self._began_at = 0.0
        """When the first attempt after that began."""
        self._stands_seconds = _STANDS_SECONDS
        """How long an attempt that makes way may keep others waiting: one that saves slowly needs longer."""
        self._pause = 0.0
        self._not_before = 0.0

    def to(self, size: int, ranks: int) -> int | None:
        """Return the size for which an attempt with this number of ranks makes way, once there is no doubt about it.

        `size`: the number of ranks that seem to have room.
        """
        now = time.monotonic()
        if self._group is None:
            if size <= ranks or now < self._not_before:
                return None
            if self._asked.placement.startswith("strict"):
                return self._decide(size)  # a group of the new ranks alone would not be where they have to be
            bundles = [bundle(self._asked)] * (size - ranks)
            self._group = placement_group(bundles, strategy=self._asked.placement.upper()), size, now
            return None
        group, reserved, _ = self._group
        return self._decide(reserved) if placement_group_table(group).get("state") == "CREATED" else None

    def _decide(self, size: int) -> int:
        self._hoped_for, self._decided_at = size, time.monotonic()
        return size

    def let_go(self) -> None:
        """Give back what is reserved: the next attempt takes it, or somebody else."""
        if self._group is not None:
            with suppress(RayError):
                remove_placement_group(self._group[0])
            self._group = None

    def look(self) -> None:
        """Give back what was not made in time, and what an attempt that takes long to save keeps from others."""
        if self._group is None:
            return
        now, asked_at = time.monotonic(), self._group[2]
        if self._decided_at is not None:
            if now - self._decided_at >= self._stands_seconds:
                self.let_go()
        elif now - asked_at > _STANDS_SECONDS:
            self.let_go()
            self._wait_longer(now)

    def began(self, size: int) -> None:
        """Note that an attempt of this size begins."""
        if self._hoped_for is None:
            return
        now = time.monotonic()
        if self._decided_at is not None:
            needed = _LONGER_THAN_LAST_TIME * (now - self._decided_at)
            self._stands_seconds = min(max(_STANDS_SECONDS, needed), _STANDS_AT_MOST_SECONDS)
            self._decided_at, self._began_at = None, now
        if now - self._began_at > _LASTS_SECONDS:
            self._hoped_for, self._pause = None, 0.0
        elif size < self._hoped_for:
            self._hoped_for = None
            self._wait_longer(now)

    def _wait_longer(self, now: float) -> None:
        self._pause = min(_LONGEST_PAUSE, max(_FIRST_PAUSE, 2 * self._pause))
        self._not_before = now + self._pause
