"""Whether the nodes have memory for the copies that saves make: asked at the start, and not found out hours later."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from raytune_fsdp.machine import free_memory, this_node


def node_without_room(mine: int) -> dict[str, Any] | None:
    """The node that lacks most for the bytes that each of its ranks will copy; None if there is room. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (this_node(), mine, free_memory()))
    return _worst(everyone)


def _worst(everyone: Sequence[tuple[tuple[str, str], int, int]]) -> dict[str, Any] | None:
    """From the node, the bytes that are needed and those that are free of each rank."""
    wanted: dict[tuple[str, str], int] = defaultdict(int)
    free: dict[tuple[str, str], int] = {}
    for node, needs, has in everyone:
        wanted[node] += needs
        free[node] = min(has, free.get(node, has))
    worst = max(wanted, key=lambda node: wanted[node] - free[node])
    if wanted[worst] <= free[worst]:
        return None
    return {"node": worst[0], "wanted": wanted[worst], "free": free[worst]}
