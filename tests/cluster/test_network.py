"""Jobs on two machines that have addresses and links of their own, submitted from a third."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.record.jsonl import read_trajectory
from tests.cluster.network import Network, wait, why_not
from tests.config_text import dump_config
from tests.ray.jobs import ROOT, TRAIN, config_of, events
from tests.runs import trajectory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

HEAD, SECOND, OUTSIDE = range(3)
FAST = {  # a node that is silent for some seconds is dead
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "6",  # with 4 times 3 s a busy machine lost one that was well
}


class Machines:
    """A Ray on two machines of a network, and a place outside of it from where jobs come."""

    def __init__(self, directory: Path, *, of_nodes: Mapping[str, str] = FAST) -> None:
        """`of_nodes`: variables of `ray start`, which jobs have from nowhere else."""
        self.network = Network(3)
        self.of_nodes = of_nodes
        self.directory = directory
        self.place = directory / "place"
        """Looks the same on both machines, and is another directory on each."""
        self.place.mkdir()
        self.temporary = Path(tempfile.mkdtemp(prefix="ray-"))
        """So is this. In one that they share, a node that joins removes the jobs' copies of the working directory."""
        self.own = [directory / f"own-{machine}" for machine in (HEAD, SECOND)]
        for each in self.own:
            for name in ("place", "ray"):
                (each / name).mkdir(parents=True)
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }  # fmt: skip

    def ray(self, machine: int, *arguments: str, seats: int = 2) -> subprocess.Popen[str]:
        own = self.own[machine]
        with open(self.directory / f"ray-{machine}.txt", "a") as log:
            return self.network.start(
                machine, "ray", "start", "--block", f"--node-ip-address={self.network.address(machine)}",
                f"--object-store-memory={128 << 20}", "--disable-usage-stats", f'--resources={{"seat": {seats}}}',
                *arguments,
                binds={self.place: own / "place", self.temporary: own / "ray"},
                env={**self.environment, **self.of_nodes}, stdout=log, stderr=log,
            )  # fmt: skip

    def begin(self, *, cpus: int = 3, seats: int = 2, second: int = 2) -> None:
        """`cpus` and `seats`: the head's. `second`: the CPUs of the other one."""
        head = self.network.address(HEAD)
        self.ray(
            HEAD, "--head", "--port=6379", f"--dashboard-host={head}", f"--num-cpus={cpus}",
            f"--temp-dir={self.temporary}", seats=seats,
        )  # fmt: skip
        wait(lambda: self.job("true").wait() == 0, 120)
        self.second(second)

    def second(self, cpus: int = 2) -> subprocess.Popen[str]:
        return self.ray(SECOND, f"--address={self.network.address(HEAD)}:6379", f"--num-cpus={cpus}")

    def job(self, *command: str) -> subprocess.Popen[str]:
        """Submitted from outside."""
        return self.network.start(
            OUTSIDE, "ray", "job", "submit", "--working-dir", str(ROOT), "--", *command,
            env={**self.environment, "RAY_API_SERVER_ADDRESS": f"http://{self.network.address(HEAD)}:8265"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT,
        )  # fmt: skip

    def run(self, config: FinetuneConfig, *arguments: str) -> subprocess.Popen[str]:
        file = self.directory / f"{config.run.name}.yaml"
        file.write_text(dump_config(config))
        return self.job("python", "jobs/finetune.py", "--config", str(file), *arguments)

    def close(self) -> None:
        self.network.close()
        shutil.rmtree(self.temporary, ignore_errors=True)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    found = Machines(tmp_path_factory.mktemp("machines"))
    try:
        found.begin()
        yield found
    finally:
        found.close()


def on_four(directory: Path, **sections: Any) -> FinetuneConfig:
    """Two ranks on each machine, which share a copy of the model."""
    cluster = {
        "launch": "ray", "workers": 4, "device": "cpu", "wait_minutes": 5,
        "resources_per_worker": {"seat": 1},  # two on each machine
        # Otherwise gloo takes the address of the host's name, which is that of none of these.
        "env": {"GLOO_SOCKET_IFNAME": "eth0"},
    }  # fmt: skip
    parallel = {"precision": "fp32", "strategy": "hybrid_shard", "shard_size": 2}
    return config_of(directory, **{"cluster": cluster, "parallel": parallel, **sections})


def test_machines_that_are_cut_off_and_come_back(tmp_path: Path, machines: Machines) -> None:
    long = {"train": {**TRAIN, "max_steps": 200}, "checkpoint": {"every": 10, "keep_last": 3}}
    whole = trajectory(on_four(tmp_path, run={"name": "whole"}, **long), 4)
    config = on_four(tmp_path, **long)
    run_dir = Path(config.run.storage) / config.run.name
    job = machines.run(config)

    def steps() -> int:
        file = run_dir / "metrics.jsonl"
        return read_trajectory(file)[-1]["step"] if file.exists() and read_trajectory(file) else 0

    def ended() -> str:
        return job.communicate()[0] if job.poll() is not None else "it runs"

    wait(lambda: steps() >= 15 or job.poll() is not None, 400, ended)
    assert job.poll() is None, ended()
    machines.network.cut(SECOND)
    wait(lambda: len(events(run_dir, "attempt_failed")) == 1, 300, ended)
    machines.network.mend(SECOND)
    # Its raylet is told that it is dead, and ends; with it what is left of the ranks.
    wait(lambda: not machines.network.pids(SECOND), 200)
    machines.second()
    said, _ = job.communicate(timeout=600)
    assert job.returncode == 0, said
    assert read_trajectory(run_dir / "metrics.jsonl") == whole
    begun = events(run_dir, "attempt_started")
    assert [event["fields"]["resumed_from"] > 0 for event in begun] == [False, True]
    for joined in events(run_dir, "ranks_joined"):
        check_places(joined["fields"]["ranks"])


def check_places(ranks: list[dict[str, Any]]) -> None:
    """Neighbours are on one machine: so a copy of the model is."""
    assert [rank["rank"] for rank in ranks] == [0, 1, 2, 3]
    places = [(rank["node_rank"], rank["local_rank"]) for rank in ranks]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)], json.dumps(ranks)
    nodes = [rank["node_id"] for rank in ranks]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]


def test_storage_that_is_not_shared_is_refused(tmp_path: Path, machines: Machines) -> None:
    config = on_four(tmp_path, run={"name": "unshared", "storage": str(machines.place)})
    job = machines.run(config)
    said, _ = job.communicate(timeout=300)
    assert job.returncode == 1, said
    assert re.search(r"a file written there by rank 0 on \S+ is not seen by ranks 2, 3 on", said), said
    assert not any((own / "place" / "unshared").exists() for own in machines.own)
