"""Under Ray, ranks that share samples and layers: the first of a group reads, any of them may die, and a run goes on
with another mesh."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.record.jsonl import read_evaluations, read_trajectory
from tests.ray.jobs import TRAIN, Command, events
from tests.runs import LLAMA, largest_difference, make_config, trajectory, write_tokens

pytestmark = pytest.mark.slow

BOUNDS = (1e-8, 1e-6)
"""Of losses and norms of a Llama in fp64, whose positions are computed in fp32 (DESIGN)."""


def config_of(directory: Path, mesh: dict[str, int], **sections: Any) -> FinetuneConfig:
    others = write_tokens(directory / "others.jsonl", rows=9, seed=1)
    return make_config(
        directory, LLAMA, train=TRAIN, parallel={"precision": "fp64", "mesh": mesh}, checkpoint={"every": 4},
        data={"eval": [{"path": str(others), "format": {"type": "tokens"}}]}, eval={"every": 10}, **sections,
    )  # fmt: skip


def test_ranks_of_a_mesh_die_and_go_on_with_another(tmp_path: Path) -> None:
    """Four ranks share tokens and layers, so there is one data rank; the last of them, which reads nothing, dies. Then
    two pairs of ranks share layers, and are stopped. Two ranks end the run, which share samples."""
    whole_config = config_of(tmp_path, {}, run={"name": "whole"})
    whole = trajectory(whole_config, 1)

    def command(mesh: dict[str, int], workers: int) -> Command:
        cluster = {"launch": "ray", "workers": workers, "device": "cpu", "max_failures": 1}
        return Command(config_of(tmp_path, mesh, cluster=cluster, tracking={"console": True}), tmp_path)

    first = command({"sequence": 2, "tensor": 2}, 4)
    (first.faults / "forward-3-35").touch()  # five blocks a step: in step 7
    (first.faults / "pace").write_text("0.1")
    first.until(lambda: first.steps() >= 10)
    first.process.send_signal(signal.SIGINT)
    code, said = first.end()
    assert code == 130, said
    (failed,) = [line["fields"] for line in events(first.run_dir, "attempt_failed")]
    assert failed["rank"] == 3 and "its process died" in failed["cause"], failed
    second = command({"tensor": 2}, 4)
    second.until(lambda: second.steps() >= 20)
    second.process.send_signal(signal.SIGINT)
    code, said = second.end()
    assert code == 130, said
    (second.faults / "pace").unlink()
    last = command({"sequence": 2}, 2)
    code, said = last.end()
    assert code == 0, said
    record = last.run_dir / "metrics.jsonl"
    found = read_trajectory(record)
    assert len(found) == 30
    assert largest_difference(whole, found, "loss") <= BOUNDS[0]
    assert largest_difference(whole, found, "grad_norm") <= BOUNDS[1]
    right = read_evaluations(Path(whole_config.run.storage) / "whole" / "metrics.jsonl", 30)
    measured = read_evaluations(record, 30)
    assert [*measured] == [10, 20, 30]
    for step, values in measured.items():
        assert values == pytest.approx(right[step], rel=1e-7)
