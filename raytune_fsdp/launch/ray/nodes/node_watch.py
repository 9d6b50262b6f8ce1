"""A small actor on every node of a run, for what only a process of that node can find out about its ranks."""

from __future__ import annotations

import math
import re
import shutil
import signal
import socket
import subprocess
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError

from raytune_fsdp.base.errors import in_one_line
from raytune_fsdp.base.machine import ControlGroup, began, group_of
from raytune_fsdp.base.threads import in_thread
from raytune_fsdp.launch.ray.board import Board, Ended, Joined, Line
from raytune_fsdp.launch.ray.nodes.process_ends import ProcessEnds
from raytune_fsdp.launch.ray.nodes.spot import seconds_left
from raytune_fsdp.launch.ray.placement_groups import started_on
from raytune_fsdp.launch.ray.private import drain
from raytune_fsdp.launch.ray.watch.hangs import IN_KERNEL
from raytune_fsdp.launch.signals import STACKS_SIGNAL

_ASK_SECONDS = 2.0  # between two questions to the metadata service
_SILENT_TRIES = 5
_MEMORY_SECONDS = 5.0
_LOOK_SECONDS = 1.0  # between two looks at what the ranks of a node have in memory
_KEPT_LOOKS = 5  # the kernel counts a kill first; the process may take seconds to give back what it has
_ANSWER_SECONDS = 2.0  # how long a rank may take to write its stacks
_SAY_SECONDS = 0.5  # how long the answer of a watch may take that knows it
_CALLS = 4  # at the same time: storage that hangs keeps `stacks`, and the ranks must still be ended
_NOT_RUNNING = re.compile(r"^State:\s*[TtDZX]", re.MULTILINE)
_START_SECONDS = 20.0  # how long the actor of a node may take to answer, its start included


