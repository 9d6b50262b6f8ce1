"""What `raytune-fsdp eval` measures on; that it measures what training did: tests/distributed/test_launch.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raytune_fsdp.cli.main import main
from tests.config_text import dump_config
from tests.models import save_checkpoint
from tests.runs import make_config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the model comes first: raytune-fsdp eval MODEL"),
        (["--data.eval.0.path", "rows.jsonl", "model"], "the model comes first"),
        (["model"], "model belongs to no run: name the data with --config FILE"),
        (["model", "--config", "config.yaml"], "data.eval names no dataset: set data.eval.0.path"),
        (["model", "--config", "config.yaml", "--data.seq_len", "4096"], "data.eval names no dataset"),
        (
            ["model", "--config", "config.yaml", "--data.eval.0.path", "tokens.jsonl", "--data.seq_len", "4096"],
            "data.seq_len=4096 is more than the model's 128 positions",
        ),
        (
            ["model", "--config", "config.yaml", "--data.eval.0.path", "tokens.jsonl", "--cluster.device", "cuda"],
            "cluster.device=cuda, but this machine has no GPU that torch can use: set cluster.device=cpu",
        ),
        (["nowhere", "--config", "config.yaml", "--data.eval.0.path", "tokens.jsonl"], "there is no such directory"),
    ],
)
def test_what_is_missing_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    save_checkpoint(tmp_path / "model", "llama", tokenizer=True, vocab_size=1024)
    (tmp_path / "config.yaml").write_text(dump_config(make_config(tmp_path)))  # beside it, and not of its run
    capsys.readouterr()
    assert main(["eval", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1] and error.count("error: ") == 1


@pytest.mark.parametrize("section", ["train", "eval"])
def test_code_that_the_config_of_a_run_names_is_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], section: str
) -> None:
    """A stranger's run directory: its rows would be given to a function of any module."""
    run = tmp_path / "run"
    run.mkdir()
    rows = {"name": "rows", "path": str(tmp_path / "rows.jsonl"), "format": {"type": "python", "function": "os:system"}}
    plain = {"name": "rows", "path": str(tmp_path / "rows.jsonl")}
    data = {"train": [plain], "eval": [rows]} if section == "eval" else {"train": [rows], "eval": {"fraction": 0.5}}
    (run / "config.yaml").write_text(dump_config(make_config(tmp_path, data=data)))
    (run / "events.jsonl").touch()
    assert main(["eval", str(run)]) == 2
    assert "(os:system): look at it, then add --trust-remote-code" in capsys.readouterr().err
    assert main(["eval", str(run), "--trust-remote-code"]) == 2
    assert "os:system" not in capsys.readouterr().err  # it is the model that is missing now


def test_any_model_with_the_template_of_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path / "model", "llama", tokenizer=True, vocab_size=1024)
    described = tmp_path / "model" / "config.json"  # as some are published, and transformers refuses them on a CPU
    described.write_text(json.dumps(json.loads(described.read_text()) | {"attn_implementation": "flash_attention_2"}))
    (tmp_path / "config.yaml").write_text(dump_config(make_config(tmp_path)))
    (tmp_path / "rows.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ada."}]}\n'
    )
    command = ["eval", "model", "--config", "config.yaml", "--data.eval.0.path", "rows.jsonl"]
    found = []
    for template in ([], ["--data.chat_template", "chatml"]):
        assert main([*command, "--data.eval.0.format.type", "chat", *template]) == 0
        found.append(capsys.readouterr().out.splitlines())
    assert [line.split()[0] for line in found[0]] == [
        "eval/rows/loss", "eval/rows/perplexity", "eval/rows/accuracy",
    ]  # fmt: skip
    assert found[0] != found[1]


