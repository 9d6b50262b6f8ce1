"""A small actor on every node of a run: what only a process of that node can find out about its ranks."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from raytune_fsdp.launch.ray.board import Joined

STACKS_SIGNAL = signal.SIGUSR1
"""At this, a rank writes the stacks of all its threads into its log, whatever it is doing (rank.py)."""

_ANSWER_SECONDS = 2.0  # how long a rank may take for that
_START_SECONDS = 20.0  # how long the actor of a node may take to answer, its start included


class _NodeWatch:
    """Runs in the actor."""

    def stacks(self, ranks: Mapping[int, int], logs: str) -> dict[int, str]:
        """The stacks of these ranks (their processes by rank), also written below `logs`."""
        sizes = {rank: _size(_log(logs, rank)) for rank in ranks}
        for pid in ranks.values():
            with suppress(OSError):
                os.kill(pid, STACKS_SIGNAL)
        time.sleep(_ANSWER_SECONDS)
        found = {}
        for rank, pid in ranks.items():
            text = _from(_log(logs, rank), sizes[rank])
            if "most recent call first" not in text:  # stopped, or in the kernel: it takes no signal
                text = f"{_by_py_spy(pid)}{_by_proc(pid)}"
            found[rank] = text
            place = Path(logs) / "stacks" / f"rank-{rank}.txt"
            place.parent.mkdir(exist_ok=True)
            place.write_text(text)
        return found

    def kill(self, pids: list[int]) -> None:
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


class NodeWatches:
    """Those of an attempt, on the driver."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}

    def start(self, ranks: Mapping[int, Joined]) -> None:
        """One on each node of these ranks; their processes start in the background."""
        for node in {rank.node_id for rank in ranks.values()} - self._actors.keys():
            options = {"num_cpus": 0, "label_selector": {"ray.io/node-id": node}}
            self._actors[node] = ray.remote(**options)(_NodeWatch).remote()

    def stacks(self, ranks: Mapping[int, Joined], logs: str) -> dict[int, str]:
        """The stacks of those ranks whose nodes answer."""
        self.start(ranks)
        asked = [self._actors[node].stacks.remote(pids, logs) for node, pids in _by_node(ranks).items()]
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=_START_SECONDS)
        found: dict[int, str] = {}
        for each in ready:
            with suppress(RayError):
                found |= ray.get(each)
        return found

    def kill(self, ranks: Mapping[int, Joined]) -> None:
        """End the processes of these ranks, also of such that are stopped."""
        for node, pids in _by_node(ranks).items():
            self._actors[node].kill.remote(list(pids.values()))

    def end(self) -> None:
        for actor in self._actors.values():
            with suppress(RayError):
                ray.kill(actor)
        self._actors = {}


def _by_node(ranks: Mapping[int, Joined]) -> dict[str, dict[int, int]]:
    found: dict[str, dict[int, int]] = defaultdict(dict)
    for rank, joined in ranks.items():
        found[joined.node_id][rank] = joined.pid
    return found


def _log(logs: str, rank: int) -> Path:
    return Path(logs) / f"rank-{rank}.log"


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


def _from(path: Path, offset: int) -> str:
    with suppress(OSError), open(path, "rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")
    return ""


def _by_py_spy(pid: int) -> str:
    tool = shutil.which("py-spy")
    if tool is None:
        return "py-spy is not installed on this node, so the stack of a process that takes no signal is not known\n"
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run([tool, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=10)
        return done.stdout or f"py-spy: {done.stderr}"
    return "py-spy did not answer\n"


def _by_proc(pid: int) -> str:
    """What the kernel says of a process."""
    try:
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return f"process {pid} is gone\n"
    state = next((line for line in status if line.startswith("State:")), "State: ?")
    waits = ""
    with suppress(OSError):
        waits = f"\nwaits in: {Path(f'/proc/{pid}/wchan').read_text()}"
    return f"{state}{waits}\n"
