"""`eval --lm-eval`: the values are those of lm-evaluation-harness alone, to the last digit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.cli.main import main
from tests.models import save_checkpoint

NAMES = ("colours", "prose")


def made(directory: Path) -> tuple[Path, Path]:
    """A small model and two tasks over files here: one of choices, one that measures texts as they are."""
    tasks = directory / "tasks"
    tasks.mkdir()
    rows = [
        {"question": f"Which is number {n}?", "choices": ["red", "dark green", "blue"], "answer": n % 3}
        for n in range(7)
    ]
    texts = [
        {"text": f"Number {n} comes after number {n - 1}, and before the next one." * (1 + n % 3)} for n in range(5)
    ]
    for name, lines in (("colours", rows), ("prose", texts)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    described = {
        "colours": {
            "output_type": "multiple_choice", "doc_to_choice": "choices",
            "doc_to_text": "Question: {{question}}\nAnswer:", "doc_to_target": "answer",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}, {"metric": "brier_score"}],
        },
        "prose": {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
    }  # fmt: skip
    for name, values in described.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(directory / f"{name}.jsonl")}}}
        whole = {"task": name, **data, "test_split": "test", **values}
        (tasks / f"{name}.yaml").write_text(json.dumps(whole))  # JSON is YAML
    return save_checkpoint(directory / "model", "llama", tokenizer=True, vocab_size=1024), tasks


def alone(model: Path, tasks: Path) -> dict[str, Any]:
    """What the tool measures when it loads the model itself."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    found = simple_evaluate(
        "hf", model_args=f"pretrained={model},dtype=auto", tasks=list(NAMES), device="cpu", batch_size=1,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
    )  # fmt: skip
    return {
        f"lm_eval/{task}/{metric}": value
        for task, values in found["results"].items()
        for metric, value in values.items()
        if isinstance(value, float) and value == value
    }


@pytest.mark.slow
def test_the_values_are_those_of_the_tool_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    model, tasks = made(tmp_path)
    command = ["eval", str(model), "--lm-eval", ",".join(NAMES), "--lm-eval-tasks", str(tasks), "--trust-remote-code"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == alone(model, tasks)
    assert {name.split("/")[1] for name in found} == set(NAMES) and len(found) >= 5
    capsys.readouterr()
    (tmp_path / "prose.jsonl").write_text("")
    (model / "model.safetensors").unlink()
    assert main(command) == 2, "the data of tasks is opened first"
    assert "--lm-eval colours,prose: cannot be opened" in capsys.readouterr().err


@pytest.mark.slow
def test_a_name_is_not_taken_for_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tool would load it, and run what its functions name."""
    pytest.importorskip("lm_eval")
    model, tasks = made(tmp_path)
    assert main(["eval", str(model), "--lm-eval", str(tasks / "prose.yaml")]) == 2
    assert "prose.yaml: no task, group or tag has this name" in capsys.readouterr().err
    assert main(["eval", str(model), "--lm-eval", "arc_esy"]) == 2
    assert "nearest: arc_easy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--lm-eval", "a", "--lm-eval-tasks", "tasks"],
            "tasks: such tasks can run code (functions, templates, metrics)",
        ),
        (["--lm-eval", "a", "--lm-eval-tasks", "nowhere"], "--lm-eval-tasks nowhere is not a directory"),
        (["--lm-eval", "a", "--config", "demo"], "in one process: leave --config out"),
        (["--lm-eval", "a", "--workers", "2"], "in one process: leave --workers out"),
        (["--lm-eval", "a", "--data.seq_len", "9"], "takes nothing from a config: leave --data.seq_len out"),
        (["--lm-eval", " ,"], "--lm-eval needs names of tasks"),
        (["--lm-eval", "a", "--lm-eval-batch", "0"], "--lm-eval-batch 0 must be at least 1"),
        (["--lm-eval=a", "--lm-eval-shots=-1"], "--lm-eval-shots -1 must be at least 0"),
    ],
)
def test_mistakes_with_its_flags(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks").mkdir()
    assert main(["eval", "model", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_where_the_tool_is_missing_the_way_to_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("raytune_fsdp.run.evaluation.harness.find_spec", lambda name: None)
    model = save_checkpoint(tmp_path / "model", "llama", tokenizer=True, vocab_size=1024)
    capsys.readouterr()
    assert main(["eval", str(model), "--lm-eval", "arc_easy"]) == 2
    assert "lm-evaluation-harness is not installed: pip install " in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "nowhere"), "--lm-eval", "arc_easy"]) == 2
    assert "there is no such directory" in capsys.readouterr().err
