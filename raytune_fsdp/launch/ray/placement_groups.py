"""The placement groups that hold the resources of this job's workers."""

from __future__ import annotations

from typing import Any

import ray
from ray._raylet import PlacementGroupID
from ray.util import placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

from raytune_fsdp.launch.ray.resources import Request


class Groups:
    """Watched from the driver, every two seconds, while it waits for workers."""

    def __init__(self, asked: Request) -> None:
        self._asked = asked
        self._others: set[str] = set()
        self._others = set(self._live())
        """Those of a caller whose Ray this is, which may look the same."""
        self._seen: list[str] = []
        self._suspected: set[str] = set()

    def look(self) -> tuple[str | None, int]:
        """The state of the group that is to hold the workers, None before there is one; how many were forgotten.

        Ray Train 2.60 forgets the placement group of an attempt in which a worker dies while the process group is being
        made. It would keep its resources for ever, and the next attempt might wait for them.
        """
        live = self._live()
        self._seen += [name for name in live if name not in self._seen]
        older = {name for name in self._seen[:-1] if name in live}
        # Only if seen in two looks: Ray Train removes a group just before it asks for the next one.
        forgotten, self._suspected = older & self._suspected, older
        for name in forgotten:
            _remove(name)
        return live.get(self._seen[-1]) if self._seen else None, len(forgotten)

    def clear(self) -> None:
        """Remove all groups of this run; a process in one of them ends."""
        for name in self._live():
            _remove(name)
        self._seen, self._suspected = [], set()

    def _live(self) -> dict[str, str]:
        """The state of each group of this job's workers, by id."""
        job = ray.get_runtime_context().get_job_id()
        return {
            name: group["state"]
            for name, group in placement_group_table().items()
            # An id ends with the id of the job that created the group.
            if name.endswith(job)
            and name not in self._others
            and group["state"] != "REMOVED"
            and self._is_for_workers(group)
        }

    def _is_for_workers(self, group: dict[str, Any]) -> bool:
        bundles = list(group["bundles"].values())
        return len(bundles) == self._asked.workers and all(
            self._asked.per_worker.items() <= bundle.items() for bundle in bundles
        )


def _remove(name: str) -> None:
    remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(name))))
