"""The placement groups that hold the resources of a run's workers, and the one that its driver may be in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util import get_current_placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup

from raytune_fsdp.launch.ray.private import MadeGroup, free_in_bundles, placement_groups
from raytune_fsdp.launch.ray.resources import Node

_ANYWHERE = "DEFAULT"
"""A scheduling strategy for what reserves nothing. Without any, it would be captured by the group around this process,
and could not come to nodes that the group has no part of."""


def started_on(node: str, kind: Any, *given: Any) -> Any:
    """Start an actor or a task on a node. `kind` is what `ray.remote` makes of its class or function: make it once in
    a process, because this process and the cluster keep each of them for good."""
    return kind.options(label_selector={"ray.io/node-id": node}, scheduling_strategy=_ANYWHERE).remote(*given)


def group_around() -> PlacementGroup | None:
    """Return the placement group that captures the tasks of this process, as that of a trial of Ray Tune does."""
    captures = ray.get_runtime_context().should_capture_child_tasks_in_placement_group
    return get_current_placement_group() if captures else None


def free_for_tasks(nodes: Sequence[Node]) -> list[Mapping[str, float]]:
    """Return what is free on each of these nodes, or in each bundle of the group around this process."""
    group = group_around()
    return [node.free for node in nodes] if group is None else free_in_bundles(group)


def may_ever_fit(wanted: Mapping[str, float]) -> bool:
    """Return whether a task has room in the group around this process, whose own bundle is taken in part."""
    group = group_around()
    if group is None:
        return True
    own = ray.get_runtime_context().get_assigned_resources()
    bundles: list[dict[str, float]] = group.bundle_specs
    return any(
        _has(others, wanted)
        for index, bundle in enumerate(bundles)
        if _has(bundle, own)
        for others in [*bundles[:index], _without(bundle, own), *bundles[index + 1 :]]
    )


def _has(bundle: Mapping[str, float], wanted: Mapping[str, float]) -> bool:
    return all(bundle.get(name, 0) >= amount for name, amount in wanted.items())


def _without(bundle: Mapping[str, float], taken: Mapping[str, float]) -> dict[str, float]:
    return {name: amount - taken.get(name, 0) for name, amount in bundle.items()}


class Groups:
    """The placement groups of a run. The driver looks at them while it waits for workers.

    A group is this run's if one of its controllers made it: other runs of the same job may have groups that look alike.
    """

    def __init__(self) -> None:
        self._makers: set[str] = set()

    def made_by(self, actor_id: str) -> None:
        """Count groups that this actor makes as this run's."""
        self._makers.add(actor_id)

    def state(self) -> str | None:
        """Return the state of the group that is to hold the workers, None before there is one."""
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
