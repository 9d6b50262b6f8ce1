"""`raytune-fsdp doctor` on clusters of several nodes on this machine: one that is well, and what is planted in it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.config import FinetuneConfig
from tests.config_text import dump_config
from tests.ray.jobs import FAULTS, ROOT, Nodes
from tests.runs import make_config

pytestmark = pytest.mark.slow

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5" * 64}
TWO = {"launch": "ray", "workers": 2, "device": "cpu", "placement": "strict_spread"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """A head and a node with 2 CPUs each, which ask for a token."""
    with Nodes(tmp_path_factory.mktemp("cluster"), head_cpus=2, **TOKEN) as nodes:
        nodes.add("first", cpus=2, gpus=0)
        yield nodes


def doctor(
    config: FinetuneConfig, directory: Path, *arguments: str, **environment: str
) -> tuple[int, list[dict[str, str]], float]:
    """Its exit code, its findings and its seconds."""
    file = directory / "config.yaml"
    file.write_text(dump_config(config))
    for _ in range(3):
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "raytune_fsdp.cli.main", "doctor", "--json", "--config", str(file), *arguments],
            capture_output=True, text=True, cwd=directory, timeout=200,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{FAULTS}:{ROOT}", **environment},
        )  # fmt: skip
        assert done.stdout, done.stderr
        if "not checked within" not in done.stdout:  # as on a machine that others keep busy
            break
    return done.returncode, json.loads(done.stdout)["findings"], time.monotonic() - began


@pytest.fixture
def storage() -> Iterator[dict[str, str]]:
    """In memory: how fast the disk is depends on who else writes."""
    with tempfile.TemporaryDirectory(prefix="doctor-", dir="/dev/shm") as directory:
        yield {"storage": f"{directory}/runs"}


def bad(findings: list[dict[str, str]]) -> dict[str, dict[str, str]]:
    """What is not ok, by check."""
    found = {each["check"]: each for each in findings if each["status"] != "ok"}
    assert all(each["fix"] for each in found.values())
    return found


def test_a_cluster_that_is_well_passes(tmp_path: Path, cluster: Nodes, storage: dict[str, str]) -> None:
    config = make_config(tmp_path, cluster=TWO, run=storage)
    (tmp_path / "config.yaml").touch()
    before = set(tmp_path.rglob("*"))
    code, findings, seconds = doctor(config, tmp_path, RAY_ADDRESS=cluster.address, **TOKEN)
    assert code == 0 and not bad(findings), findings
    assert seconds < 20
    found = {each["check"]: each["found"] for each in findings}
    assert found["Ray"] == f"joined the cluster at {cluster.address}, 2 nodes, 4 CPUs"
    assert "refuses everybody without a token" in found["token"] and "2 nodes with the same Python" in found["same"]
    assert found["resources"] == "2 workers on CPUs, room for 2, free now for 2"
    assert found["shared"].startswith("all nodes see run.storage")
    assert set(tmp_path.rglob("*")) == before and not Path(storage["storage"]).exists()


def test_storage_that_each_node_has_for_itself(tmp_path: Path, cluster: Nodes) -> None:
    config = make_config(tmp_path, cluster=TWO, run={"storage": "/proc/self/cwd/runs", "name": "unshared"})
    code, findings, _ = doctor(config, tmp_path, RAY_ADDRESS=cluster.address, **TOKEN)
    found = bad(findings)["shared"]
    assert code == 2 and "is not seen by a task" in found["found"] and "mount the same storage" in found["fix"]
    assert not (tmp_path / "runs").exists()


def test_more_workers_than_there_is_room_for(tmp_path: Path, cluster: Nodes, storage: dict[str, str]) -> None:
    config = make_config(tmp_path, cluster={**TWO, "workers": 5, "placement": "pack"}, run=storage)
    code, findings, _ = doctor(config, tmp_path, RAY_ADDRESS=cluster.address, **TOKEN)
    found = bad(findings)["resources"]
    assert code == 2 and "there is room for 4" in found["found"] and found["fix"].startswith("lower cluster.workers")
    config = make_config(tmp_path, cluster={**TWO, "device": "cuda"}, run=storage)
    found = bad(doctor(config, tmp_path, RAY_ADDRESS=cluster.address, **TOKEN)[1])["resources"]
    assert "each worker needs a GPU, but no node has one" in found["found"] and "cluster.device=cpu" in found["fix"]


def test_the_network_between_real_ranks(tmp_path: Path, cluster: Nodes, storage: dict[str, str]) -> None:
    """A loopback is slower than was promised, and not slower than little."""
    config = make_config(tmp_path, cluster=TWO, run=storage)
    arguments = ["--network", "--bandwidth", "4Tbps"]
    code, findings, _ = doctor(config, tmp_path, *arguments, RAY_ADDRESS=cluster.address, **TOKEN)
    network = [each for each in findings if each["check"] == "network"]
    assert code == 2 and [each["found"].partition(":")[0] for each in network] == [
        "all-reduce", "all-gather", "reduce-scatter",
    ]  # fmt: skip
    assert all("2 ranks on 2 nodes, gloo" in each["found"] and each["status"] == "problem" for each in network)
    arguments = ["--network", "--bandwidth", "1Mbps"]
    code, findings, _ = doctor(config, tmp_path, *arguments, RAY_ADDRESS=cluster.address, **TOKEN)
    assert code == 0 and not bad(findings), findings


def test_a_node_with_other_versions_and_another_clock(tmp_path: Path, cluster: Nodes, storage: dict[str, str]) -> None:
    """It is asked by what is sent to it: what it has of ours is of another version."""
    package = tmp_path / "old" / "raytune_fsdp"
    shutil.copytree(ROOT / "raytune_fsdp", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "__init__.py").write_text(
        (package / "__init__.py").read_text().replace('__version__ = "', '__version__ = "9')
    )
    metadata = tmp_path / "old" / "torch-2.11.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\n")
    cluster.set("PYTHONPATH", f"{package.parent}:{FAULTS}:{ROOT}")
    cluster.set("CLOCK_OFF", "400")
    cluster.add("odd", cpus=1, gpus=0)
    try:
        code, findings, _ = doctor(
            make_config(tmp_path, cluster=TWO, run=storage), tmp_path, RAY_ADDRESS=cluster.address, **TOKEN
        )
    finally:
        cluster.remove("odd")
    found = bad(findings)
    assert code == 2 and set(found) - {"shared"} == {"same", "clocks"}, (
        found
    )  # three nodes on two cores may write slowly
    assert "torch 2.11.0 (here" in found["same"]["found"] and "raytune_fsdp 9" in found["same"]["found"]
    assert "-m pip install torch==" in found["same"]["fix"]
    assert "s ahead" in found["clocks"]["found"] and "chronyc" in found["clocks"]["fix"]


def test_a_cluster_without_a_token(tmp_path: Path, storage: dict[str, str]) -> None:
    (tmp_path / "cluster").mkdir()
    with Nodes(tmp_path / "cluster", head_cpus=3) as nodes:
        config = make_config(tmp_path, cluster={**TWO, "placement": "pack"}, run=storage)
        environment = {"RAY_ADDRESS": nodes.address, "RAY_AUTH_MODE": "disabled"}
        code, findings, _ = doctor(config, tmp_path, **environment)
    found = bad(findings)
    assert code == 2 and set(found) == {"token"} and "RAY_AUTH_MODE=token" in found["token"]["fix"], found


def test_a_cluster_that_is_not_there_and_one_that_says_nothing(
    tmp_path: Path, cluster: Nodes, storage: dict[str, str]
) -> None:
    config = make_config(tmp_path, cluster=TWO, run=storage)
    found = bad(doctor(config, tmp_path, RAY_ADDRESS=cluster.address, RAY_AUTH_MODE="disabled")[1])["Ray"]
    assert "asks for a token" in found["found"] and found["fix"].startswith("set RAY_AUTH_MODE=token")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel takes connections, and nobody answers
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        code, findings, seconds = doctor(config, tmp_path, RAY_ADDRESS=address, **TOKEN)
    found = bad(findings)["Ray"]
    assert code == 2 and seconds < 20, (seconds, found)
    code, findings, _ = doctor(config, tmp_path, RAY_ADDRESS=address, **TOKEN)
    found = bad(findings)["Ray"]
    assert code == 2 and "cannot be joined" in found["found"] and "ray start --head" in found["fix"]


def test_without_a_cluster_no_ray_is_started(tmp_path: Path, storage: dict[str, str]) -> None:
    config = make_config(tmp_path, cluster={**TWO, "placement": "pack"}, run=storage)
    temporary: Any = tmp_path / "tmp"
    temporary.mkdir()
    code, findings, _ = doctor(config, tmp_path, RAY_ADDRESS="", RAY_TMPDIR=str(temporary), TMPDIR=str(temporary))
    found = {each["check"]: each["found"] for each in findings}
    assert code == 0 and "only this machine is checked" in found["Ray"], findings
    assert "2 workers on CPUs" in found["resources"] and not list(temporary.rglob("session_*"))
