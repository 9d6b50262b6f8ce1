"""A cluster that was joined loses its head: for a moment, which nobody notices, or for good."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.record.jsonl import read_trajectory
from tests.ray.jobs import Command, Nodes, config_of, events
from tests.runs import trajectory

pytestmark = pytest.mark.slow

LIMIT = 30
"""Of Ray's, in seconds; a minute by default."""

TRAIN = {"global_batch": 10, "micro_batch": 2, "max_steps": 60}


@contextmanager
def silent() -> Iterator[str]:
    """An MLflow server that does not answer, as one on the head's machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def config_at(tmp_path: Path, mlflow: str) -> FinetuneConfig:
    return config_of(
        tmp_path,
        train=TRAIN,
        checkpoint={"every": 5},
        cluster={"launch": "ray", "workers": 2, "device": "cpu", "max_failures": 0},
        tracking={"console": True, "mlflow": {"enabled": True, "uri": mlflow}},
    )


@contextmanager
def joined(tmp_path: Path, mlflow: str, **environment: str) -> Iterator[tuple[Command, Nodes]]:
    """A run on a cluster, some steps on its way."""
    limit = {"RAY_gcs_rpc_server_reconnect_timeout_s": str(LIMIT)}
    with Nodes(tmp_path, head_cpus=4, **environment, **limit) as nodes:
        config = config_at(tmp_path, mlflow)
        run = Command(config, tmp_path, RAY_ADDRESS=nodes.address, RAY_AUTH_MODE="disabled", **limit)
        (run.faults / "pace").write_text("1.5")
        run.until(lambda: run.steps() >= 6)
        yield run, nodes


@contextmanager
def another_head(tmp_path: Path, nodes: Nodes, seconds: float) -> Iterator[None]:
    """The head dies, and is started again at the same address after so many seconds."""
    head = nodes.head
    port = f"--gcs_server_port={nodes.address.rpartition(':')[2]}"  # it was started with 0, which is any
    command, environment = [port if "gcs_server_port=" in each else each for each in head.cmdline()], head.environ()
    assert port in command
    head.kill()
    time.sleep(seconds)
    again = subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        again.kill()
        again.wait()


def ended(run: Command, cause: str) -> str:
    """What it has said in the end: it has recorded what had happened, and has left nothing."""
    began = time.monotonic()
    code, said = run.end(LIMIT)
    print(f"ended after {time.monotonic() - began:.0f} s")
    assert code == 1, said
    assert f"error: the run failed: {cause}" in said
    assert "Failed to connect to GCS" not in said and "ClusterID" not in said
    (failed,) = events(run.run_dir, "attempt_failed")
    assert failed["fields"]["cause"].startswith(cause)
    assert not list(run.run_dir.glob("lock*")) and not list(run.run_dir.glob(".shared-*"))
    return said


def test_a_head_that_is_away(tmp_path: Path) -> None:
    """Ray itself would end the command after its limit, with one line from C++, and without recording anything."""
    kept = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(tmp_path / "gcs")}
    whole = trajectory(config_of(tmp_path, run={"name": "whole"}, train=TRAIN), 2)
    with silent() as mlflow, joined(tmp_path, mlflow, **kept) as (run, nodes):
        since = time.monotonic()
        with another_head(tmp_path, nodes, LIMIT / 3):
            run.until(lambda: time.monotonic() - since > LIMIT)  # the head is taken for lost ten seconds before that
        said = ended(run, f"the head of the Ray cluster at {nodes.address} has not answered for ")
    assert f"MLflow at {mlflow} has not answered" in said
    found = read_trajectory(run.run_dir / "metrics.jsonl")
    assert found == whole[: len(found)]


def test_a_head_that_comes_back_without_its_state(tmp_path: Path) -> None:
    """For Ray it is another cluster's: the next call of its would end the command at once, from C++."""
    with silent() as mlflow, joined(tmp_path, mlflow) as (run, nodes), another_head(tmp_path, nodes, 5.0):
        ended(run, f"the head of the Ray cluster at {nodes.address} has come back without its state")
