"""The placement groups that hold the resources of this run's workers."""

from __future__ import annotations

from ray.util import remove_placement_group

from raytune_fsdp.launch.ray.private import MadeGroup, placement_groups


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
        return next((group.state for group in reversed(self._live())), None)

    def clear(self) -> None:
        """Remove all groups of this run; a process in one of them ends.

        Ray Train 2.60 forgets the placement group of an attempt in which a worker dies while the process group is being
        made. It would keep its resources for ever, and the next attempt might wait for them.
        """
        for group in self._live():
            remove_placement_group(group.handle())

    def _live(self) -> list[MadeGroup]:
        return [group for group in placement_groups() if group.maker in self._makers] if self._makers else []