class _NodeWatch:
    """The actor. Each call runs in a thread of its own."""

    def __init__(
        self,
        ranks: Mapping[int, int],
        board: Board | None = None,
        begun: Mapping[int, int | None] | None = None,
    ) -> None:
        """`ranks`: the processes to look after, as long as they live, by rank. The board hears when they end.

        `begun`: when each did. Another process may have got its number before this actor began.
        """
        self._processes: dict[int, psutil.Process] = {}
        """The processes, each with the time of its start: by the time of a call its number may be another process's."""
        self._held: dict[int, int] = {}
        """The bytes that each had in memory when it was last looked at."""
        self._kills: dict[int, tuple[ControlGroup, deque[int]]] = {}
        """The control group of each, and how many processes that had lost, look by look. Others share it: what it lost
        long before says nothing about the end of this one."""
        for pid in ranks.values():
            with suppress(psutil.Error):
                process, then = psutil.Process(pid), (begun or {}).get(pid)
                if then in (None, began(pid)):
                    self._processes[pid] = process
        by_pid = {pid: rank for rank, pid in ranks.items()}

        def ended(pid: int, how: str | None) -> None:
            if board is not None:
                _say(board, Ended(by_pid[pid], pid, how))

        self._ends = ProcessEnds(self._processes, ended)
        in_thread(self._look, "memory")

    def _look(self) -> None:
        while sum(map(self._is_there, self._processes, self._processes.values())):
            time.sleep(_LOOK_SECONDS)

    def _is_there(self, pid: int, process: psutil.Process) -> bool:
        """Note what a process has in memory, and how often its control group was full; return whether it is there."""
        try:
            group = group_of(pid)  # it may be moved to another one
            kills = 0 if group is None else group.kills()
            held = process.memory_info().rss if process.is_running() else 0
        except (psutil.Error, OSError):
            held = 0
        if not held:
            return False  # nothing in memory: it has ended, and what was noted before remains
        self._held[pid] = held
        if group is not None:
            known = self._kills.get(pid)
            before = known[1] if known is not None and known[0] == group else ()
            self._kills[pid] = group, deque([*before, kills], maxlen=_KEPT_LOOKS)
        return True

    def out_of_memory(self, pid: int) -> str | None:
        """Say how much memory this process had, and may have, if the kernel has ended it for that."""
        if pid not in self._kills:
            return None
        group, kills = self._kills[pid]
        if group.kills() <= kills[0]:
            return None
        return f"it had {self._held[pid] / 1e9:.2f} GB, and its control group may have {group.limit / 1e9:.2f} GB"

    def stacks(self, ranks: Mapping[int, int], logs: str | None) -> dict[int, str]:
        """Return the stacks of these ranks (their processes by rank), and write them below `logs`.

        Without logs, say only of processes that are stopped or dead that they are.
        """
        sizes = {} if logs is None else {rank: _size(_log(logs, rank)) for rank in ranks}
        before = {rank: _in_kernel(pid) for rank, pid in ranks.items()}
        if logs is not None:
            self._signal(ranks.values(), STACKS_SIGNAL)
        time.sleep(_ANSWER_SECONDS)
        found = {}
        for rank, pid in ranks.items():
            text = "" if logs is None else _from(_log(logs, rank), sizes[rank])
            if "most recent call first" not in text:  # stopped, or in the kernel: it takes no signal
                text = _by_proc(pid)
                if logs is not None:
                    text = f"{_by_py_spy(pid)}{text}"
                elif not _NOT_RUNNING.search(text):
                    text = ""
            if before[rank] & _in_kernel(pid):  # all the time
                text += f"{IN_KERNEL}\n"
            found[rank] = text
            if logs is not None:
                place = Path(logs) / "stacks" / f"rank-{rank}.txt"
                place.parent.mkdir(exist_ok=True)
                place.write_text(text)
        return found

    def watch(self, cloud: str, board: Board) -> None:
        """Drain this node as soon as its cloud announces that it will be taken away."""
        this = ray.get_runtime_context()
        node_id, gcs_address = this.get_node_id(), this.gcs_address

        def drain_this(ends_at: float) -> None:
            drain(gcs_address, node_id, f"{cloud} takes it away", ends_at)

        in_thread(lambda: _watch(cloud, board, drain_this), "spot")

    def kill(self, pids: list[int]) -> None:
        self._signal(pids, signal.SIGKILL)

    def gone(self, pids: Collection[int], seconds: float) -> bool:
        """Wait until these have ended. Returns whether they have."""
        return self._ends.wait(pids, seconds)

    def _signal(self, pids: Iterable[int], kind: signal.Signals) -> None:
        """Send a signal, only to processes that were there when this actor began."""
        for pid in self._processes.keys() & set(pids):
            with suppress(psutil.Error):
                self._processes[pid].send_signal(kind)


_WATCH = ray.remote(num_cpus=0, max_concurrency=_CALLS)(_NodeWatch)


