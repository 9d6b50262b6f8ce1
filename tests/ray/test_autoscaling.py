"""An elastic run on a cluster without a node for it: an autoscaler starts them, and the run grows."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from ray._private.services import get_node_ip_address

from raytune_fsdp.record.jsonl import read_trajectory
from tests.ray.jobs import FAULTS, ROOT, Command, config_of, events
from tests.runs import trajectory

pytestmark = pytest.mark.slow

TRAIN = {"global_batch": 10, "micro_batch": 2, "max_steps": 400}


@contextmanager
def growing(directory: Path) -> Iterator[str]:
    """The address of a Ray whose autoscaler, Ray's own, starts up to three nodes on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"{get_node_ip_address()}:{port}"
    config = {
        "cluster_name": "growing", "max_workers": 3, "upscaling_speed": 10, "idle_timeout_minutes": 60,
        "provider": {
            "type": "fake_multinode", "gcs_address": address, "launch_multiple": True,
            "disable_node_updaters": True, "disable_launch_config_check": True,
        },
        "head_node_type": "ray.head.default", "auth": {"ssh_user": "nobody"},
        "available_node_types": {
            "ray.head.default": {"node_config": {}, "resources": {"CPU": 1}, "max_workers": 0},
            "worker": {"node_config": {}, "resources": {"CPU": 1, "GPU": 1}, "min_workers": 0, "max_workers": 3},
        },
        **dict.fromkeys(("file_mounts", "docker"), {}),
        **dict.fromkeys(("cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands"), []),
        **dict.fromkeys(("setup_commands", "head_setup_commands", "worker_setup_commands"), []),
        **dict.fromkeys(("head_start_ray_commands", "worker_start_ray_commands"), []),
    }  # fmt: skip
    (directory / "autoscaling.json").write_text(json.dumps(config))
    temporary = tempfile.mkdtemp(prefix="ray-")
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}"]
    command += [f"--autoscaling-config={directory / 'autoscaling.json'}", "--num-cpus=1", f"--temp-dir={temporary}"]
    command += ["--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=80000000"]
    environment = {
        **os.environ, "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_AUTH_MODE": "disabled",
        "PYTHONPATH": f"{FAULTS}:{ROOT}", "FAULTS": str(directory / "faults"), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with open(directory / "ray.txt", "w") as output:
        head = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        deadline, said = time.monotonic() + 180, ""
        status = [command[0], "status", f"--address={address}"]
        while "Node status" not in said:  # the first report of the autoscaler
            assert head.poll() is None and time.monotonic() < deadline, (directory / "ray.txt").read_text() + said
            asked = subprocess.run(status, env=environment, capture_output=True, text=True)
            said = asked.stdout + asked.stderr
            time.sleep(0.5)
        yield address
    finally:
        family = [psutil.Process(head.pid), *psutil.Process(head.pid).children(recursive=True)]
        head.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            head.wait(20)
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(temporary, ignore_errors=True)


@pytest.mark.timeout(900)
def test_an_autoscaler_hears_what_an_elastic_run_would_like_to_have(tmp_path: Path) -> None:
    config = config_of(
        tmp_path, train=TRAIN,
        cluster={
            "launch": "ray", "workers": {"min": 1, "max": 3}, "device": "cpu", "gpus_per_worker": 1, "wait_minutes": 5,
        },
        tracking={"console": True, "mlflow": {"enabled": False}},
    )  # fmt: skip
    (tmp_path / "faults").mkdir()
    with growing(tmp_path) as address:
        run = Command(config, tmp_path, RAY_ADDRESS=address, RAY_AUTH_MODE="disabled")
        (run.faults / "pace").write_text("0.3")
        run.until(lambda: bool(events(run.run_dir, "ranks_joined")))
        run.until(lambda: len(events(run.run_dir, "ranks_joined")[-1]["fields"]["ranks"]) == 3)
        (run.faults / "pace").unlink()
        code, said = run.end()
    assert code == 0, said
    whole = trajectory(config_of(tmp_path, run={"name": "whole"}, train=TRAIN), 2)
    trained = read_trajectory(run.run_dir / "metrics.jsonl")
    assert [step["samples"] for step in trained] == [step["samples"] for step in whole]
    assert not events(run.run_dir, "attempt_failed")
