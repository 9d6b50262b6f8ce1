"""`eval --workers N`: as many ranks of this machine measure a model, and the values are the same to the last digit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raytune_fsdp.cli.main import main
from tests.config_text import dump_config
from tests.models import save_checkpoint
from tests.runs import make_config


@pytest.mark.slow
def test_several_ranks_measure_what_one_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path / "model", "llama", tokenizer=True, vocab_size=1024)
    (tmp_path / "config.yaml").write_text(dump_config(make_config(tmp_path, train={"micro_batch": 1})))
    (tmp_path / "sums.jsonl").write_text('{"question": "How many?", "answer": "4"}\n' * 3)
    choices = [{"question": f"Which {n}?", "choices": ["Ada", "Bob", "Cy"], "answer": n % 3} for n in range(5)]
    (tmp_path / "names.jsonl").write_text("".join(json.dumps(row) + "\n" for row in choices))
    command = [
        "eval", "model", "--config", "config.yaml", "--json",
        "--data.eval.0.path", "tokens.jsonl", "--data.eval.0.format.type", "tokens", "--data.eval.0.rows.limit", "31",
        "--eval.tasks.0.type", "choices", "--eval.tasks.0.path", "names.jsonl",
        "--eval.tasks.1.type", "exact", "--eval.tasks.1.path", "sums.jsonl", "--eval.tasks.1.max_new_tokens", "3",
    ]  # fmt: skip
    capsys.readouterr()
    found = []
    for workers in ("1", "2"):
        assert main([*command, "--workers", workers]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert found[0].keys() >= {"eval/tokens/loss", "eval/names/accuracy", "eval/sums/exact_match"}


@pytest.mark.slow
def test_what_a_rank_refuses_is_said_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path / "model", "llama", tokenizer=True, vocab_size=1024)
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "config.yaml").write_text(dump_config(make_config(tmp_path)))
    command = ["eval", "model", "--config", "config.yaml", "--data.eval.0.path", "tokens.jsonl", "--workers", "2"]
    capsys.readouterr()
    assert main([*command, "--data.eval.0.format.type", "tokens"]) == 2
    error = capsys.readouterr().err
    assert "model" in error.splitlines()[-1] and "Traceback" not in error
