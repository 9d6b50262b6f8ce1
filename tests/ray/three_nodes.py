"""Starts a Ray of three nodes on this machine, prints its address, and ends it when its stdin is closed.

Every node's processes have a working directory of their own: what lies in /proc/self/cwd is not shared by them.
"""

import os
import sys
from pathlib import Path

from ray.cluster_utils import Cluster


def main(directory: Path) -> None:
    def place(name: str) -> dict[str, int]:
        (directory / name).mkdir()
        os.chdir(directory / name)
        return {"num_cpus": 2, "object_store_memory": 128 << 20}

    os.mkdir(os.path.join(os.environ["RAY_TMPDIR"], "ray"))
    head = {**place("head"), "include_dashboard": False, "temp_dir": os.path.join(os.environ["RAY_TMPDIR"], "ray")}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for name in ("first", "second"):
        cluster.add_node(**place(name), num_gpus=1)
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
