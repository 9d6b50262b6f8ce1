"""What a person can do next with a finished run."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytune_fsdp.record import names
from raytune_fsdp.record.console import event_in_words
from raytune_fsdp.record.report.summary import next_commands, summary
from tests.recorded import Recorded


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("sqlite:////runs/mlflow.db", "mlflow ui --backend-store-uri sqlite:////runs/mlflow.db"),
        ("sqlite:////my runs/mlflow.db", "mlflow ui --backend-store-uri 'sqlite:////my runs/mlflow.db'"),
        ("http://mlflow.internal:5000", "  http://mlflow.internal:5000   (MLflow)"),
        ("https://alice:hunter2@mlflow.internal/x", "  https://mlflow.internal/x   (MLflow)"),
        ("databricks://profile", "  databricks://profile   (MLflow)"),
        (
            "postgresql://alice:hunter2@db/mlflow",
            "mlflow ui --backend-store-uri postgresql://db/mlflow   (with the database's user and password)",
        ),
    ],
)
def test_a_tracking_server_is_a_page_and_a_database_a_command(uri: str, shown: str) -> None:
    text = next_commands(Path("/runs/x"), export=None, mlflow_uri=uri)
    (line,) = [line for line in text.splitlines() if "mlflow" in line.lower()] or [shown]
    assert line.endswith(shown) and "hunter2" not in text and text.count("--backend-store-uri") == shown.count("--back")


def test_a_run_is_summed_up(tmp_path: Path) -> None:
    run = Recorded(tmp_path)
    run.attempt()
    for number, loss in ((1, 3.0), (24, 1.0), (75, 2.0)):
        run.train(number)
        run.tracker.evaluation(run.step, {"eval/a/loss": loss, "eval/a/accuracy": 1 / loss, "eval/b/loss": -run.step})
    run.tracker.event("answered", step=100, prompt="Who's there?", answer="\x1b[2J")
    text = summary(run.path, checkpoint="s3://bucket/step-100", export=tmp_path / "export", curve=None)
    assert text.splitlines()[:4] == [
        "loss 5.0000 -> 0.5000 in 100 steps",
        "eval/a/loss 3.0000 -> 2.0000 (perplexity 20.09 -> 7.389), best 1.0000 at step 25",
        "eval/a/accuracy 0.3333 -> 0.5000, best 1.0000 at step 25",
        "eval/b/loss -1.0000 -> -100.0000 (perplexity 0.3679 -> 3.72e-44)",
    ]
    lines = ("    step   100: ·[2J", f"run         {run.path}", "checkpoint  s3://bucket/step-100")
    for line in (*lines, "time        100.0% of 3m 20s trained steps that stayed"):
        assert line in text.splitlines()


def test_what_was_measured_once_has_not_changed(tmp_path: Path) -> None:
    run = Recorded(tmp_path)
    run.attempt()
    run.train(2)
    run.evaluate(a=2.0)
    text = summary(run.path, checkpoint="x", export=None, curve=None)
    assert text.splitlines()[1] == "eval/a/loss 2.0000 (perplexity 7.389)"


def test_one_of_a_thing_is_said_in_the_singular() -> None:
    assert event_in_words(names.ATTEMPT_STARTED, {"world_size": 1}) == "started on 1 worker"
    assert event_in_words(names.RESIZED, {"before": 21, "after": 1}) == "resized from 21 to 1 worker"
    assert event_in_words(names.WINDOWS_BUILT, {"windows": 11}) == "tokenized 11 windows of data"


def test_the_next_commands_ask_what_the_run_was_asked(tmp_path: Path) -> None:
    run = Recorded(tmp_path)
    run.attempt()
    text = next_commands(run.path, export=None, mlflow_uri=None)
    assert f'generate {run.path} "a question"' in text and f"export {run.path} my-model" in text
    run.tracker.event("answered", step=1, prompt=["a", "conversation"], answer="x")
    run.tracker.event("answered", step=1, prompt="Who's there?", answer="x")
    text = next_commands(run.path, export=tmp_path / "my export", mlflow_uri=None)
    assert f"generate '{tmp_path}/my export' 'Who'\"'\"'s there?'" in text and "my-model" not in text


def test_a_model_that_scores_is_measured_and_not_asked(tmp_path: Path) -> None:
    run = Recorded(tmp_path)
    run.attempt()
    (run.path / "model").mkdir(exist_ok=True)
    (run.path / "model" / "config.json").write_text('{"architectures": ["LlamaForSequenceClassification"]}')
    text = next_commands(run.path, export=tmp_path / "export", mlflow_uri=None)
    assert "eval" not in text and "generate" not in text, "there is nothing to measure it on"
    run.train(1)
    run.evaluate(a=2.0)
    text = next_commands(run.path, export=tmp_path / "export", mlflow_uri=None)
    assert f"eval {run.path}" in text and "generate" not in text
