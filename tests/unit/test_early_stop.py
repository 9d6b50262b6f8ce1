"""Which evaluation ends a run."""

from __future__ import annotations

import math
from typing import Any

import pytest

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config import CheckpointConfig
from raytune_fsdp.config.sections.eval import EarlyStopConfig
from raytune_fsdp.record.names import higher_is_better, score
from raytune_fsdp.run.checks import check_early_stop
from raytune_fsdp.run.evaluation.early_stop import EarlyStop, ended_by
from raytune_fsdp.run.saving import keep_of
from tests.runs import make_config

LOSS, RIGHT = "eval/a/loss", "eval/a/accuracy"


def end_of(values: list[float], metric: str | None = LOSS, **rule: Any) -> int | None:
    """The step of the evaluation that ends a run; they come every 10 steps."""
    name = metric or LOSS
    stop = EarlyStop(EarlyStopConfig(metric=metric, **rule))
    ends = [step for step, value in enumerate(values) if stop.add(10 * step, {name: value})]
    return 10 * ends[0] if ends else None


@pytest.mark.parametrize(
    ("values", "rule", "end"),
    [
        ([3, 2, 1, 2, 2], {"patience": 2}, 40),
        ([3, 2, 1, 2, 0.5, 2, 2], {"patience": 2}, 60),
        ([3, 2, 1, 2], {"patience": 2}, None),
        ([3], {"patience": 1}, None),
        ([3, 2.95, 2.9, 2.85], {"patience": 3, "min_delta": 0.1}, None),  # together they are better by more
        ([3, 2.95, 2.92, 2.91], {"patience": 3, "min_delta": 0.1}, 30),
        ([3, 3 - 1e-7, 3 - 2e-7], {"patience": 2}, 20),  # rounding
        ([math.nan, math.nan], {"patience": 1}, 10),
        ([math.nan, 3, 2], {"patience": 1}, None),
        ([3, math.nan, 2], {"patience": 1}, 10),
        ([0.1, 0.3, 0.2, 0.25], {"metric": RIGHT, "patience": 2}, 30),
        ([0.0, 0.1, 0.2], {"metric": RIGHT, "patience": 1}, None),
        ([3, 2, 2], {"metric": None, "patience": 1}, 20),
    ],
)
def test_the_evaluation_that_ends_a_run(values: list[float], rule: dict[str, Any], end: int | None) -> None:
    assert end_of(values, **rule) == end


def test_what_it_says_and_what_does_not_count() -> None:
    evaluations = {10: {LOSS: 2.0}, 20: {RIGHT: 0.5}, 30: {LOSS: 3.0}}
    ended = ended_by(EarlyStopConfig(metric=LOSS, patience=1), evaluations)
    assert ended == {"step": 30, "metric": LOSS, "best": 2.0, "best_step": 10}
    assert ended_by(EarlyStopConfig(metric=LOSS, patience=2), evaluations) is None, "that of step 20 lacks the metric"
    assert ended_by(None, evaluations) is None


def test_items_end_with_the_run() -> None:
    stop = EarlyStop(EarlyStopConfig(metric=LOSS, patience=1))
    seen = []
    for step in stop.until(iter(range(1, 10))):
        seen.append(step)
        stop.add(step, {LOSS: [5, 4, 3, 4][step - 1]})
    assert seen == [1, 2, 3, 4]
    assert not [*stop.until(iter(range(9)))]


def test_higher_is_better_for_shares_of_what_is_right() -> None:
    high = ["eval/a/accuracy", "eval/a/b/accuracy", "eval/a/accuracy_normalised", "eval/a/exact_match"]
    assert all(map(higher_is_better, high))
    assert not any(map(higher_is_better, ["eval/a/loss", "eval/accuracy/loss", "eval/a/perplexity", None]))
    assert score({LOSS: 1.0, "eval/b/loss": 3.0, RIGHT: 0.5}, None) == 2.0


@pytest.mark.parametrize(
    ("sections", "metrics", "message"),
    [
        ({"eval": {"every": 5}}, None, "nothing is evaluated"),
        ({"data": {"eval": {"rows": 5}}}, None, "eval.every is not"),
        (
            {"data": {"eval": {"rows": 5}}, "eval": {"every": 5}},
            ["eval/b/loss"],
            f"{LOSS} is not a metric.*eval/b/loss",
        ),
    ],
)
def test_what_cannot_end_a_run_is_refused(
    tmp_path: Any, sections: dict[str, Any], metrics: list[str] | None, message: str
) -> None:
    evaluated = {**sections.get("eval", {}), "early_stop": {"metric": LOSS}}
    data = {"data": {**make_config(tmp_path).model_dump()["data"], **sections.get("data", {})}}
    with pytest.raises(ConfigError, match=message):
        check_early_stop(make_config(tmp_path, eval=evaluated, **data), metrics)


@pytest.mark.parametrize(
    ("best", "best_is", "lowest"),
    [
        (None, "auto", True), (LOSS, "auto", True), (RIGHT, "auto", False), ("eval/a/exact_match", "auto", False),
        (RIGHT, "lowest", True), (LOSS, "highest", False),
    ],
)  # fmt: skip
def test_the_best_checkpoints_by_the_name_of_their_metric(best: str | None, best_is: Any, lowest: bool) -> None:
    assert keep_of(CheckpointConfig(keep_best=1, best=best, best_is=best_is)).lower_is_better is lowest
