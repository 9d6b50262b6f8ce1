"""`run.stop_after` ends a run at a step, saved and measured; the same command goes on, as if it had never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.base.errors import Interrupted
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch.finetune import finetune
from raytune_fsdp.record.jsonl import read_evaluations, read_events, read_trajectory
from tests.checkpoints import checkpoints
from tests.runs import make_config, trajectory, write_tokens


def config_of(directory: Path, name: str, **run: Any) -> FinetuneConfig:
    data = make_config(directory).model_dump()["data"]
    if not (directory / "others.jsonl").exists():
        write_tokens(directory / "others.jsonl", rows=20, seed=1)
    data["eval"] = [{"path": str(directory / "others.jsonl"), "format": {"type": "tokens"}}]
    return make_config(
        directory, run={"name": name, **run}, data=data, train={"max_steps": 12}, eval={"every": 4},
        checkpoint={"every": 5, "keep_last": None},
    )  # fmt: skip


def place_of(config: FinetuneConfig) -> Path:
    return Path(config.run.storage) / config.run.name


def evaluations(config: FinetuneConfig) -> dict[int, dict[str, float]]:
    return read_evaluations(place_of(config) / "metrics.jsonl", 12)


def test_a_run_in_segments_is_the_run_in_one(tmp_path: Path) -> None:
    whole = config_of(tmp_path, "whole")
    finetune(whole)
    for last, measured in ((4, [4]), (7, [4]), (8, [4, 8])):
        part = config_of(tmp_path, "parts", stop_after=last)
        with pytest.raises(Interrupted, match=rf"^stopped as it was asked to after step {last}, which is saved"):
            finetune(part)
        assert [row["step"] for row in read_trajectory(place_of(part) / "metrics.jsonl")] == [*range(1, last + 1)]
        assert [*evaluations(part)] == measured and checkpoints(place_of(part))[-1].step == last
    begun = len(read_events(place_of(part) / "events.jsonl"))
    for earlier in (8, 3):  # there already: it ends at once
        with pytest.raises(Interrupted, match="after step 8, which is saved; with a later run.stop_after"):
            finetune(config_of(tmp_path, "parts", stop_after=earlier))
    assert len(read_events(place_of(part) / "events.jsonl")) == begun
    result = finetune(config_of(tmp_path, "parts", stop_after=20))
    assert (result.steps, result.trained) == (12, 4), "a step that the run does not have stops nothing"
    assert trajectory(part, 1) == trajectory(whole, 1) and evaluations(part) == evaluations(whole)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_on_several_ranks(tmp_path: Path, world: int) -> None:
    part, whole = config_of(tmp_path, "part", stop_after=6), config_of(tmp_path, "whole")
    assert len(trajectory(part, world)) == 6 and [*evaluations(part)] == [4]
    assert trajectory(config_of(tmp_path, "part"), world) == trajectory(whole, world)


def test_an_evaluation_that_a_crash_has_prevented_is_made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, "run", stop_after=8)
    with monkeypatch.context() as patch:
        patch.setattr("raytune_fsdp.run.loop._evaluate", lambda _, step: 1 / (8 - step))
        with pytest.raises(ZeroDivisionError):
            finetune(config)
    assert checkpoints(place_of(config))[-1].step == 8 and not evaluations(config)
    with pytest.raises(Interrupted, match="after step 8"):
        finetune(config)
    assert [*evaluations(config)] == [8] and len(read_trajectory(place_of(config) / "metrics.jsonl")) == 8
