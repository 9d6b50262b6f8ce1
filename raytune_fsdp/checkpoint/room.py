"""Whether the nodes have memory for the copies that saves make: asked at the start, and not found out hours later."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

_CGROUP = Path("/sys/fs/cgroup")
"""Of this process, in a container. Elsewhere it is the machine's and has no limit."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Another one on every machine, and after every boot."""


def node_without_room(mine: int) -> dict[str, Any] | None:
    """The node that lacks most for the bytes that each of its ranks will copy; None if there is room. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (this_node(), mine, free_memory()))
    return _worst(everyone)


def this_node() -> tuple[str, str]:
    """What ranks that share memory share: the name alone may be that of several machines ("localhost", "ubuntu"), and
    several containers of a machine, whose names differ, may each have a limit of their own."""
    try:
        boot = _BOOT.read_text().strip()
    except OSError:  # not Linux, or hidden from the container
        boot = ""
    return socket.gethostname(), boot


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
