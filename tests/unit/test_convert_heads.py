"""Files of other trainers for reward models and distillation: which head, which teacher, and what is not here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.cli.main import main
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.convert.file import Converted, convert
from tests.unit.test_convert import LEAST, write
from tests.unit.test_convert_preferences import DATASETS, LORA, TRL_LORA, field

PAIRS = [{"path": "org/pairs", "type": "bradley_terry.chat_template"}]
TAUGHT = [
    {
        "path": "org/rows",
        "type": "axolotl.integrations.kd.chat_template",
        "logprobs_field": "llm_logprobs",
        "temperature": 1.0,
    }
]
BASE = {"base_model": "org/model", "learning_rate": 1e-5}
FILES: dict[str, dict[str, Any]] = {
    "trl-reward": {key: LEAST["trl-reward"][key] for key in ("model_name_or_path", "dataset_name")},
    "trl-gkd": LEAST["trl-gkd"],
    "axolotl-reward": {
        **BASE,
        "datasets": PAIRS,
        "reward_model": True,
        "model_type": "AutoModelForSequenceClassification",
        "num_labels": 1,
    },
    "axolotl-kd": {
        **BASE,
        "datasets": TAUGHT,
        "plugins": ["axolotl.integrations.kd.KDPlugin"],
        "kd_trainer": True,
    },
    "llama-factory-rm": {
        "model_name_or_path": "org/model",
        "finetuning_type": "full",
        "stage": "rm",
        "dataset": "turns",
    },
}


def converted(
    tmp_path: Path, kind: str, options: dict[str, Any], drop: tuple[str, ...] = (), teacher: str | None = None
) -> Converted:
    (tmp_path / "data").mkdir(exist_ok=True)
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(DATASETS))
    project = kind if kind.startswith("trl") else kind.rpartition("-")[0]
    content = {key: value for key, value in {**FILES[kind], **options}.items() if value is not None}
    return convert(write(tmp_path, content), project=project, gpus=2, drop=drop, teacher=teacher)


def said(found: Converted, key: str) -> str:
    return next(f"{line.said.fate}: {line.said.text}" for line in found.lines if line.key == key)


OBJECTIVES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("trl-reward", {}, {"type": "reward"}),
    ("trl-reward", {"center_rewards_coefficient": 0.01}, {"type": "reward", "center": 0.01}),
    ("axolotl-reward", {}, {"type": "reward"}),
    ("axolotl-reward", {"center_rewards_coefficient": 0.02}, {"type": "reward", "center": 0.02}),
    ("llama-factory-rm", {}, {"type": "reward"}),
    ("trl-gkd", {}, {"type": "distill"}),
    ("trl-gkd", {"beta": 1}, {"type": "distill", "forward": 0.0, "reverse": 1.0}),
    ("axolotl-kd", {}, {"type": "distill"}),
    (
        "axolotl-kd",
        {"kd_alpha": 0.9, "kd_ce_alpha": 0.1},
        {"type": "distill", "forward": 0.9, "cross_entropy": 0.1},
    ),
    (
        "axolotl-kd",
        {"kd_alpha": 0.5, "kd_beta": 1.0},
        {"type": "distill", "forward": 0.0, "reverse": 0.5},
    ),
]


@pytest.mark.parametrize(
    ("kind", "options", "objective"), OBJECTIVES, ids=[f"{k}-{json.dumps(o)[1:-1]}" for k, o, _ in OBJECTIVES]
)
def test_objectives(
    kind: str, options: dict[str, Any], objective: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = converted(tmp_path, kind, options, teacher="org/teacher" if kind == "axolotl-kd" else None)
    assert found.problems == []
    assert field(found, "train.objective") == objective
    assert found.tree["model"].get("head") == (None if objective["type"] == "distill" else {"type": "score"})
    assert found.tree.get("teacher", {}).get("model") == ("org/teacher" if objective["type"] == "distill" else None)
    FinetuneConfig.model_validate(found.tree)


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("trl-reward", {"eos_token": "</s>"}, "eos_token", "the tokenizer's own end token"),
    ("trl-reward", {"lora_task_type": "TOKEN_CLS"}, "lora_task_type", "a head that scores"),
    ("trl-gkd", {"lmbda": 0.5}, "lmbda", "not of answers that it writes itself while it trains: write lmbda: 0.0"),
    ("trl-gkd", {"lmbda": None}, "lmbda", "0.5 by default, half of the steps"),
    ("trl-gkd", {"beta": 0.3}, "beta", "train.objective.forward and reverse): write 0 or 1"),
    ("trl-gkd", {"beta": None}, "beta", "0.5 by default"),
    ("trl-gkd", {"seq_kd": True}, "seq_kd", "write them beforehand with `raytune-fsdp generate`"),
    (
        "trl-gkd",
        {"teacher_model_init_kwargs": {"revision": "v2"}},
        "teacher_model_init_kwargs.revision",
        "name a directory as the teacher",
    ),
    ("trl-gkd", {"max_completion_length": 64}, "max_completion_length", "options of `trl distillation`"),
    ("axolotl-reward", {"num_labels": 2}, "num_labels", "a reward is one number: write 1"),
    ("axolotl-reward", {"rl": "dpo"}, "rl", "drop one of the two"),
    ("axolotl-reward", {"reward_model": None, "rl": "dpo"}, "model_type", "for classes and scores see model.head"),
    ("axolotl-reward", {"process_reward_model": True}, "process_reward_model", "single steps of an answer"),
    ("axolotl-kd", {"kd_beta": 0.5}, "kd_beta", "write 0 or 1"),
    ("axolotl-kd", {"kd_normalize_topk": True}, "kd_normalize_topk", "of all other tokens their sum counts"),
    ("axolotl-kd", {"kd_temperature": 2.0, "kd_temperature_min": 1.0}, "kd_temperature_min", "stays as it is"),
    ("axolotl-kd", {"kd_zscore_base_temp": 1.0}, "kd_zscore_base_temp", "not standardised"),
    ("axolotl-kd", {"rl": "dpo"}, "kd_trainer", "a step has one objective"),
    ("llama-factory-rm", {"dataset": "judged"}, "dataset", "`ranking` is for stages dpo and rm"),
]


@pytest.mark.parametrize(
    ("kind", "options", "key", "why"), REFUSED, ids=[f"{k}-{json.dumps(o)[1:-1]}"[:60] for k, o, _, _ in REFUSED]
)
def test_what_is_not_here_gets_a_line_and_a_way_out(
    kind: str, options: dict[str, Any], key: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    teacher = "org/teacher" if kind == "axolotl-kd" else None
    problems = converted(tmp_path, kind, options, teacher=teacher).problems
    (problem,) = (each for each in problems if each.startswith((f"{key}=", f"{key}:")))
    assert why in problem
    if f"--drop {key} " in problem and key not in ("rl", "model_type", "kd_trainer"):
        assert converted(tmp_path, kind, options, drop=(key,), teacher=teacher).problems == []


def test_what_a_teacher_said_is_computed_by_the_model_that_the_command_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """axolotl's rows have log-probabilities, or a server is asked: neither names a model."""
    monkeypatch.chdir(tmp_path)
    server = {"kd_online_server_base_url": "http://host:8000", "kd_online_topk": 32, "kd_temperature": 2.0}
    without = converted(tmp_path, "axolotl-kd", server)
    for key in ("kd_trainer", "datasets.0.logprobs_field", "kd_online_server_base_url"):
        (problem,) = (each for each in without.problems if each.startswith(f"{key}="))
        assert "name its model with --teacher" in problem and problem.endswith("--drop kd_trainer converts without it")
    found = converted(tmp_path, "axolotl-kd", server, teacher="org/big")
    assert found.problems == []
    assert field(found, "teacher") == {"model": "org/big", "top_k": 32, "temperature": 2.0}
    assert field(found, "data.train.0.format") == {"type": "chat"}
    supervised = converted(tmp_path, "axolotl-kd", server, drop=("kd_trainer",))
    assert supervised.problems == [] and "teacher" not in supervised.tree
    assert "objective" not in supervised.tree["train"]

    own = converted(tmp_path, "trl-gkd", {"teacher_model_name_or_path": None})
    assert own.problems == [
        "teacher_model_name_or_path is not set: name the model to learn from in the file, or with --teacher"
    ]
    named = converted(tmp_path, "trl-gkd", {"teacher_model_name_or_path": None}, teacher="org/big")
    assert field(named, "teacher.model") == "org/big"
    (problem,) = converted(tmp_path, "trl-gkd", {}, teacher="org/big").problems
    assert problem == "--teacher org/big: the file names org/teacher as teacher: leave one out"
    file = write(tmp_path, LEAST["trl"])
    assert main(["convert", file, "--gpus", "1", "--teacher", "org/big"]) == 2
    assert "--teacher org/big: the file learns from no teacher" in capsys.readouterr().err


