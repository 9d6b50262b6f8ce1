"""A Ray of several nodes on this machine, whose nodes come and go as its stdin says.

A line of stdin is `add NAME CPUS GPUS METADATA` (the address of its metadata service), `remove NAME` (its processes are
killed), `drain NAME SECONDS` or `set VARIABLE VALUE`, for the nodes that come later. The first line of stdout is the
cluster's address; then each line is repeated once it is done. The cluster ends when stdin is closed. Every
node's processes have a working directory of their own: what lies in /proc/self/cwd is not shared by them.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

from raytune_fsdp.launch.ray.nodes.spot import ENDPOINT


def main(directory: Path) -> None:
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
        match line.split():
            case ["add", name, cpus, gpus, metadata]:
                os.environ[ENDPOINT] = metadata  # which the node's processes inherit
                nodes[name] = cluster.add_node(**place(name, cpus), num_gpus=int(gpus))
                cluster.wait_for_nodes()
            case ["remove", name]:
                cluster.remove_node(nodes.pop(name), allow_graceful=False)
            case ["set", name, value]:
                os.environ[name] = value
            case ["drain", name, seconds]:
                deadline = int((time.time() + float(seconds)) * 1000)
                reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
                accepted, why = GcsClient(address=cluster.address).drain_node(
                    nodes[name].node_id, reason, "spot", deadline
                )
                assert accepted, why
        print(line.strip(), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
