"""Runs on a cluster of several nodes that somebody else has started."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from raytune_fsdp.record.jsonl import read_trajectory
from tests.ray.jobs import Command, Nodes, config_of, events
from tests.runs import trajectory

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def three_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """A head and two nodes with 2 CPUs each; the two have a logical GPU each."""
    with Nodes(tmp_path_factory.mktemp("cluster"), head_cpus=2) as nodes:
        for name in ("first", "second"):
            nodes.add(name, cpus=2)
        yield nodes


@contextmanager
def taken(address: str) -> Iterator[None]:
    """Somebody else has both GPUs for a while."""
    code = (
        "import sys, ray; from ray.util import placement_group as group; ray.init(sys.argv[1], logging_level=40);"
        "ray.get(group([{'GPU': 1}, {'GPU': 1}]).ready()); print(flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    process.stdout.readline()
    yield
    process.stdin.close()
    process.wait(30)


def test_runs_on_several_nodes(tmp_path: Path, three_nodes: Nodes) -> None:
    """The trajectory is the one without Ray; requests that cannot be met are refused, at once or after the wait."""
    gpus = {"launch": "ray", "workers": 2, "device": "cpu", "gpus_per_worker": 1, "placement": "strict_spread"}
    config = config_of(tmp_path, cluster=gpus, tracking={"console": True, "console_every": 7})
    address = three_nodes.address

    def command(name: str, *arguments: str) -> Command:
        (tmp_path / name).mkdir()
        return Command(config, tmp_path / name, *arguments, RAY_ADDRESS=address, RAY_AUTH_MODE="disabled")

    with taken(address):
        waiting = command("waiting", "--run.name", "waiting", "--cluster.wait_minutes", "0.1")
        too_many = command("too-many", "--run.name", "too-many", "--cluster.workers", "3", "--train.max_steps", "1")
        whole = trajectory(config_of(tmp_path, run={"name": "whole"}), 2)
        code, said = too_many.end(60)
        assert code == 2, said
        assert "cluster.workers=3: 3 workers with 1 CPU + 1 GPU each" in said and "there is room for 2" in said
        code, said = waiting.end(60)
        assert code == 1 and "cluster.wait_minutes=0.1: the workers did not start in that time; waiting for 2" in said
    run = command("run")
    code, said = run.end()
    assert code == 0 and f"joined the cluster at {address}, 3 nodes, 6 CPUs, 2 GPUs" in said, said
    assert read_trajectory(run.run_dir / "metrics.jsonl") == whole
    (joined,) = events(run.run_dir, "ranks_joined")
    nodes = {rank["node_id"] for rank in joined["fields"]["ranks"]}
    assert len(joined["fields"]["ranks"]) == len(nodes) == 2
    for rank in joined["fields"]["ranks"]:  # what it has printed is where the dashboard looks, too
        (log,) = three_nodes.logs.glob(f"worker-*-{rank['pid']}.out")
        own = (run.run_dir / "logs" / "attempt-1" / f"rank-{rank['rank']}.log").read_text()
        assert set(own.splitlines()) <= set(log.read_text().splitlines())
        steps = re.findall(r"^step +(\d+)", log.read_text(), re.MULTILINE)
        assert steps == (["1", "7", "14", "21", "28", "30"] if rank["rank"] == 0 else [])
    # A path that each node has for itself.
    unshared = command("unshared", "--run.storage", "/proc/self/cwd/runs", "--run.name", "unshared")
    code, said = unshared.end()
    assert code == 2, said
    assert (
        "run.storage=/proc/self/cwd/runs: a file written there by rank 0 on" in said and "is not seen by rank 1" in said
    ), said
    for node in ("first", "second", "unshared"):
        assert not list(tmp_path.parent.glob(f"*/nodes/{node}/runs/unshared")), node
    shutil.rmtree(tmp_path)
