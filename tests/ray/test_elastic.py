"""Nodes come and go while a run is trained: it goes on with more or fewer ranks, and learns what it would have."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from raytune_fsdp.record.jsonl import read_trajectory
from tests.checkpoints import checkpoints
from tests.metadata import serving
from tests.ray.jobs import Command, Nodes, config_of, events
from tests.runs import trajectory

pytestmark = pytest.mark.slow

PAUSE = 120
"""Seconds in which a run does not grow after a growth that did not last (launch/ray/nodes/growth.py)."""

ON_NODES = {"launch": "ray", "device": "cpu", "gpus_per_worker": 1}
"""Ranks on the nodes that are added, which have a logical GPU each, and not on the head."""


OPEN = {**os.environ, "RAY_AUTH_MODE": "disabled"}


def test_nodes_are_lost_and_added(tmp_path: Path) -> None:
    """Sizes 4, 2, 3, 1, 4. What grows commits first; what is lost costs the steps since the last checkpoint."""
    train = {"global_batch": 10, "micro_batch": 2, "max_steps": 70}
    config = config_of(
        tmp_path,
        train=train,
        cluster={
            "launch": "ray",
            "workers": {"min": 1, "max": 4},
            "device": "cpu",
            "gpus_per_worker": 1,
            "max_failures": 2,
        },
        tracking={"console": True, "mlflow": {"enabled": False}},
    )
    whole = trajectory(config_of(tmp_path, run={"name": "whole"}, train=train), 2)
    with Nodes(tmp_path, head_cpus=1) as nodes:
        for name in "abcd":
            nodes.add(name)
        run = Command(config, tmp_path, RAY_ADDRESS=nodes.address, RAY_AUTH_MODE="disabled")
        (run.faults / "pace").write_text("0.5")

        def trained(attempt: int, size: int) -> None:
            """Wait until this attempt, of `size` ranks, has trained two steps."""
            run.until(lambda: len(events(run.run_dir, "first_step")) == attempt, 200 + PAUSE)
            reached = run.steps()
            run.until(lambda: run.steps() >= reached + 2)
            assert len(events(run.run_dir, "ranks_joined")[-1]["fields"]["ranks"]) == size

        trained(1, 4)
        nodes.remove("a")
        nodes.remove("b")
        trained(2, 2)
        nodes.add("e")
        trained(3, 3)
        nodes.remove("c")
        nodes.remove("d")
        trained(4, 1)
        (run.faults / "pace").write_text("2")  # so that steps are left when the pause is over
        for name in "fgh":
            nodes.add(name)
        trained(5, 4)
        (run.faults / "pace").unlink()
        code, said = run.end()
    assert code == 0, said
    found = read_trajectory(run.run_dir / "metrics.jsonl")
    assert [step["samples"] for step in found] == [step["samples"] for step in whole]
    resized = [line["fields"] for line in events(run.run_dir, "resized")]
    assert [(each["before"], each["after"]) for each in resized] == [(4, 2), (2, 3), (3, 1), (1, 4)], resized
    print(resized)
    assert [each["steps_redone"] for each in resized][1::2] == [0, 0]
    for mine, theirs in zip(found, whole, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert checkpoints(run.run_dir)[-1].step == 70


def test_nodes_are_taken_away(tmp_path: Path) -> None:
    """One by an administrator, one by a cloud: their ranks commit before that and go on elsewhere at once. That is no
    failure, and no step is trained twice."""
    config = config_of(
        tmp_path,
        train={"global_batch": 10, "micro_batch": 2, "max_steps": 60},
        cluster={**ON_NODES, "workers": {"min": 1, "max": 3}, "max_failures": 0, "spot_notice": "aws"},
        checkpoint={"every": 1000},
        tracking={"console": True, "mlflow": {"enabled": False}},
    )
    with serving() as quiet, serving() as cloud, Nodes(tmp_path, head_cpus=1) as nodes:
        for name, service in (("a", quiet), ("b", cloud), ("c", quiet)):
            nodes.add(name, metadata=service.address)
        run = Command(config, tmp_path, RAY_ADDRESS=nodes.address, RAY_AUTH_MODE="disabled")
        (run.faults / "pace").write_text("0.3")
        commits = []
        for number, seconds in enumerate((60, 15), start=1):
            run.until(lambda: len(events(run.run_dir, "first_step")) == number)  # noqa: B023
            reached = run.steps()
            run.until(lambda: run.steps() >= reached + 2)  # noqa: B023
            began = time.monotonic()
            if number == 1:
                nodes.drain("a", seconds)
            else:
                cloud.announce(seconds)
            run.until(lambda: len(events(run.run_dir, "drained")) == number, 6)  # noqa: B023
            print(f"noticed after {time.monotonic() - began:.1f} s")
            run.until(lambda: len(checkpoints(run.run_dir)) == number, seconds)  # noqa: B023
            print(f"committed after {time.monotonic() - began:.1f} s")
            commits.append(checkpoints(run.run_dir)[-1].step)
            if number == 1:
                run.until(
                    lambda: len(events(run.run_dir, "first_step")) == 2, seconds
                )  # does not wait for the deadline
        run.until(lambda: len(events(run.run_dir, "first_step")) == 3)
        (run.faults / "pace").unlink()
        code, said = run.end()
    assert code == 0, said
    resized = [line["fields"] for line in events(run.run_dir, "resized")]
    print(resized)
    assert [(each["before"], each["after"], each["steps_redone"]) for each in resized] == [(3, 2, 0), (2, 1, 0)]
    assert not events(run.run_dir, "attempt_failed")
    assert [line["fields"]["resumed_from"] for line in events(run.run_dir, "attempt_started")] == [0, *commits]
    steps = [step["step"] for step in read_trajectory(run.run_dir / "metrics.jsonl")]
    assert steps == list(range(1, 61))


OTHERS = """
import sys, time, ray
from pathlib import Path
ray.init(sys.argv[1], logging_level=40)
@ray.remote(num_cpus=0, num_gpus=1)
def busy(place, number, seconds):
    Path(place, f"busy-{number}").touch()
    time.sleep(seconds)
