"""Check whether nodes have memory for the copies that saves make, and whether storage has room.

The memory is asked for at the start, not found out hours later. Storage is asked for room before a checkpoint that is
made for safety alone.
"""

from __future__ import annotations

import errno
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raytune_fsdp.base.collectives import on_all_ranks
from raytune_fsdp.base.machine import free_memory, free_space, this_node
from raytune_fsdp.base.urls import is_url


def node_without_room(mine: int) -> dict[str, Any] | None:
    """Return the node that lacks most for the bytes that each of its ranks will copy; None if there is room.
    Collective."""
    return _worst(on_all_ranks(lambda: (this_node(), mine, free_memory())))


def _worst(everyone: Sequence[tuple[tuple[str, str], int, int]]) -> dict[str, Any] | None:
    """Return the node that lacks most, from each rank's node, the bytes that it needs and those that are free."""
    wanted: dict[tuple[str, str], int] = defaultdict(int)
    free: dict[tuple[str, str], int] = {}
    for node, needs, has in everyone:
        wanted[node] += needs
        free[node] = min(has, free.get(node, has))
    worst = max(wanted, key=lambda node: wanted[node] - free[node])
    if wanted[worst] <= free[worst]:
        return None
    return {"node": worst[0], "wanted": wanted[worst], "free": free[worst]}


def lacks_room(error: BaseException) -> bool:
    """Return whether a write failed because storage, or the quota on it, is full. Not all storage shows a quota."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def storage_without_room(location: str, size: int) -> dict[str, Any] | None:
    """Return what is free in the storage, if a checkpoint of this size would take the room of the next one."""
    if is_url(location):  # an object store does not say
        return None
    try:
        free = free_space(Path(location))
    except OSError:  # the save will say why
        return None
    return {"wanted": 2 * size, "free": free} if free < 2 * size else None
