"""When an attempt makes way for a larger one: room that others give back for a moment is none.

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

_STANDS_SECONDS = 60.0
"""How long a group may wait to be made, and then keep what it has from others."""

_LASTS_SECONDS = 120.0
_FIRST_PAUSE, _LONGEST_PAUSE = 120.0, 3600.0
"""After a larger size that did not last, the next growth waits this long, twice as long each time."""


class Growth:
    """Asked once a second or so."""

    def __init__(self, asked: Request) -> None:
        self._asked = asked
        self._group: tuple[PlacementGroup, int, float] | None = None
        """What is reserved, for which size, and since when."""
        self._grown: tuple[int, float] | None = None
        """The last larger size, and when the run made way for it."""
        self._pause = 0.0
        self._not_before = 0.0

    def to(self, size: int, ranks: int) -> int | None:
        """The size that an attempt of so many ranks is to make way for, once there is no doubt of it.

        `size`: what seems to have room.
        """
        now = time.monotonic()
        if self._group is None:
            if size <= ranks or now < self._not_before:
                return None
            if self._asked.placement.startswith("strict"):
                return self._begun(size)  # a group of the new ranks alone would not be where they have to be
            bundles = [bundle(self._asked)] * (size - ranks)
            self._group = placement_group(bundles, strategy=self._asked.placement.upper()), size, now
            return None
        group, reserved, since = self._group
        if placement_group_table(group).get("state") == "CREATED":
            self._group = group, reserved, now
            return self._begun(reserved)
        if now - since > _STANDS_SECONDS:
            self.let_go()
            self._failed(now)
        return None

    def _begun(self, size: int) -> int:
        self._grown = size, time.monotonic()
        return size

    def let_go(self, *, after: float = 0.0) -> None:
        """Give back what is reserved, if it has been for this long: the next attempt takes it, or somebody else."""
        if self._group is not None and time.monotonic() - self._group[2] >= after:
            with suppress(RayError):
                remove_placement_group(self._group[0])
            self._group = None

    def look(self) -> None:
        """While the attempt makes way: others wait no longer than this for one that takes long to save."""
        self.let_go(after=_STANDS_SECONDS)

    def began(self, size: int) -> None:
        """An attempt of this size begins."""
        if self._grown is None:
            return
        now, (hoped_for, at) = time.monotonic(), self._grown
        if now - at > _LASTS_SECONDS:
            self._grown, self._pause = None, 0.0
        elif size < hoped_for:
            self._failed(now)

    def _failed(self, now: float) -> None:
        self._grown = None
        self._pause = min(_LONGEST_PAUSE, max(_FIRST_PAUSE, 2 * self._pause))
        self._not_before = now + self._pause
