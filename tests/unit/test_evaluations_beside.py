"""`eval.where: task`: which checkpoints are measured, and what it does not go with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.launch.start import run
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record.jsonl import append_evaluation
from raytune_fsdp.run.checks import check_where
from tests.runs import make_config

DATA = {"eval": [{"path": "held-out.jsonl", "format": {"type": "tokens"}}]}


@pytest.mark.parametrize(
    ("sections", "refused"),
    [
        ({}, "nothing is evaluated: set data.eval, eval.tasks or eval.prompts"),
        ({"eval": {"at_start": True}, "data": DATA}, "eval.at_start=true and eval.where=task: there is no checkpoint"),
        ({"eval": {"early_stop": {}, "every": 5}, "data": DATA}, "eval.early_stop and eval.where=task"),
        ({"checkpoint": {"keep_best": 2}, "data": DATA}, "checkpoint.keep_best=2 and eval.where=task"),
    ],
)
def test_what_it_does_not_go_with(tmp_path: Path, sections: dict[str, Any], refused: str) -> None:
    chosen = {**sections, "eval": {"where": "task", **sections.get("eval", {})}}
    with pytest.raises(ConfigError, match=refused):
        check_where(make_config(tmp_path, **chosen))


def test_it_needs_ray(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eval.where=task: evaluations during training are Ray tasks"):
        run(make_config(tmp_path, eval={"where": "task"}, data=DATA))


def test_which_checkpoints_are_measured(tmp_path: Path) -> None:
    """The first one from each multiple on, the last one, and none before one that is on record."""
    pytest.importorskip("ray")
    from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint
    from raytune_fsdp.launch.ray.tasks.evaluations import Evaluations

    place = RunDir.of(make_config(tmp_path))
    work = Evaluations(
        make_config(tmp_path, eval={"where": "task"}, data=DATA),
        SimpleNamespace(place=place, lease=None),  # type: ignore[arg-type]
        SimpleNamespace(eval_every=100, steps=350),  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        env=None,
        event=lambda *_, **__: None,
        say=lambda _: None,
    )

    def chosen(*steps: int) -> list[int]:
        asked: list[CommittedCheckpoint] = []
        for step in steps:
            found = CommittedCheckpoint(step, 1, place.checkpoints)
            if found not in asked and work.due(found, asked):
                asked.append(found)
        return [found.step for found in asked]

    assert chosen(96, 100, 104, 203, 204, 300, 348, 350, 350) == [100, 203, 300, 350]
    place.path.mkdir(parents=True)
    append_evaluation(place.evaluations, 203, {"eval/x/loss": 1.0}, attempt=1)
    assert chosen(100, 200, 203, 204, 300) == [300], "one that has failed is not made up for once a later one is there"
    work.record(CommittedCheckpoint(304, 1, place.checkpoints), ({}, [], 1.0))  # only prompts were asked
    assert chosen(300, 304, 320) == []
