"""A Ray of several nodes on this machine, whose nodes come and go as its stdin says.

A line of stdin is `add NAME CPUS GPUS RANKS` (as many of the resource `rank`), `remove NAME` (Ray's own processes on it
are killed, one after the other), `kill NAME` (all its processes at once, as if it had lost its power), `drain NAME
SECONDS` or `set VARIABLE VALUE`, for the nodes that come later. The first line of stdout is the cluster's address; then
each line is repeated once it is done, that of `add` with Ray's name of the node. The cluster ends when stdin is closed.
Every node's processes have a working directory of their own: what lies in /proc/self/cwd is not shared by them.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

PR_SET_CHILD_SUBREAPER = 36


def main(directory: Path) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # what loses its parent below is still the cluster's
    threading.Thread(target=reap, daemon=True).start()
    temporary = os.path.join(os.environ["RAY_TMPDIR"], "ray")
    os.mkdir(temporary)

    def place(name: str, cpus: str) -> dict[str, Any]:
        (directory / name).mkdir(exist_ok=True)
        os.chdir(directory / name)
        return {"num_cpus": int(cpus), "object_store_memory": 80 << 20}

    head = {**place("head", sys.argv[2]), "include_dashboard": False, "temp_dir": temporary}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    print(cluster.address, flush=True)
    nodes: dict[str, Any] = {}
    for line in sys.stdin:
        done = line.strip()
        match line.split():
            case ["add", name, cpus, gpus, ranks]:
                more = {"resources": {"rank": int(ranks)}} if int(ranks) else {}
                nodes[name] = cluster.add_node(**place(name, cpus), **more, num_gpus=int(gpus))
                done += f" {nodes[name].node_id}"
            case ["kill", name]:
                node = nodes.pop(name)
                for process in processes_of(node):
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
                cluster.remove_node(node, allow_graceful=False)
            case ["remove", name]:
                cluster.remove_node(nodes.pop(name), allow_graceful=False)
            case ["set", name, value]:
                os.environ[name] = value  # which the node's processes inherit
            case ["drain", name, seconds]:
                deadline = int((time.time() + float(seconds)) * 1000)
                reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
                accepted, why = GcsClient(address=cluster.address).drain_node(
                    nodes[name].node_id, reason, "spot", deadline
                )
                assert accepted, why
        print(done, flush=True)
    cluster.shutdown()


def reap() -> None:
    """As the first process of a machine does: to Ray's workers a raylet lives as long as it has a number."""
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.2)


def processes_of(node: Any) -> list[psutil.Process]:
    """Ray's own of a node, all that these have started, and those that were forked in their place."""
    found: list[psutil.Process] = []
    for started in node.all_processes.values():
        for each in started:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(each.process.pid)
                found += [process, *process.children(recursive=True)]
    return with_forks(found)


def with_forks(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Add the processes that were forked in the place of some of these, which are no children of theirs.

    Not the template that they are forked from: that of this machine serves all nodes that tests have on it.
    """
    found = dict.fromkeys(processes)
    for pid in {pid for process in processes for pid in watched(process)}:
        with suppress(psutil.NoSuchProcess):
            forked = psutil.Process(pid)
            found |= dict.fromkeys([forked, *forked.children(recursive=True)])
    return list(found)


def watched(process: psutil.Process) -> list[int]:
    """The processes whose end this one waits for by a file: raytune_fsdp/launch/ray/forked does, with its fork."""
    pids: list[int] = []
    with suppress(OSError):
        for file in Path(f"/proc/{process.pid}/fdinfo").iterdir():
            pids += map(int, re.findall(r"^Pid:\s+(\d+)$", file.read_text(), re.MULTILINE))
    return pids


if __name__ == "__main__":
    main(Path(sys.argv[1]))
