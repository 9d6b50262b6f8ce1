"""What the machines of a run report about themselves, gathered with the metrics of a step."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import psutil
import torch

from raytune_fsdp.base.collectives import on_all_ranks
from raytune_fsdp.base.machine import free_memory, this_node

NodeLine = tuple[str, float | None, float | None, float | None, float | None]
"""The figures of a node: its name, bytes of memory that its ranks use, bytes that are left, percent of its GPUs, bytes
in use on its fullest GPU."""

_EVERY_SECONDS = 10.0
"""How often nodes are reported. Each node takes a hundred bytes of a line, so only some lines have them, even where
every step has a line. What the kernel lets a process take is asked for as rarely: it is a dozen small files."""


class NodeFigures:
    """Looks at this rank's machine, and turns what all ranks saw into figures of each node."""

    def __init__(self, device: torch.device, world: int) -> None:
        """Learn the names of all nodes. Collective."""
        self._device = device
        self._process = psutil.Process()
        # Name each node after its host; machines of one name are numbered.
        nodes = [this_node()] if world == 1 else on_all_ranks(this_node)
        names: dict[tuple[str, str], str] = {}
        for node in nodes:
            same = sum(host == node[0] for host, _ in names)
            names.setdefault(node, f"{node[0]}-{same + 1}" if same else node[0])
        self.nodes = [names[node] for node in nodes]
        """The name of each rank's node, by rank."""
        self._looked = self._written = -math.inf
        self._seen = (math.nan, math.nan, math.nan)

    def mine(self) -> list[float]:
        """Return bytes in use on this machine, percent of this rank's GPU, and three figures more; NaN: not known."""
        if time.monotonic() >= self._looked + _EVERY_SECONDS:
            self._looked = time.monotonic()
            taken = math.nan
            if self._device.type == "cuda":
                free, total = torch.cuda.mem_get_info(self._device)
                taken = float(total - free)
            self._seen = (float(self._process.memory_info().rss), float(free_memory()), taken)
        return [float(psutil.virtual_memory().used), _utilization(self._device), *self._seen]

    def of_nodes(self, everyone: Any) -> tuple[NodeLine, ...]:
        """Return the figures of nodes from those of all ranks (rows of an array), every ten seconds; else nothing."""
        if time.monotonic() < self._written + _EVERY_SECONDS:
            return ()
        self._written = time.monotonic()
        lines = []
        for name in dict.fromkeys(self.nodes):
            here = np.array([row for row, node in zip(everyone, self.nodes, strict=True) if node == name])
            _, busy, rss, free, taken = here.T
            lines.append((name, known(rss.sum()), known(free.min()), known(busy.mean()), known(taken.max())))
        return tuple(lines)


def known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _utilization(device: torch.device) -> float:
    """Return the percentage of the last moments in which the GPU computed; NaN where nothing can say it."""
    if device.type != "cuda":
        return math.nan
    try:
        return float(torch.cuda.utilization(device))
    except Exception:  # no nvidia-ml-py, or it does not support this device, which it says with errors of its own
        return math.nan
