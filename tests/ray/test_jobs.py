"""`ray job submit` on a cluster with token authentication, as docs/operations.md shows it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from raytune_fsdp.record.jsonl import read_trajectory
from tests.checkpoints import checkpoints
from tests.config_text import dump_config
from tests.ray.jobs import ROOT, TRAIN, config_of, events, mlflow_runs
from tests.runs import trajectory

RAY = str(Path(sys.executable).with_name("ray"))

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


@pytest.fixture(scope="module")
def head() -> Iterator[dict[str, str]]:
    """A head that was started as documented; the environment of its clients."""
    temporary = tempfile.mkdtemp(prefix="ray-")
    dashboard = free_port()
    shared = {
        **{key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    process = subprocess.Popen(
        [
            RAY, "start", "--head", "--block", f"--port={free_port()}", f"--dashboard-port={dashboard}",
            # Jobs are started through this port; another Ray of this machine may have Ray's usual one.
            f"--dashboard-agent-listen-port={free_port()}", "--num-cpus=4", f"--temp-dir={temporary}",
            f"--object-store-memory={256 << 20}", "--disable-usage-stats",
        ],
        env={**shared, "RAY_JOB_STOP_WAIT_TIME_S": "120"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    client = {**shared, "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}"}
    try:
        for _ in range(60):
            # "No available agent to submit job": in the first seconds.
            tried = subprocess.run([RAY, "job", "submit", "--", "true"], env=client, capture_output=True, text=True)
            if tried.returncode == 0:
                break
            time.sleep(1)
        else:
            raise AssertionError(tried.stderr)
        yield client
    finally:
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        for each in (process, *family):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        shutil.rmtree(temporary, ignore_errors=True)


def submit(client: dict[str, str], job: str, *arguments: str) -> subprocess.Popen[str]:
    command = [RAY, "job", "submit", "--submission-id", job, "--working-dir", str(ROOT), "--"]
    return subprocess.Popen(
        [*command, "python", "jobs/finetune.py", *arguments], env=client, cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def details(client: dict[str, str], job: str) -> tuple[str, int | None]:
    code = (
        "import sys; from ray.job_submission import JobSubmissionClient as C;"
        "i = C(sys.argv[1]).get_job_info(sys.argv[2]); print(i.status.value, i.driver_exit_code)"
    )
    ask = [sys.executable, "-c", code, client["RAY_API_SERVER_ADDRESS"], job]
    status, code = subprocess.run(ask, env=client, capture_output=True, text=True, check=True).stdout.split()
    return status, None if code == "None" else int(code)


def test_a_job_that_the_head_does_not_know_is_said_to_be_so(head: dict[str, str]) -> None:
    """By this `cluster/again.sh` tells a head that is another one from a head that does not answer."""
    with pytest.raises(subprocess.CalledProcessError) as error:
        details(head, "nobodys")
    assert "RuntimeError: Request failed with status code 404: Job nobodys does not exist" in error.value.stderr


def test_submitted_stopped_and_submitted_again(tmp_path: Path, head: dict[str, str]) -> None:
    long = {"train": {**TRAIN, "max_steps": 500}, "checkpoint": {"every": 100}}
    whole = trajectory(config_of(tmp_path, run={"name": "whole"}, **long), 2)
    workers = {"launch": "auto", "workers": 2, "device": "cpu"}
    config = config_of(tmp_path, cluster=workers, tracking={"mlflow": {"enabled": True}}, **long)
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    run_dir = Path(config.run.storage) / config.run.name
    wrong = submit(head, "wrong", "--config", str(file), "--run.storage", "runs")
    first = submit(head, "first", "--config", str(file))
    deadline = time.monotonic() + 240
    while not (run_dir / "metrics.jsonl").exists() or len(read_trajectory(run_dir / "metrics.jsonl")) < 5:
        assert first.poll() is None and time.monotonic() < deadline, first.communicate()[0]
        time.sleep(0.1)
    subprocess.run([RAY, "job", "stop", "first"], env=head, check=True, capture_output=True)
    first.wait(120)
    assert details(head, "first")[0] == "STOPPED"
    stopped = checkpoints(run_dir)[-1].step
    assert read_trajectory(run_dir / "metrics.jsonl")[-1]["step"] == stopped >= 5
    assert [status for _, status in mlflow_runs(run_dir.parent)] == ["KILLED"]
    said, _ = wrong.communicate(timeout=60)
    assert wrong.returncode == 1 and "run.storage=runs is inside this job's copy of the working directory" in said
    assert details(head, "wrong") == ("FAILED", 2)
    second = submit(head, "second", "--config", str(file))
    said, _ = second.communicate(timeout=300)
    assert second.returncode == 0, said
    assert details(head, "second") == ("SUCCEEDED", 0)
    assert read_trajectory(run_dir / "metrics.jsonl") == whole
    assert [line["fields"]["resumed_from"] for line in events(run_dir, "attempt_started")] == [0, stopped]
    assert [status for _, status in mlflow_runs(run_dir.parent)] == ["FINISHED"]


def test_a_driver_that_is_killed_is_submitted_again_until_it_is_done_or_refused(
    tmp_path: Path, head: dict[str, str]
) -> None:
    """`cluster/again.sh`, which tests/cluster runs with a stand-in for `ray`, and what Ray makes of exit codes."""

    def again(last: str) -> tuple[int, int]:
        job = tmp_path / "job.sh"
        job.write_text(f"echo x >> {tmp_path}/tries; [ $(wc -l < {tmp_path}/tries) -gt 1 ] && {last}; kill -9 $$")
        (tmp_path / "tries").write_text("")
        done = subprocess.run(
            [ROOT / "cluster" / "again.sh", "-", "sh", str(job)], cwd=tmp_path, timeout=300,
            env={**head, "PAUSE": "1", "TRIES": "4"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return done.returncode, len((tmp_path / "tries").read_text().split())

    assert again("exit 0") == (0, 2)
    assert again("exit 2") == (2, 2)