def test_rewards_read_pairs_whole_and_their_head_is_trained_beside_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    theirs = converted(tmp_path, "trl-reward", {**TRL_LORA, "lora_modules_to_save": ["score"], "max_length": 600})
    assert theirs.problems == [] and "modules_to_save" not in theirs.tree["method"]
    assert said(theirs, "lora_modules_to_save").startswith("same: the head is trained whole")
    assert field(theirs, "data.long_documents") == "drop" and field(theirs, "data.seq_len") == 1200
    assert field(theirs, "method.dropout") == 0.0
    assert "format.margin=margin" in said(theirs, "data.train.*.format.margin")
    both = converted(tmp_path, "trl-reward", {**TRL_LORA, "lora_modules_to_save": ["score", "embed_tokens"]})
    assert field(both, "method.modules_to_save") == ["embed_tokens"]
    unnamed = converted(tmp_path, "trl-reward", TRL_LORA)
    assert "there only if lora_modules_to_save names it" in said(unnamed, "model.head")
    padded = converted(tmp_path, "trl-reward", {"pad_token": "<pad>"})
    assert field(padded, "model.head") == {"type": "score", "pad_token": "<pad>"}

    axolotl = converted(tmp_path, "axolotl-reward", {**LORA, "lora_dropout": 0.05})
    assert axolotl.problems == [] and field(axolotl, "method.dropout") == 0.0
    assert field(axolotl, "data.train.0.format") == {"type": "preference", "prompt": "input", "system": "system"}
    other = converted(tmp_path, "axolotl-reward", {"datasets": [{"path": "a.jsonl", "type": "chatml.intel"}]})
    assert "bradley_terry.chat_template is here" in other.problems[0]

    stage = converted(tmp_path, "llama-factory-rm", {"finetuning_type": "lora", "lora_dropout": 0.05})
    assert stage.problems == [] and field(stage, "method.dropout") == 0.05
    assert field(stage, "data.train.0.format.type") == "preference" and field(stage, "data.seq_len") == 4096


def test_the_command_of_trl_is_guessed(tmp_path: Path) -> None:
    for kind, key in (("trl-reward", {"center_rewards_coefficient": 0.01}), ("trl-gkd", {})):
        found = convert(write(tmp_path, {**FILES[kind], **key}), gpus=1)
        assert (found.project.name, found.problems) == (kind, [])
