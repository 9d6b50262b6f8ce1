"""Preferences under Ray: pairs come through its tasks, a rank dies, tasks measure checkpoints against the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.data.cache import REFERENCE
from raytune_fsdp.record.jsonl import read_evaluations, read_metrics, read_trajectory
from tests.preferences import KTO, PAIRS, preference_config
from tests.ray.jobs import Command, events
from tests.runs import largest_difference, trajectory

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("objective", [PAIRS["dpo and sft"], {**KTO["kto"], "desirable_weight": "auto"}])
def test_a_run_on_a_cluster_learns_what_one_process_learns(tmp_path: Path, objective: dict[str, Any]) -> None:
    sections: dict[str, Any] = {
        "data": {"eval": {"fraction": 0.2}}, "checkpoint": {"every": 2},
        "train": {"global_batch": 10, "micro_batch": 2, "max_steps": 12},
    }  # fmt: skip
    whole = preference_config(tmp_path, objective, run={"name": "whole"}, eval={"every": 4}, **sections)
    wanted = trajectory(whole, 1)
    cache = Path(whole.run.storage, "cache", REFERENCE)
    kept = {path.name: path.read_bytes() for path in cache.glob("*/*.values")}
    for path in cache.glob("*/*.values"):
        path.unlink()
    config = preference_config(
        tmp_path, objective, eval={"every": 4, "where": "task"}, tracking={"console": True},
        cluster={"launch": "ray", "workers": 2, "device": "cpu", "max_failures": 1}, **sections,
    )  # fmt: skip
    run = Command(config, tmp_path)
    (run.faults / "forward-1-30").touch()
    code, said = run.end(400)
    assert code == 0, said
    found = read_trajectory(run.run_dir / "metrics.jsonl")
    assert largest_difference(wanted, found, "loss") < 1e-9 and largest_difference(wanted, found, "grad_norm") < 1e-9
    assert {path.name: path.read_bytes() for path in cache.glob("*/*.values")} == kept
    known = [event["fields"] for event in events(run.run_dir, "reference")]
    assert known[0]["computed"] and not any(each["computed"] for each in known[1:])
    right = read_evaluations(Path(whole.run.storage, "whole", "metrics.jsonl"), 12)
    measured = {line["step"]: line["values"] for line in read_metrics(run.run_dir / "evaluations.jsonl")}
    assert measured, json.dumps(said)
    for step, values in measured.items():
        assert values == pytest.approx(right[step], rel=1e-6)
