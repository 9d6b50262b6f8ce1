"""Heads and teachers under Ray: a rank dies, tasks measure checkpoints, and one learns what one process learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.data.cache import TEACHER
from raytune_fsdp.record.jsonl import read_evaluations, read_metrics, read_trajectory
from tests.distributed.test_reference import model_at
from tests.distributed.test_teacher import lessons
from tests.ray.jobs import Command, events
from tests.runs import largest_difference, trajectory
from tests.scores import OBJECTIVES, score_config

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["reward centred", "classification weighted"])
def test_scores_on_a_cluster(tmp_path: Path, name: str) -> None:
    sections: dict[str, Any] = {
        "data": {"eval": {"fraction": 0.2}}, "checkpoint": {"every": 2, "keep_last": 6},
        "train": {"global_batch": 10, "micro_batch": 2, "max_steps": 12},
    }  # fmt: skip
    whole = score_config(tmp_path, OBJECTIVES[name], run={"name": "whole"}, eval={"every": 4}, **sections)
    wanted = trajectory(whole, 1)
    config = score_config(
        tmp_path, OBJECTIVES[name], eval={"every": 4, "where": "task"}, tracking={"console": True},
        cluster={"launch": "ray", "workers": 2, "device": "cpu", "max_failures": 1}, **sections,
    )  # fmt: skip
    run = Command(config, tmp_path)
    (run.faults / "forward-1-30").touch()
    code, said = run.end(400)
    assert code == 0, said
    found = read_trajectory(run.run_dir / "metrics.jsonl")
    assert largest_difference(wanted, found, "loss") < 1e-9 and largest_difference(wanted, found, "grad_norm") < 1e-9
    right = read_evaluations(Path(whole.run.storage, "whole", "metrics.jsonl"), 12)
    measured = {line["step"]: line["values"] for line in read_metrics(run.run_dir / "evaluations.jsonl")}
    assert measured, json.dumps(said)
    for step, values in measured.items():
        assert values == pytest.approx(right[step], rel=1e-6)


def test_a_student_on_a_cluster(tmp_path: Path) -> None:
    teacher = model_at(tmp_path / "teacher", seed=4)["path"]
    sections: dict[str, Any] = {
        "checkpoint": {"every": 2},
        "train": {"global_batch": 10, "micro_batch": 2, "max_steps": 12, "objective": {"type": "distill"}},
    }
    whole = lessons(tmp_path, teacher, run={"name": "whole"}, **sections)
    wanted = trajectory(whole, 1)
    store = Path(whole.run.storage, "cache", TEACHER)
    for path in store.rglob("*.topk"):
        path.unlink()
    config = lessons(
        tmp_path, teacher, tracking={"console": True},
        cluster={"launch": "ray", "workers": 2, "device": "cpu", "max_failures": 1}, **sections,
    )  # fmt: skip
    run = Command(config, tmp_path)
    (run.faults / "forward-1-30").touch()
    code, said = run.end(400)
    assert code == 0, said
    assert "the teacher is asked about" in said and "attempt 2" in said
    found = read_trajectory(run.run_dir / "metrics.jsonl")
    assert largest_difference(wanted, found, "loss") < 1e-9 and largest_difference(wanted, found, "grad_norm") < 1e-9
    known = [event["fields"] for event in events(run.run_dir, "teacher")]
    assert known[0]["computed"] and not any(each["computed"] for each in known[1:])
