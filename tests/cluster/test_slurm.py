"""`cluster/slurm.sh` on two machines of a network, with real Ray; Slurm's own commands are stand-ins."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from raytune_fsdp.record.jsonl import read_trajectory
from tests.cluster.network import Network, wait, why_not
from tests.ray.jobs import ROOT, events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# What Slurm would do with a node's name: run the command there, as a process that gets the signals of srun.
SRUN = """#!/bin/sh
while :; do
  case $1 in
    --nodelist=node0) machine=0 ;;
    --nodelist=node1) machine=1 ;;
    --*) ;;
    *) break ;;
  esac
  shift
done
exec nsenter --net=/var/run/netns/{name}-$machine unshare --mount \\
  sh -ec 'mount --bind {own}-'$machine' /tmp/ray && exec "$@"' sh "$@"
"""
SCONTROL = """#!/bin/sh
[ "$1 $2" = "show hostnames" ] && printf 'node0\\nnode1\\n' || echo "$@" >> {asked}
"""


class Allocation:
    """Two machines, and the environment that Slurm gives a job on the first."""

    def __init__(self, directory: Path) -> None:
        self.network = Network(2)
        self.asked = directory / "asked"
        """What the job has asked of Slurm."""
        self.own = directory / "ray"
        Path("/tmp/ray").mkdir(exist_ok=True)
        for machine in range(2):
            Path(f"{self.own}-{machine}").mkdir()
        programs = directory / "bin"
        programs.mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (programs / name).write_text(text.format(name=self.network.name, own=self.own, asked=self.asked))
            (programs / name).chmod(0o755)
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
            "PATH": f"{programs}:{os.environ['PATH']}", "VENV": sys.prefix, "OMP_NUM_THREADS": "1",
            "RAYTUNE_FSDP_LEAST_SECONDS": "1",
            "SLURM_JOB_ID": "123", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_CPUS_ON_NODE": "3",
        }  # fmt: skip

    def batch(self, *arguments: str) -> subprocess.Popen[str]:
        return self.network.start(
            0, "bash", "cluster/slurm.sh", *arguments, binds={Path("/tmp/ray"): Path(f"{self.own}-0")},
            env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT,
        )  # fmt: skip

    def left(self) -> list[str]:
        """What runs on the machines."""
        found = []
        for pid in (pid for machine in range(2) for pid in self.network.pids(machine)):
            with suppress(psutil.NoSuchProcess):
                found.append(" ".join(psutil.Process(pid).cmdline())[:200])
        return found


@pytest.fixture
def allocation(tmp_path: Path) -> Iterator[Allocation]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    found = Allocation(tmp_path)
    try:
        yield found
    finally:
        found.network.close()


def test_a_job_whose_time_is_up_queues_again_and_goes_on(tmp_path: Path, allocation: Allocation) -> None:
    demo = (
        "--config", "demo", "--run.name", "run", "--run.storage", str(tmp_path), "--train.epochs", "6",
        # Otherwise gloo takes the address of the host's name, which is that of none of these machines.
        "--cluster.env.GLOO_SOCKET_IFNAME", "eth0", "--cluster.placement", "strict_spread",
    )  # fmt: skip
    metrics = tmp_path / "run" / "metrics.jsonl"
    first = allocation.batch(*demo)
    wait(lambda: first.poll() is not None or (metrics.exists() and len(read_trajectory(metrics)) > 3), 500)
    first.send_signal(signal.SIGUSR1)  # as `#SBATCH --signal=B:USR1@600` asks for
    said, _ = first.communicate(timeout=400)
    assert first.returncode == 130, said
    assert allocation.asked.read_text() == "requeue 123\n"
    wait(lambda: not allocation.left(), 60, lambda: str(allocation.left()))
    done = len(read_trajectory(metrics))

    second = allocation.batch(*demo)
    said, _ = second.communicate(timeout=700)
    assert second.returncode == 0, said
    rows = read_trajectory(metrics)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)) and 3 < done < len(rows)
    assert allocation.asked.read_text() == "requeue 123\n", "what is done does not queue again"
    for joined in events(tmp_path / "run", "ranks_joined"):
        assert [rank["node_rank"] for rank in joined["fields"]["ranks"]] == [0, 1]
    wait(lambda: not allocation.left(), 60, lambda: str(allocation.left()))


def test_a_job_that_is_to_stop_at_once_is_not_queued_again(tmp_path: Path, allocation: Allocation) -> None:
    """As where `--time` is shorter than what `--signal` leaves: it would be queued for ever, and train nothing."""
    allocation.environment["RAYTUNE_FSDP_LEAST_SECONDS"] = "600"
    job = allocation.batch("--config", "demo", "--run.storage", str(tmp_path))
    wait(lambda: job.poll() is not None or any("start --block" in each for each in allocation.left()), 60)
    job.send_signal(signal.SIGUSR1)
    said, _ = job.communicate(timeout=400)
    assert job.returncode == 1 and "so it is not queued again: raise --time" in said, said
    assert not allocation.asked.exists() and not [*tmp_path.glob("*/metrics.jsonl")]
    wait(lambda: not allocation.left(), 60, lambda: str(allocation.left()))
