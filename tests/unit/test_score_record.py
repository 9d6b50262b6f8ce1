"""What is shown of classes and scores: on a terminal, on the model card, on the page about a run."""

from __future__ import annotations

from pathlib import Path

from raytune_fsdp.record.console import evaluation_in_words
from raytune_fsdp.record.names import higher_is_better, measured_of, of_calibration, with_perplexity
from raytune_fsdp.record.report.charts import charts_of
from raytune_fsdp.record.report.facts import evaluations, reliability
from raytune_fsdp.record.report.history import read_history
from raytune_fsdp.record.report.page import page
from raytune_fsdp.record.report.summary import _losses
from tests.recorded import Recorded, step

POINTS = {
    "eval/a/b/calibration/60/confidence": 0.62, "eval/a/b/calibration/60/right": 0.5,
    "eval/a/b/calibration/90/confidence": 0.97, "eval/a/b/calibration/90/right": 0.9,
}  # fmt: skip
EVALUATED = {
    "eval/a/b/loss": 0.4, "eval/a/b/accuracy": 0.8, "eval/a/b/f1": 0.7, "eval/a/b/auc": 0.9,
    "eval/a/b/calibration_error": 0.1, **POINTS, "eval/numbers/loss": 2.0, "eval/numbers/mae": 1.0,
    "eval/numbers/score": 0.2,
    "eval/texts/loss": 2.0, "eval/texts/accuracy": 0.5,
}  # fmt: skip


def test_losses_of_scores_have_no_perplexity_and_points_of_a_curve_are_no_text() -> None:
    assert with_perplexity(EVALUATED).keys() - EVALUATED.keys() == {"eval/texts/perplexity"}
    words = evaluation_in_words(EVALUATED)
    assert "calibration/" not in words and words.count("perplexity") == 1
    assert [measured_of(f"eval/{name}/loss", EVALUATED) for name in ("a/b", "texts")] == ["scores", "tokens"]
    assert all(map(higher_is_better, ("eval/x/f1", "eval/x/auc", "eval/x/r2")))
    assert not any(map(higher_is_better, ("eval/x/mae", "eval/x/calibration_error")))
    assert of_calibration("eval/a/b/calibration/60/right") == ("a/b", "60", "right")
    assert of_calibration("eval/a/calibration/6/right") is None


def test_the_page_draws_how_far_confidence_is_to_be_trusted(tmp_path: Path) -> None:
    run = Recorded(tmp_path)
    run.attempt()
    run.tracker.steps([step(1), step(2)], world_size=1, attempt=1)
    run.tracker.evaluation(1, {**EVALUATED, "eval/a/b/calibration/30/confidence": 0.35, "eval/numbers/score": 0.5})
    run.tracker.evaluation(2, EVALUATED)
    run.end("finished")
    history = read_history(run.path)
    assert reliability(history) == {"a/b": [(0.62, 0.5), (0.97, 0.9)]}
    rows = {metric: best for metric, _, best, _ in evaluations(history)}
    assert not [metric for metric in rows if "/calibration/" in metric]
    assert rows["eval/numbers/score"] == "" and rows["eval/a/b/f1"] == "0.7000 (step 2)"
    assert [line for line in _losses(run.path) if "/score" in line] == ["eval/numbers/score 0.5000 -> 0.2000"]
    charts = {each["id"]: each for each in charts_of([history])["charts"]}
    assert [each["name"] for each in charts["classes"]["series"]] == ["eval a/b"] and "pairs" not in charts
    assert [each["name"] for each in charts["accuracy"]["series"]] == ["eval texts"]
    found = page([run.path])
    assert 'aria-label="reliability of a/b"' in found and "62.0% sure, 50.0% right" in found
