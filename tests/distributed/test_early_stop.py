"""A run ends when its evaluations no longer improve: at the same step on any number of ranks, after any stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch.finetune import finetune
from raytune_fsdp.record.jsonl import read_evaluations, read_events
from tests.checkpoints import checkpoints
from tests.runs import make_config, trajectory, write_tokens

END = 18
"""Measured: random tokens are learned by heart, so the loss on others rises from step 12 on."""


def config_of(directory: Path, name: str, *, save_every: int = 5, **early_stop: Any) -> FinetuneConfig:
    config = make_config(directory)  # writes the tokens to train on
    if not (directory / "others.jsonl").exists():
        write_tokens(directory / "others.jsonl", rows=20, seed=1)
    data = config.model_dump()["data"] | {
        "eval": [{"path": str(directory / "others.jsonl"), "format": {"type": "tokens"}}]
    }
    return make_config(
        directory, run={"name": name}, data=data, optim={"lr": 2e-2},
        checkpoint={"every": save_every, "keep_last": None, "asynchronous": False},
        eval={"every": 2, "early_stop": {"metric": "eval/others/loss", "patience": 3, **early_stop}},
    )  # fmt: skip


def events(config: FinetuneConfig) -> list[dict[str, Any]]:
    found = read_events(Path(config.run.storage) / config.run.name / "events.jsonl")
    return [event["fields"] for event in found if event["event"] == "stopped_early"]


def test_a_run_ends_early_is_complete_then_and_goes_on_with_more_patience(tmp_path: Path) -> None:
    config = config_of(tmp_path, "run")
    result = finetune(config)
    run = Path(config.run.storage) / "run"
    measured = result.evaluations
    assert measured == read_evaluations(run / "metrics.jsonl", 50) and result.card is None
    assert [line["trajectory"]["step"] for line in result.metrics] == [*range(1, END + 1)]
    assert result.events[0]["event"] == "attempt_started" and result.load()[0].config.model_type
    losses = {step: values["eval/others/loss"] for step, values in measured.items()}
    best = min(losses, key=lambda step: losses[step])
    assert (result.steps, result.trained, result.ended_early) == (END, END, True)
    assert max(losses) == END == best + 6, losses
    assert [found.step for found in checkpoints(run)] == [5, 10, 15, END]
    assert events(config) == [
        {"step": END, "metric": "eval/others/loss", "best": losses[best], "best_step": best}
    ]  # fmt: skip
    again = finetune(config)
    assert (again.steps, again.trained, again.ended_early) == (END, 0, True)
    assert sum(event["event"] == "attempt_started" for event in read_events(run / "events.jsonl")) == 1
    more = config_of(tmp_path, "run", patience=4)
    assert finetune(more).trained == 2, "one evaluation more"
    patient = config_of(tmp_path, "patient", patience=4)
    assert trajectory(patient, 1) == trajectory(more, 1), "as if it had been patient from the beginning"


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_at_the_same_step_on_any_number_of_ranks(tmp_path: Path, world: int) -> None:
    """Where a checkpoint is due at that step anyway."""
    rows = trajectory(config_of(tmp_path, "run", save_every=6), world)
    assert len(rows) == END and [found.step for found in checkpoints(tmp_path / "runs" / "run")] == [6, 12, END]


@pytest.mark.slow
@pytest.mark.parametrize("stop_after", [7, 16, END])
def test_a_stop_changes_nothing(tmp_path: Path, stop_after: int) -> None:
    """Also one that comes before the evaluation that ends the run: the next attempt makes it up."""
    whole = trajectory(config_of(tmp_path, "whole"), 1)
    config = config_of(tmp_path, "stopped")
    assert len(trajectory(config, 1, stop_after=stop_after)) == stop_after
    assert trajectory(config, 1) == whole
    assert len(events(config)) == 1


def test_a_crash_between_the_last_evaluation_and_the_checkpoint_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, "run")
    with monkeypatch.context() as patch:
        patch.setattr("raytune_fsdp.run.loop._saved", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            finetune(config)
    assert checkpoints(tmp_path / "runs" / "run")[-1].step == 15
    assert finetune(config).steps == END
