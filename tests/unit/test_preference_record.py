"""What is recorded of pairs and judged answers: in the record, under names for trackers, for people."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from raytune_fsdp.config.sections.objectives import DpoObjective, KtoObjective
from raytune_fsdp.model.objective.figures import group_values
from raytune_fsdp.model.objective.judged import KINDS
from raytune_fsdp.record.console import ConsoleTracker, evaluation_in_words
from raytune_fsdp.record.lines import WHOLE_STEP, metrics_of, read_line, step_lines, to_bytes
from raytune_fsdp.record.names import higher_is_better, score, step_values, with_perplexity
from raytune_fsdp.record.report.charts import charts_of
from raytune_fsdp.record.report.history import read_history
from raytune_fsdp.record.report.summary import _losses
from tests.recorded import Recorded, step

PAIRS = (
    ("rewards/chosen", 0.5), ("rewards/rejected", -0.25), ("rewards/margins", 0.75), ("rewards/accuracies", 0.625),
    ("logps/chosen", -40.5), ("my code/rewards/margins", 1.5),
)  # fmt: skip
EVALUATED = {
    "eval/pairs/loss": 0.6, "eval/pairs/accuracy": 0.7, "eval/pairs/margins": 0.4, "eval/pairs/logps_chosen": -30.0,
    "eval/texts/loss": 2.0, "eval/texts/accuracy": 0.5,
}  # fmt: skip


def test_a_line_has_a_form_that_is_known_without_parsing_it() -> None:
    (line,) = step_lines([replace(step(3), preferences=PAIRS)], world_size=2, attempt=1)
    raw = to_bytes(line)
    assert WHOLE_STEP.fullmatch(raw), raw
    read = read_line(raw)
    assert read is not None and metrics_of(read).preferences == PAIRS
    found = step_values(read)
    assert found["train/rewards/accuracies"] == 0.625 and found["train/my code/rewards/margins"] == 1.5
    (without,) = step_lines([step(3)], world_size=2, attempt=1)
    assert "preferences" not in without and not any("rewards" in key for key in step_values(without))
    damaged = json.loads(raw) | {"preferences": [["a"], ["b", "c"], 3, ["rewards/chosen", 1], {"x": 1}]}
    assert metrics_of(damaged).preferences == (("rewards/chosen", 1.0),)


def test_the_console_says_how_many_pairs_are_right() -> None:
    stream = io.StringIO()
    ConsoleTracker(stream).steps([replace(step(1), preferences=PAIRS)], 1, 1)
    assert "right  62.5%  margin   0.750" in stream.getvalue()
    stream = io.StringIO()
    ConsoleTracker(stream).steps([step(1)], 1, 1)
    assert "right" not in stream.getvalue() and "margin" not in stream.getvalue()


def test_a_loss_of_pairs_has_no_perplexity() -> None:
    assert with_perplexity(EVALUATED).keys() - EVALUATED.keys() == {"eval/texts/perplexity"}
    assert evaluation_in_words(EVALUATED).count("perplexity") == 1
    assert score(EVALUATED, None) == pytest.approx(1.3) and score(EVALUATED, "eval/pairs/margins") == 0.4
    assert all(map(higher_is_better, ("eval/pairs/margins", "eval/pairs/accuracy", "eval/pairs/rewards_chosen")))
    assert not any(map(higher_is_better, ("eval/pairs/loss", "eval/pairs/kl", "eval/pairs/rewards_rejected")))


def test_the_report_draws_pairs_apart_from_tokens(tmp_path: Path) -> None:
    run = Recorded(tmp_path)
    run.attempt()
    for number, right in ((1, 0.5), (2, 0.75)):
        rows = [replace(step(number), preferences=(*PAIRS[:3], ("rewards/accuracies", right)))]
        run.tracker.steps(rows, world_size=1, attempt=1)
    run.tracker.evaluation(2, EVALUATED)
    run.end("finished")
    charts = {each["id"]: each for each in charts_of([read_history(run.path)])["charts"]}
    assert [each["name"] for each in charts["pairs"]["series"]] == ["train", "eval pairs"]
    assert charts["pairs"]["series"][0]["mid"] == [50.0, 75.0] and charts["pairs"]["series"][1]["points"][0][2] == 70.0
    assert [each["name"] for each in charts["rewards"]["series"]] == ["chosen", "rejected", "margin", "eval pairs"]
    assert [each["name"] for each in charts["accuracy"]["series"]] == ["eval texts"] and "kl" not in charts
    assert "right pairs 50.0% -> 75.0%, margin of their rewards 0.750 -> 0.750" in [*_losses(run.path)]


def test_sums_become_means() -> None:
    sums = dict.fromkeys(KINDS, 0.0) | {
        "groups": 4.0, "losses": 2.0, "terms": 30.0, "tokens": 10.0, "chosen": 4.0, "rejected": 4.0,
        "chosen_rewards": 6.0, "rejected_rewards": 2.0, "right": 3.0, "chosen_logps": -8.0, "rejected_logps": -12.0,
    }  # fmt: skip
    dpo = DpoObjective.model_validate({"type": "dpo", "sft": {"weight": 0.5}})
    assert group_values(list(sums.values()), dpo) == {
        "loss": 2.0, "nll_loss": 3.0, "rewards/chosen": 1.5, "rewards/rejected": 0.5, "rewards/margins": 1.0,
        "rewards/accuracies": 0.75, "logps/chosen": -2.0, "logps/rejected": -3.0,
    }  # fmt: skip
    judged = sums | {"chosen": 4.0, "rejected": 0.0, "kl": -1.0, "terms": 0.0, "tokens": 0.0}
    assert group_values(list(judged.values()), KtoObjective(type="kto")) == {
        "loss": 0.5, "rewards/chosen": 1.5, "kl": 0.0, "logps/chosen": -2.0,
    }  # fmt: skip
