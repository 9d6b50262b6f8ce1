"""Choose how many ranks the next attempt has, where `cluster.workers` leaves that open; see when more have room.

The driver decides. Ray Train's own elastic mode would take any number up to the largest, also those that no mesh can be
made of, and end the ranks without a word, so that every step since the last checkpoint would be trained again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

from ray.exceptions import RayError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

from raytune_fsdp.launch.ray.board import Joined
from raytune_fsdp.launch.ray.nodes.growth import Growth
from raytune_fsdp.launch.ray.resources import DATA_CPUS, Node, Request, bundle, room

_RETURN_SECONDS = 5.0
"""How long after the end of an attempt the resources of its ranks may be missing in what Ray says is free. What is not
there by then is lost: the run goes on with less."""

_SETTLED_SECONDS = 5.0
"""How long a cluster must not have changed before a run grows: nodes come in groups, and each growth is a restart."""


_GIVEN_BACK_SECONDS = 10.0
"""How long a run that takes whatever there is waits for what another one is just giving back."""
_LOOK_SECONDS = 0.5


def that_are_free(
    most: Request,
    possible: Callable[[int], bool],
    look: Callable[[], Sequence[Node]],
    say: Callable[[str], None],
) -> int:
    """Return the number of workers for `cluster.workers: auto`: as `most`, without those whose places others hold.

    `possible`: whether the run can have a number of workers.
    """

    def free_now() -> int:
        found = look()  # of a Ray that has just been started nothing may be known
        free = _free([node if node.free else replace(node, free=node.total) for node in found])
        return _fitting(most, range(1, most.workers + 1), free) or 0

    began = time.monotonic()
    while (free := free_now()) < most.workers and time.monotonic() - began < _GIVEN_BACK_SECONDS:
        time.sleep(_LOOK_SECONDS)
    found = next((size for size in range(min(free, most.workers), 0, -1) if possible(size)), None)
    if found is None or found == most.workers:
        return most.workers  # waited for, as it always was
    say(
        f"cluster.workers=auto: others hold the room of {most.workers - free} of {most.workers} workers, so "
        f"the run has {found}; with cluster.workers={{min: {found}, max: {most.workers}}} it would grow later"
    )
    return found


class Sizes:
    """The numbers of ranks that a run can have, and the choice among them; asked between attempts and during one."""

    def __init__(self, asked: Request, valid: Sequence[int]) -> None:
        """`valid`: the numbers of ranks that the run can have."""
        self._asked = asked
        self._valid = sorted(valid)
        self.fewest = replace(asked, workers=self._valid[0])
        self._hoped_for = self._valid[-1]
        """The size of the last attempt, or the one that it made way for."""
        self._since = time.monotonic()
        self._changed = (0, 0.0)
        """How many workers the cluster has room for in total, and since when."""
        self._room = 0
        """How many workers had room when the last attempt was asked for."""
        self.growing = Growth(asked)
        self._in_vain: int | None = None
        """The size that did not come, although there was this room for it."""

    def next(self, nodes: Callable[[], Sequence[Node]]) -> Request | None:
        """Return what to ask for now; None: wait. `nodes` finds them as they are without the last attempt's ranks."""
        if len(self._valid) == 1:
            return self.fewest  # Ray Train waits for it
        self.growing.let_go()
        found = nodes()
        self._see(found)
        room = self._fitting(_free(found))
        if room is None or (room < self._hoped_for and time.monotonic() - self._since < _RETURN_SECONDS):
            return None
        if room != self._room:
            self._room, self._in_vain = room, None
        return replace(self._asked, workers=self._that_may_come(room))

    def did_not_come(self, size: int) -> None:
        """Note that Ray Train has given these ranks up, after 60 s (RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S).

        A node may hang, or others may have what Ray has just called free. So a smaller size is next, until the cluster
        changes. After the smallest all are tried again.
        """
        self._in_vain = size if size > self._valid[0] else None
        self.ended()

    def _that_may_come(self, room: int) -> int:
        if self._in_vain is None or room != self._room:
            return room
        return max(size for size in self._valid if size < self._in_vain)

    def _see(self, nodes: Sequence[Node]) -> int:
        """Return how many workers the cluster has room for in total; note whether that has changed."""
        most = self._fitting(nodes) or 0
        if most != self._changed[0]:
            self._changed, self._in_vain = (most, time.monotonic()), None
        return most

    def began(self, size: int) -> None:
        self._hoped_for = size
        self.growing.began(size)

    def ended(self) -> None:
        """Note that the ranks of the attempt are gone: from now on the next one may begin."""
        self._since = time.monotonic()

    def growth(self, look: Callable[[], Sequence[Node]], ranks: Mapping[int, Joined]) -> int | None:
        """Return a larger number of ranks, if room for it is found next to these, and kept for it; else None."""
        if len(ranks) >= self._valid[-1]:
            return None
        nodes = look()
        if self._see(nodes) <= len(ranks) or time.monotonic() - self._changed[1] < _SETTLED_SECONDS:
            return None
        here = Counter(rank.node_id for rank in ranks.values())
        each = self._asked.per_worker
        taken = {node: {name: count * amount for name, amount in each.items()} for node, count in here.items()}
        size = self._that_may_come(self._fitting(_free(nodes, taken)) or 0)
        found = self.growing.to(size, len(ranks))
        if found is not None:
            self._hoped_for = found
        return found

    def _fitting(self, nodes: Sequence[Node]) -> int | None:
        return _fitting(self._asked, self._valid, nodes)


def _fitting(asked: Request, sizes: Sequence[int], nodes: Sequence[Node]) -> int | None:
    """Return the largest of these numbers of workers that has room, with a CPU left for the data."""
    most, cpus = room(asked, nodes), sum(node.total.get("CPU", 0) for node in nodes)
    each = asked.per_worker.get("CPU", 0)
    return max((size for size in sizes if size <= most and cpus - size * each >= DATA_CPUS), default=None)


def _free(nodes: Sequence[Node], taken: Mapping[str, Mapping[str, float]] = {}) -> list[Node]:
    """Return the nodes as if only what is free were there, and what our own ranks have `taken`, by node."""
    return [
        replace(
            node,
            total={
                name: min(most, node.free.get(name, 0) + taken.get(node.id, {}).get(name, 0))
                for name, most in node.total.items()
            },
        )
        for node in nodes
    ]


# What a run with `workers: {min, max}` would like to have in addition to what it has, as an autoscaler hears it.
#
# Ray Train asks for the workers of an attempt, whose number follows from what there is. Nobody else would ask for more:
# with no node at all such a run would wait for ever for one.

_PAUSE_SECONDS = 15.0
"""How long nothing is asked for after some came and was not taken: too little, or another job has taken it."""


class Demand:
    """Placement groups that wait, one for each step from one number of ranks to the next.

    A group that is made shows that its resources are there. It is removed at once, for the run to take them.
    """

    def __init__(self, asked: Request, valid: Sequence[int]) -> None:
        """`valid`: the numbers of ranks that the run can have; none if their number is fixed, or no node can come."""
        self._asked = asked
        self._steps = {size: before for before, size in pairwise([0, *sorted(valid)])}
        """Each number, and the one before."""
        self._waiting: dict[int, PlacementGroup] = {}
        self._not_before = dict.fromkeys(self._steps, 0.0)

    def look(self, have: int) -> None:
        """Ask for what is missing where there are `have` ranks. Called about once a second."""
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
