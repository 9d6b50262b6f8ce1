"""What a run with `workers: {min, max}` would like to have beside what it has, as an autoscaler hears it.

Ray Train asks for the workers of an attempt, whose number follows from what there is. Nobody else would ask for more:
with no node at all such a run would wait for ever for one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from ray.exceptions import RayError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

from raytune_fsdp.launch.ray.resources import Request, bundle

_PAUSE_SECONDS = 15.0
"""Until what has come, and was not taken, is asked for again: it did not suffice, or another job has taken it."""


class Demand:
    """Placement groups that wait, one for each step from one number of ranks to the next.

    A group that is made shows that its resources are there. It is removed at once, for the run to take them.
    """

    def __init__(self, asked: Request, valid: Sequence[int]) -> None:
        """`valid`: the numbers of ranks that the run can have."""
        self._asked = asked
        self._steps = dict(zip(sorted(valid), [0, *sorted(valid)[:-1]], strict=True))
        """Each number, and the one before."""
        self._waiting: dict[int, PlacementGroup] = {}
        self._not_before = dict.fromkeys(self._steps, 0.0)

    def look(self, have: int) -> None:
        """Ask for what is missing if there are so many ranks. Called once a second or so."""
        now = time.monotonic()
        for size, before in self._steps.items():
            group = self._waiting.get(size)
            if group is None:
                if size > have and now >= self._not_before[size]:
                    self._waiting[size] = placement_group([bundle(self._asked)] * (size - before))
            elif size <= have or placement_group_table(group).get("state") == "CREATED":
                self._drop(size)
                self._not_before[size] = now + _PAUSE_SECONDS

    def clear(self) -> None:
        for size in list(self._waiting):
            self._drop(size)

    def _drop(self, size: int) -> None:
        with suppress(RayError):
            remove_placement_group(self._waiting.pop(size))
