"""The placement groups that hold the resources of this run's workers."""

from __future__ import annotations

from ray._private.state import state as ray_state
from ray._raylet import PlacementGroupID
from ray.core.generated.gcs_pb2 import PlacementGroupTableData
from ray.util import remove_placement_group
from ray.util.placement_group import PlacementGroup


class Groups:
    """Watched from the driver, every two seconds, while it waits for workers.

    A group is this run's if one of its controllers made it: other runs of the same job may have groups that look alike.
    """

    def __init__(self) -> None:
        self._makers: set[str] = set()

    def made_by(self, actor_id: str) -> None:
        """From now on, groups that this actor makes are this run's."""
        self._makers.add(actor_id)

    def state(self) -> str | None:
        """The state of the group that is to hold the workers, None before there is one."""
        return next(reversed(self._live().values()), None)

    def clear(self) -> None:
        """Remove all groups of this run; a process in one of them ends.

        Ray Train 2.60 forgets the placement group of an attempt in which a worker dies while the process group is being
        made. It would keep its resources for ever, and the next attempt might wait for them.
        """
        for name in self._live():
            remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(name))))

    def _live(self) -> dict[str, str]:
        """The state of each group of this run, by id, in the order in which they were made."""
        if not self._makers:
            return {}
        # Not ray.util.placement_group_table(): it leaves out who made a group, and when.
        accessor = ray_state._connect_and_get_accessor()
        table = [PlacementGroupTableData.FromString(each) for each in accessor.get_placement_group_table()]
        return {
            group.placement_group_id.hex(): PlacementGroupTableData.PlacementGroupState.Name(group.state)
            for group in sorted(table, key=lambda group: group.placement_group_creation_timestamp_ms)
            if group.creator_actor_id.hex() in self._makers and group.state != PlacementGroupTableData.REMOVED
        }