def test_the_data_is_checked_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The row that is wrong is the last one, and the model has no weights: nobody waits for them to hear of it."""
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path / "model", "llama", tokenizer=True, vocab_size=1024)
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "config.yaml").write_text(dump_config(make_config(tmp_path)))
    good = '{"text": "Ada was born in London."}\n'
    (tmp_path / "rows.jsonl").write_text(good * 40 + '{"text": 5}\n')
    command = ["eval", "model", "--config", "config.yaml", "--data.eval.0.path", "rows.jsonl"]
    command += ["--data.eval.0.format.type", "completion"]
    assert main(command) == 2
    assert "rows.jsonl:41" in capsys.readouterr().err
    question = '{"question": "Who?", "choices": ["Ada", "Bob"], "answer": "C"}\n'
    (tmp_path / "mmlu.jsonl").write_text(question)
    asks = ["--eval.tasks.0.type", "choices", "--eval.tasks.0.path", "mmlu.jsonl"]
    assert main(["eval", "model", "--config", "config.yaml", *asks]) == 2
    assert "mmlu.jsonl:1: the answer 'C' is none of the 2 choices" in capsys.readouterr().err
    (tmp_path / "rows.jsonl").write_text(good)
    assert main(command) == 2
    assert "rows.jsonl" not in (error := capsys.readouterr().err) and "model" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "0"], "--workers 0 must be at least 1"),
        (["--workers", "2", "--cluster.device", "cuda"], "cluster.device=cuda, but this machine has no GPU"),
        (["--lm-eval-chat"], "--lm-eval-chat goes with --lm-eval: name the tasks"),
    ],
)
def test_mistakes_with_flags(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "config.yaml").write_text(dump_config(make_config(tmp_path)))
    command = ["eval", "model", "--config", "config.yaml", "--data.eval.0.path", "tokens.jsonl"]
    assert main([*command, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_json_has_what_the_text_has_and_null_for_what_is_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(dump_config(make_config(tmp_path)))
    measured = {"eval/rows/loss": 800.0, "eval/rows/accuracy": 0.5, "eval/other/loss": float("nan")}
    monkeypatch.setattr("raytune_fsdp.cli.eval._measure", lambda *_, **__: (measured, []))
    command = ["eval", "model", "--config", "config.yaml", "--data.eval.0.path", "tokens.jsonl"]
    assert main(command) == 0
    keys = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [*found] == keys
    assert found == {
        "eval/rows/loss": 800.0, "eval/rows/perplexity": None, "eval/rows/accuracy": 0.5,
        "eval/other/loss": None, "eval/other/perplexity": None,
    }  # fmt: skip


def test_packed_documents_are_measured_as_if_alone_also_where_transformers_lets_them_see_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path / "model", "gpt_oss", tokenizer=True, vocab_size=1024)
    (tmp_path / "config.yaml").write_text(dump_config(make_config(tmp_path)))
    capsys.readouterr()
    found = {}
    for packing in ("best_fit", "none"):
        arguments = ["--config", "config.yaml", "--data.eval.0.path", "tokens.jsonl", "--data.packing", packing]
        assert main(["eval", "model", "--json", *arguments, "--data.eval.0.format.type", "tokens"]) == 0
        found[packing] = json.loads(capsys.readouterr().out)["eval/tokens/loss"]
    assert found["best_fit"] == pytest.approx(found["none"], rel=1e-5)


def test_what_documents_beside_each_other_change_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    save_checkpoint(tmp_path / "model", "llama", tokenizer=True, vocab_size=1024, rope_parameters=rope)
    (tmp_path / "config.yaml").write_text(dump_config(make_config(tmp_path)))
    arguments = ["--config", "config.yaml", "--data.eval.0.path", "tokens.jsonl", "--data.eval.0.format.type", "tokens"]
    assert main(["eval", "model", "--json", *arguments]) == 0
    assert "the loss of a document would depend on its neighbours; set data.seq_len=32" in caplog.text
    caplog.clear()
    alone = ["--data.packing", "none", "--train.micro_batch", "1"]
    assert main(["eval", "model", "--json", *arguments, *alone]) == 0
    assert "neighbours" not in caplog.text


def test_questions_and_prompts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path / "model", "llama", tokenizer=True, vocab_size=1024)
    (tmp_path / "config.yaml").write_text(dump_config(make_config(tmp_path)))
    (tmp_path / "mmlu.jsonl").write_text('{"question": "Who?", "choices": ["Ada", "Bob"], "answer": "A"}\n')
    (tmp_path / "sums.jsonl").write_text('{"question": "How many?", "answer": "4"}\n')
    prompt = [{"messages": [{"role": "user", "content": "Who?"}]}]
    command = [
        "eval", "model", "--config", "config.yaml", "--eval.prompts", json.dumps(prompt), "--eval.max_new_tokens", "3",
        "--eval.tasks.0.type", "choices", "--eval.tasks.0.path", "mmlu.jsonl",
        "--eval.tasks.1.type", "exact", "--eval.tasks.1.path", "sums.jsonl", "--eval.tasks.1.max_new_tokens", "3",
    ]  # fmt: skip
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"eval/mmlu/accuracy", "eval/mmlu/accuracy_normalised", "eval/sums/exact_match"}
    assert main(command) == 0
    assert "asked: Who?\n     answered: " in capsys.readouterr().out
