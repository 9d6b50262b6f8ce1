"""The script of `cluster/skypilot.yaml` on two machines of a network, with real Ray beside a Ray of SkyPilot's."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from tests.cluster.network import Network, wait, why_not

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Instead of a run: waits for both nodes, as a run does for its workers.
TRAIN = f"""#!{sys.executable}
import os, sys, time
import ray
ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
while len([node for node in ray.nodes() if node["Alive"]]) < 2:
    time.sleep(0.5)
print("trained", *sys.argv[1:])
"""


def test_its_own_ray_ends_and_skypilots_does_not(tmp_path: Path) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "raytune-fsdp").write_text(TRAIN)
    (tmp_path / "bin" / "raytune-fsdp").chmod(0o755)
    Path("/tmp/ray").mkdir(exist_ok=True)
    script = yaml.safe_load((ROOT / "cluster" / "skypilot.yaml").read_text())["run"]
    network = Network(2)
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
        "PATH": f"{tmp_path}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4, "RUN": "run",
        "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_NODE_IPS": "\n".join(network.address(machine) for machine in range(2)),
    }  # fmt: skip

    def start(machine: int, *command: str) -> subprocess.Popen[str]:
        own = tmp_path / f"ray-{machine}"
        own.mkdir(exist_ok=True)
        with (tmp_path / f"said-{machine}").open("a") as said:  # a pipe would be held open by what goes on
            return network.start(
                machine, *command, binds={Path("/tmp/ray"): own}, stdout=said, stderr=subprocess.STDOUT,
                env={**environment, "SKYPILOT_NODE_RANK": str(machine)},
            )  # fmt: skip

    def said(machine: int) -> str:
        return (tmp_path / f"said-{machine}").read_text()

    def ours(machine: int) -> list[str]:
        lines = []
        for pid in network.pids(machine):
            with suppress(psutil.Error):  # it ends, or has ended
                lines.append(" ".join(psutil.Process(pid).cmdline()))
        return [line[:150] for line in lines if ":6379" in line or "port=6379" in line]

    try:
        sky = start(0, "ray", "start", "--head", "--port", "6380", "--num-cpus", "1", "--include-dashboard", "false",
                    "--disable-usage-stats", "--node-ip-address", network.address(0))  # fmt: skip
        assert sky.wait(200) == 0, said(0)
        nodes = [start(machine, "bash", "-c", script) for machine in range(2)]
        wait(lambda: bool(ours(0)) and bool(ours(1)), 200, lambda: said(0) + said(1))
        wait(lambda: nodes[0].poll() is not None, 200, lambda: said(0) + said(1))
        assert nodes[0].returncode == 0 and "trained train --config llama2-70b-full-16xa100" in said(0), said(0)
        assert "--cluster.workers 16" in said(0)
        wait(lambda: nodes[1].poll() is not None, 300, lambda: said(1))
        assert nodes[1].returncode == 0, said(1)
        wait(lambda: not ours(0) + ours(1), 60, lambda: str(ours(0) + ours(1)))
        status = start(0, "ray", "status", "--address", f"{network.address(0)}:6380")
        assert status.wait(120) == 0, "SkyPilot's Ray is as it was"
    finally:
        network.close()
