"""A cluster that was joined loses its head: for a moment, which nobody notices, or for good."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from raytune_fsdp.record.jsonl import read_trajectory
from tests.ray.jobs import Command, Nodes, config_of, events
from tests.runs import trajectory

pytestmark = pytest.mark.slow

LIMIT = 30
"""Of Ray's, in seconds; a minute by default."""


def test_a_head_that_is_away(tmp_path: Path) -> None:
    """Ray itself would end the command after its limit, with one line from C++, and without recording anything."""
    config = config_of(
        tmp_path,
        train={"global_batch": 10, "micro_batch": 2, "max_steps": 60},
        checkpoint={"every": 5},
        cluster={"launch": "ray", "workers": 2, "device": "cpu", "max_failures": 0},
        tracking={"console": True, "mlflow": {"enabled": False}},
    )
    whole = trajectory(
        config_of(tmp_path, run={"name": "whole"}, train={"global_batch": 10, "micro_batch": 2, "max_steps": 60}), 2
    )
    kept = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(tmp_path / "gcs")}
    limit = {"RAY_gcs_rpc_server_reconnect_timeout_s": str(LIMIT)}
    with Nodes(tmp_path, head_cpus=4, **kept, **limit) as nodes:
        run = Command(config, tmp_path, RAY_ADDRESS=nodes.address, RAY_AUTH_MODE="disabled", **limit)
        (run.faults / "pace").write_text("0.5")
        run.until(lambda: run.steps() >= 6)
        head = nodes.head
        command, environment = head.cmdline(), head.environ()
        head.kill()
        time.sleep(LIMIT / 3)
        again = subprocess.Popen(
            command, env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            reached = run.steps()
            run.until(lambda: run.steps() >= reached + 10)
        finally:
            again.kill()
            again.wait()
        began = time.monotonic()
        code, said = run.end(LIMIT)
        print(f"ended after {time.monotonic() - began:.0f} s")
    assert code == 1, said
    assert f"error: the run failed: the head of the Ray cluster at {nodes.address} has not answered for " in said
    assert "Failed to connect to GCS" not in said
    (failed,) = events(run.run_dir, "attempt_failed")
    assert failed["fields"]["cause"].startswith("the head of the Ray cluster at")
    assert not list(run.run_dir.glob("lock*")) and not list(run.run_dir.glob(".shared-*"))
    found = read_trajectory(run.run_dir / "metrics.jsonl")
    assert found == whole[: len(found)]