class NodeWatches:
    """The actors of an attempt, as the driver has them."""

    def __init__(self, cloud: str, board: Board) -> None:
        self._cloud = cloud
        self._board = board
        self._actors: dict[str, Any] = {}

    def start(self, ranks: Mapping[int, Joined]) -> None:
        """Start one on each node of these ranks. Their processes start in the background."""
        for node in {rank.node_id for rank in ranks.values()} - self._actors.keys():
            begun = {each.pid: each.began for each in ranks.values() if each.node_id == node}
            self._actors[node] = started_on(node, _WATCH, _by_node(ranks)[node], self._board, begun)
            if self._cloud != "none":
                self._actors[node].watch.remote(self._cloud, self._board)

    def stacks(self, ranks: Mapping[int, Joined], logs: str | None) -> dict[int, str]:
        """Return the stacks of the ranks whose nodes answer."""
        self.start(ranks)
        asked = [self._actors[node].stacks.remote(pids, logs) for node, pids in _by_node(ranks).items()]
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=_START_SECONDS)
        found: dict[int, str] = {}
        for each in ready:
            with suppress(RayError):
                found |= ray.get(each)
        return found

    def out_of_memory(self, rank: Joined) -> str | None:
        """Say what a rank had in memory, if the kernel has ended it for that."""
        if rank.node_id not in self._actors:
            return None
        with suppress(RayError):
            found: str | None = ray.get(
                self._actors[rank.node_id].out_of_memory.remote(rank.pid), timeout=_MEMORY_SECONDS
            )
            return found
        return None

    def kill(self, ranks: Mapping[int, Joined]) -> None:
        """End the processes of these ranks, also stopped ones."""
        self.start(ranks)
        self.kill_watched(ranks)

    def kill_watched(self, ranks: Mapping[int, Joined]) -> None:
        """The same, where a watch is there already: without one, Ray ends them."""
        for node, pids in _by_node(ranks).items():
            if node in self._actors:
                self._actors[node].kill.remote(list(pids.values()))

    def wait(self, ranks: Mapping[int, Joined], seconds: float) -> list[str]:
        """Wait until the processes of these ranks have ended, where a watch knows: two attempts would share GPUs.

        Return the nodes whose watch says that some have not.
        """
        by_node = {node: pids for node, pids in _by_node(ranks).items() if node in self._actors}
        asked = {
            self._actors[node].gone.remote(list(pids.values()), seconds - _SAY_SECONDS): node
            for node, pids in by_node.items()
        }
        answered = ray.wait(list(asked), num_returns=len(asked), timeout=seconds)[0] if asked else []
        left = []
        for each in answered:
            with suppress(RayError):  # the node is lost
                left += [] if ray.get(each) else [asked[each]]
        return left

    def end(self) -> None:
        for actor in self._actors.values():
            with suppress(RayError):
                ray.kill(actor)


def _watch(cloud: str, board: Board, drain: Callable[[float], None]) -> None:
    """Ask the cloud until it gives notice, and then Ray until the node drains. Whatever either of them answers, the
    next look may be the one that matters: no error ends this."""
    ends_at: float | None = None
    silent, failed = 0, False
    while True:
        try:
            left, silent = seconds_left(cloud), 0
            # The first notice counts: one without a time of its own would begin again with every look.
            ends_at = None if left is None else min(time.time() + left, ends_at or math.inf)
        except Exception as error:
            silent += 1
            if silent == _SILENT_TRIES:
                _say(
                    board,
                    f"cluster.spot_notice={cloud}: the metadata service does not answer on {socket.gethostname()} "
                    f"({in_one_line(error)}), so its notices are not seen; set the cloud that it runs on, or none",
                )
        if ends_at is not None:
            try:
                drain(ends_at)
                return
            except Exception as error:
                if not failed:
                    _say(
                        board,
                        f"{cloud} takes the node {socket.gethostname()} away, and it cannot be drained yet "
                        f"({in_one_line(error)}); this is tried again until it can",
                    )
                failed = True
        time.sleep(_ASK_SECONDS)


def _say(board: Board, what: str | Ended) -> None:
    with suppress(Exception):  # Ray may be what fails
        board.tell(Line(what) if isinstance(what, str) else what)


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


def _in_kernel(pid: int) -> set[str]:
    """Return the threads of a process that wait in the kernel, and take no signal until that is over."""
    found = set()
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):
            if "\nState:\tD" in (thread / "status").read_text():
                found.add(thread.name)
    return found


def _by_py_spy(pid: int) -> str:
    tool = shutil.which("py-spy")
    if tool is None:
        return "py-spy is not installed on this node, so the stack of a process that takes no signal is not known\n"
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run([tool, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=10)
        return done.stdout or f"py-spy: {done.stderr}"
    return "py-spy did not answer\n"


def _by_proc(pid: int) -> str:
    """Return what the kernel says of a process."""
    try:
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return f"process {pid} is gone\n"
    state = next((line for line in status if line.startswith("State:")), "State: ?")
    waits = ""
    with suppress(OSError):
        waits = f"\nwaits in: {Path(f'/proc/{pid}/wchan').read_text()}"
    return f"{state}{waits}\n"