seconds = 60  # the run begins beside them
while True:
    ray.get([busy.remote(sys.argv[2], number, seconds) for number in range(2)])
    time.sleep(3)
    seconds = 20
"""
"""Two GPUs are busy for twenty seconds and idle for three, again and again."""


def test_work_of_others_that_comes_and_goes_does_not_stop_the_training(tmp_path: Path) -> None:
    """Five seconds of room in total were enough for a growth, and each of them ended where it began."""
    config = config_of(
        tmp_path,
        train={"global_batch": 10, "micro_batch": 2, "max_steps": 100_000},
        cluster={**ON_NODES, "workers": {"min": 2, "max": 4}, "max_failures": 0},
        tracking={"console": True, "mlflow": {"enabled": False}},
    )
    with Nodes(tmp_path, head_cpus=3) as nodes:
        for name in "abcd":
            nodes.add(name)
        others = subprocess.Popen(
            [sys.executable, "-c", OTHERS, nodes.address, str(tmp_path)], env=OPEN, start_new_session=True
        )
        try:
            while len(list(tmp_path.glob("busy-*"))) < 2:
                time.sleep(0.1)
            run = Command(config, tmp_path, RAY_ADDRESS=nodes.address, RAY_AUTH_MODE="disabled")
            (run.faults / "pace").write_text("0.5")
            run.until(lambda: run.steps() >= 1)
            began, reached = time.monotonic(), run.steps()
            run.until(lambda: time.monotonic() - began > 180)
            run.process.send_signal(signal.SIGINT)
            code, said = run.end()
        finally:
            os.killpg(others.pid, signal.SIGKILL)
            others.wait()
    assert code == 130, said
    attempts = events(run.run_dir, "attempt_started")
    sizes = [len(each["fields"]["ranks"]) for each in events(run.run_dir, "ranks_joined")]
    print(sizes, run.steps() - reached, "steps")
    assert len(attempts) <= 3, said  # one that may grow at once, and after that none for two minutes
