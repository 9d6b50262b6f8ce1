"""Peer copies on two nodes: one of them is lost between two checkpoints, and the run goes on from the copies. Before
that, in the same attempt, their keepers die, too."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from raytune_fsdp.record.jsonl import read_trajectory
from tests.checkpoints import checkpoints
from tests.ray.jobs import Command, Nodes, config_of, events
from tests.runs import trajectory

pytestmark = pytest.mark.slow

EVERY = 16
COPIES = {"every": EVERY, "peer_copies": 1, "peer_every": 3}


def test_a_run_loses_a_node_and_goes_on_from_the_memory_of_the_other(tmp_path: Path) -> None:
    """First with as many ranks, on a node that had none before; then with fewer, on the node that is left."""
    train = {"global_batch": 10, "micro_batch": 2, "max_steps": 46}
    sections = {"train": train, "run": {"exact": True}}
    config = config_of(
        tmp_path,
        **sections,
        cluster={
            "launch": "ray", "workers": {"min": 1, "max": 2}, "device": "cpu", "gpus_per_worker": 1, "max_failures": 2,
        },
        checkpoint=COPIES,
        tracking={"console": True, "mlflow": {"enabled": False}},
    )  # fmt: skip
    whole = trajectory(config_of(tmp_path, train=train, run={"exact": True, "name": "whole"}), 2)
    with Nodes(tmp_path, head_cpus=1) as nodes:
        for name in "ab":
            nodes.add(name)
        run = Command(config, tmp_path, RAY_ADDRESS=nodes.address, RAY_AUTH_MODE="disabled")
        (run.faults / "pace").write_text("0.3")
        begins, killed = [], 0
        for number, (lost, comes) in enumerate((("a", "c"), ("b", None)), start=1):
            run.until(lambda: len(events(run.run_dir, "first_step")) == number)  # noqa: B023
            reached = max(run.steps(), EVERY * number)
            if comes is not None:
                nodes.add(comes)  # there is room for it, and not for a third rank
            run.until(lambda: run.steps() >= reached + 1)  # noqa: B023
            for each in psutil.Process(nodes.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if "ray::_Keeper" in " ".join(each.cmdline()):
                        each.kill()
                        killed += 1
            run.until(lambda: run.steps() >= reached + 11)  # noqa: B023
            nodes.remove(lost)
            run.until(lambda: len(events(run.run_dir, "attempt_started")) == number + 1)  # noqa: B023
            begins.append(events(run.run_dir, "attempt_started")[-1]["fields"])
        (run.faults / "pace").unlink()
        code, said = run.end()
    assert code == 0, said
    assert killed == 4
    print(begins, [each["fields"] for each in events(run.run_dir, "attempt_failed")])
    for each, number in zip(begins, (1, 2), strict=True):
        assert each["from_peers"] and EVERY * number + 6 <= each["resumed_from"] < EVERY * (number + 1), begins
    saved = [each["fields"]["step"] for each in events(run.run_dir, "saved")]
    assert saved == [16, 32, 46] and checkpoints(run.run_dir)[-1].step == 46, "a copy is no checkpoint"
    assert read_trajectory(run.run_dir / "metrics.jsonl") == whole
