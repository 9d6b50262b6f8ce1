"""Whether the nodes have memory for the copies that saves make: asked at the start, and not found out hours later."""

from __future__ import annotations

import socket
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

_CGROUP = Path("/sys/fs/cgroup")
"""Of this process, in a container. Elsewhere it is the machine's and has no limit."""


def node_without_room(mine: int) -> dict[str, Any] | None:
    """The node that lacks most for the bytes that each of its ranks will copy; None if there is room. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (socket.gethostname(), mine, free_memory()))
    wanted: dict[str, int] = defaultdict(int)
    free: dict[str, int] = {}
    for node, needs, has in everyone:
        wanted[node] += needs
        free[node] = min(has, free.get(node, has))
    worst = max(wanted, key=lambda node: wanted[node] - free[node])
    if wanted[worst] <= free[worst]:
        return None
    return {"node": worst, "wanted": wanted[worst], "free": free[worst]}


def free_memory() -> int:
    """Bytes that this process and its neighbours may still take: of the machine, or of their container if less."""
    free = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError, KeyError):  # no cgroup v2, or no limit: "max"
        limit = int((_CGROUP / "memory.max").read_text())
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
        # What counts against the limit and cannot be given back, unlike the cache of files.
        taken = {name: int(value) for name, value in map(str.split, lines)}
        free = min(free, limit - taken["anon"] - taken["shmem"])
    return max(free, 0)
