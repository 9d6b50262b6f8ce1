"""Files of other trainers for preferences: which objective, which rows, and what no objective here is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.convert.file import Converted, convert
from tests.unit.test_convert import LEAST, write

AXOLOTL = {
    "base_model": "org/model",
    "datasets": [{"path": "pairs.jsonl", "type": "chat_template.default"}],
    "learning_rate": 1e-5,
}
DATASETS = {
    "pairs": {
        "file_name": "pairs.json",
        "ranking": True,
        "columns": {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"},
    },
    "turns": {
        "hf_hub_url": "org/turns",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "good", "rejected": "bad"},
    },
    "other": {
        "hf_hub_url": "org/other",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "m", "chosen": "c", "rejected": "r"},
        "tags": {"role_tag": "who", "content_tag": "what"},
    },
    "judged": {
        "hf_hub_url": "org/judged",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "kto_tag": "label"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "answers": {
        "file_name": "answers.json",
        "columns": {"prompt": "question", "response": "answer", "kto_tag": "good", "system": "system"},
    },
}
LORA = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True}
TRL_LORA = {"use_peft": True, "lora_target_modules": "all-linear", "lora_dropout": 0.05}


def converted(tmp_path: Path, project: str, options: dict[str, Any], drop: tuple[str, ...] = ()) -> Converted:
    if project == "llama-factory":
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(DATASETS))
        least: dict[str, Any] = {
            "model_name_or_path": "org/model",
            "finetuning_type": "full",
            "stage": "dpo",
            "dataset": "turns",
        }
    elif project == "axolotl":
        least = {**AXOLOTL, "rl": "dpo"}
    else:
        least = {key: LEAST[project][key] for key in ("model_name_or_path", "dataset_name")}
    return convert(write(tmp_path, {**least, **options}), project=project, gpus=2, drop=drop)


def field(found: Converted, name: str) -> Any:
    value: Any = found.tree
    for part in name.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


OBJECTIVES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("trl-dpo", {}, {"type": "dpo"}),
    ("trl-dpo", {"beta": 0.05, "loss_type": "hinge"}, {"type": "dpo", "loss": "hinge", "beta": 0.05}),
    ("trl-dpo", {"loss_type": ["ipo"], "beta": 0.3}, {"type": "ipo", "beta": 0.3}),
    ("trl-dpo", {"loss_type": "sigmoid_norm"}, {"type": "dpo", "normalize": "length"}),
    (
        "trl-dpo",
        {"loss_type": "robust", "label_smoothing": 0.1},
        {"type": "dpo", "loss": "robust", "label_smoothing": 0.1},
    ),
    # Without smoothing robust is sigmoid; and sigmoid has none in TRL 1.16.
    ("trl-dpo", {"loss_type": "robust"}, {"type": "dpo"}),
    ("trl-dpo", {"label_smoothing": 0.1}, {"type": "dpo"}),
    (
        "trl-dpo",
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1, 0.2]},
        {"type": "dpo", "sft": {"weight": 0.2}},
    ),
    ("trl-dpo", {"loss_type": ["sft", "ipo"]}, {"type": "ipo", "sft": {"weight": 1.0}}),
    ("trl-dpo", {"rpo_alpha": 0.5}, {"type": "dpo", "sft": {"weight": 0.5}}),
    (
        "trl-dpo",
        {"reference_free": True, "loss_type": "hinge"},
        {"type": "cpo", "loss": "hinge", "sft": {"weight": 0.0}},
    ),
    ("trl-kto", {"desirable_weight": 1.5, "beta": 0.2}, {"type": "kto", "beta": 0.2, "desirable_weight": 1.5}),
    ("trl-orpo", {"beta": 0.2}, {"type": "orpo", "beta": 0.2}),
    ("trl-cpo", {}, {"type": "cpo"}),
    (
        "trl-cpo",
        {"cpo_alpha": 0.5, "label_smoothing": 0.1},
        {"type": "cpo", "sft": {"weight": 0.5}, "label_smoothing": 0.1},
    ),
    # SimPO's margin is after scaling by beta, in TRL as here; its cross-entropy has weight 1 unless the file says 0.
    ("trl-cpo", {"loss_type": "simpo"}, {"type": "simpo", "beta": 0.1, "gamma": 0.5, "sft": {"weight": 1.0}}),
    (
        "trl-cpo",
        {"loss_type": "simpo", "beta": 2.5, "simpo_gamma": 1.4, "cpo_alpha": 0.0},
        {"type": "simpo", "beta": 2.5, "gamma": 1.4, "sft": {"weight": 0.0}},
    ),
    ("axolotl", {"rl_beta": 0.2}, {"type": "dpo", "beta": 0.2}),
    ("axolotl", {"dpo_label_smoothing": 0.1}, {"type": "dpo", "label_smoothing": 0.1}),
    (
        "axolotl",
        {"dpo_norm_loss": True, "rpo_alpha": 1.0},
        {"type": "dpo", "normalize": "length", "sft": {"weight": 1.0}},
    ),
    (
        "axolotl",
        {"dpo_loss_type": ["hinge", "sft"], "dpo_loss_weights": [1, 0.1]},
        {"type": "dpo", "loss": "hinge", "sft": {"weight": 0.1}},
    ),
    ("axolotl", {"rl": "ipo", "rl_beta": 0.2}, {"type": "ipo", "beta": 0.2}),
    ("axolotl", {"rl": "orpo", "orpo_alpha": 0.3}, {"type": "orpo", "beta": 0.3}),
    ("axolotl", {"rl": "orpo", "orpo_alpha": 0.3, "rl_beta": 0.4}, {"type": "orpo", "beta": 0.4}),
    ("axolotl", {"rl": "orpo", "rl_beta": 0.4, "trl": {"beta": 0.5}}, {"type": "orpo", "beta": 0.5}),
    ("axolotl", {"rl": "dpo", "rl_beta": 0.4, "trl": {"beta": 0.5, "use_vllm": False}}, {"type": "dpo", "beta": 0.5}),
    ("axolotl", {"rl": "kto", "rl_beta": 0.4, "trl": {"beta": None}}, {"type": "kto", "beta": 0.4}),
    (
        "axolotl",
        {"rl": "simpo", "cpo_alpha": 0.5, "simpo_gamma": 0.4, "rl_beta": 2.0},
        {"type": "simpo", "beta": 2.0, "gamma": 0.4, "sft": {"weight": 0.5}},
    ),
    (
        "axolotl",
        {"rl": "kto", "kto_desirable_weight": 0.5, "datasets": [{"path": "a.jsonl", "type": "chatml.intel"}]},
        {"type": "kto", "desirable_weight": 0.5},
    ),
    ("llama-factory", {}, {"type": "dpo"}),
    (
        "llama-factory",
        {"dpo_label_smoothing": 0.1, "pref_ftx": 0.2},
        {"type": "dpo", "sft": {"weight": 0.2}, "label_smoothing": 0.1},
    ),
    ("llama-factory", {"pref_loss": "hinge", "dpo_label_smoothing": 0.1}, {"type": "dpo", "loss": "hinge"}),
    ("llama-factory", {"pref_loss": "ipo", "pref_beta": 0.5}, {"type": "ipo", "beta": 0.5}),
    # Its ORPO is of the answer alone, not of the prompt, too.
    ("llama-factory", {"pref_loss": "orpo"}, {"type": "orpo", "sft": {"weight": 1.0, "over": "answer"}}),
    ("llama-factory", {"pref_loss": "simpo"}, {"type": "simpo", "beta": 0.1, "gamma": 0.5}),
    (
        "llama-factory",
        {"stage": "kto", "dataset": "judged", "kto_rejected_weight": 2.0},
        {"type": "kto", "undesirable_weight": 2.0},
    ),
]


@pytest.mark.parametrize(
    ("project", "options", "objective"), OBJECTIVES, ids=[f"{p}-{json.dumps(o)[1:-1]}"[:60] for p, o, _ in OBJECTIVES]
)
def test_objectives(
    project: str, options: dict[str, Any], objective: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = converted(tmp_path, project, options)
    assert found.problems == []
    assert field(found, "train.objective") == objective
    FinetuneConfig.model_validate(found.tree)


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("trl-dpo", {"loss_type": "apo_zero"}, "loss_type", "apo_zero is not here; a loss of pairs is sigmoid, hinge"),
    ("trl-dpo", {"loss_type": ["sigmoid", "bco_pair"]}, "loss_type", "bco_pair is not here"),
    ("trl-dpo", {"loss_type": ["sigmoid", "hinge"]}, "loss_type", "one loss of pairs"),
    ("trl-dpo", {"loss_type": "sft"}, "loss_type", "one loss of pairs"),
    (
        "trl-dpo",
        {"loss_weights": [0.8, 0.2], "loss_type": ["sigmoid", "sft"]},
        "loss_weights",
        "the weight of sigmoid is 1 here: write 1 for it and 0.25 for sft",
    ),
    ("trl-dpo", {"loss_weights": [1.0, 2.0]}, "loss_weights", "has 2 weights for 1 losses"),
    ("trl-dpo", {"reference_free": True, "loss_type": "ipo"}, "reference_free", "ipo compares with a reference"),
    ("trl-dpo", {"f_divergence_type": "js_divergence"}, "f_divergence_type", "the reverse KL"),
    ("trl-dpo", {"ld_alpha": 0.5}, "ld_alpha", "every token of an answer counts alike"),
    ("trl-dpo", {"use_weighting": True}, "use_weighting", "pairs have weights of their own"),
    ("trl-dpo", {"sync_ref_model": True, "ref_model_sync_steps": 10}, "sync_ref_model", "the reference stays as it is"),
    ("trl-dpo", {"max_prompt_length": 128}, "max_prompt_length", "data.long_documents=truncate shortens them"),
    ("trl-dpo", {"max_length": None}, "max_length", "a sample has a fixed length"),
    ("trl-dpo", {"neftune_noise_alpha": 5}, "train.neftune_noise_alpha", "with train.objective.type=dpo"),
    ("trl-kto", {"loss_type": "apo_zero_unpaired"}, "loss_type", "apo_zero_unpaired is not here"),
    ("trl-cpo", {"loss_type": "ipo"}, "loss_type", "ipo is not here without a reference"),
    ("trl-cpo", {"alpha": 0.1}, "alpha", "the log-probability itself"),
    ("trl-kto", {"train_sampling_strategy": "random"}, "train_sampling_strategy", "set data.shuffle"),
    ("trl", {"loss_type": ["sigmoid"]}, "loss_type", "needs --from trl-dpo, trl-kto or trl-cpo"),
    ("axolotl", {"rl": "grpo"}, "rl", "grpo is not here; dpo, ipo, orpo, simpo, kto are"),
    ("axolotl", {**LORA, "lora_model_dir": "out/adapter"}, "lora_model_dir", "set method.adapter in the result"),
    ("axolotl", {"dpo_use_weighting": True}, "dpo_use_weighting", "format.weight"),
    ("axolotl", {"max_prompt_len": 512}, "max_prompt_len", "data.long_documents"),
    ("llama-factory", {"pref_loss": "kto_pair"}, "pref_loss", "kto_pair is not here; sigmoid, hinge, ipo, orpo, simpo"),
    ("llama-factory", {"pref_bco_weight": 0.1}, "pref_bco_weight", "no such term"),
    ("llama-factory", {"ref_model_adapters": "a"}, "ref_model_adapters", "merge them into the model"),
    ("llama-factory", {"stage": "kto", "pref_ftx": 0.1, "dataset": "judged"}, "pref_ftx", "no term of cross-entropy"),
    ("llama-factory", {"dataset": "judged"}, "dataset", "`ranking` is for stages dpo and rm"),
    ("llama-factory", {"dataset": "other"}, "dataset", "usual names here: rename them by format.type=python"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("project", "options", "key", "why"), REFUSED, ids=[f"{p}-{json.dumps(o)[1:-1]}"[:60] for p, o, _, _ in REFUSED]
)
def test_what_no_objective_is_gets_a_line_and_a_way_out(
    project: str, options: dict[str, Any], key: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (problem,) = (each for each in converted(tmp_path, project, options).problems if each.startswith(f"{key}="))
    assert why in problem
    if f"--drop {key} " in problem and key != "rl":
        assert converted(tmp_path, project, options, drop=(key,)).problems == []


ROWS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("trl-dpo", {}, {"type": "preference", "style": "plain"}),
    ("trl-kto", {}, {"type": "binary", "style": "plain"}),
    ("axolotl", {}, {"type": "preference", "prompt": "messages"}),
    (
        "axolotl",
        {"field_messages": "turns", "field_chosen": "good", "field_rejected": "bad"},
        {"type": "preference", "prompt": "turns", "chosen": "good", "rejected": "bad"},
    ),
    ("axolotl", {"type": "chat_template.argilla_chat"}, {"type": "preference", "prompt": None}),
    ("axolotl", {"type": "chatml.intel"}, {"type": "preference", "prompt": "question", "system": "system"}),
    ("axolotl", {"type": "llama3.ultra"}, {"type": "preference", "prompt": None, "system": "system"}),
    (
        "axolotl",
        {"type": "chatml.argilla"},
        {
            "type": "preference", "prompt": "instruction", "chosen": "chosen_response",
            "rejected": "rejected_response", "system": "system",
        },
    ),
    ("axolotl", {"type": None}, {"type": "preference", "style": "plain"}),
    (
        "axolotl",
        {"type": {"field_prompt": "q", "prompt_format": "{q}", "field_chosen": "a"}},
        {"type": "preference", "style": "plain", "prompt": "q", "chosen": "a"},
    ),
    (
        "llama-factory",
        {"dataset": "turns"},
        {"type": "preference", "prompt": "conversations", "chosen": "good", "rejected": "bad"},
    ),
    (
        "llama-factory",
        {"dataset": "pairs"},
        {
            "type": "python",
            "function": "raytune_fsdp.convert.llama_factory_rows:with_input",
            "then": {"type": "preference", "prompt": "instruction", "chosen": "chosen", "rejected": "rejected"},
        },
    ),
    (
        "llama-factory",
        {"dataset": "judged", "stage": "kto"},
        {"type": "binary", "completion": "messages", "prompt": None, "label": "label"},
    ),
    (
        "llama-factory",
        {"dataset": "answers", "stage": "kto"},
        {"type": "binary", "prompt": "question", "completion": "answer", "label": "good", "system": "system"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("project", "options", "rows"), ROWS)
def test_rows(
    project: str, options: dict[str, Any], rows: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if project == "axolotl":
        options = {"datasets": [{**AXOLOTL["datasets"][0], **options}]}  # type: ignore[index]
    found = converted(tmp_path, project, options)
    assert found.problems == []
    assert field(found, "data.train.0.format") == rows
    FinetuneConfig.model_validate(found.tree)


def test_a_type_with_a_template_in_its_name_has_that_template(tmp_path: Path) -> None:
    """And a type of texts is put together there in ways that a format does not have."""
    sets = [{"path": "a/b", "type": "chatml.intel"}, {"path": "c/d", "type": "chat_template.default"}]
    found = converted(tmp_path, "axolotl", {"datasets": sets})
    assert [each.get("chat_template") for each in field(found, "data.train")] == ["chatml", None]
    for kind, key in (
        ({"field_prompt": "q", "chosen_format": "{chosen}<|end|>"}, "datasets.0.type.chosen_format"),
        ("zephyr.nectar", "datasets.0.type"),
    ):
        problems = converted(tmp_path, "axolotl", {"datasets": [{"path": "a/b", "type": kind}]}).problems
        assert problems[0].startswith(f"{key}=") and "type" in problems[0] and "python" in problems[0]


def test_a_sample_holds_two_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them as long as there. What is cut off, and where, is said."""
    monkeypatch.chdir(tmp_path)
    for project, options in (
        ("trl-dpo", {"max_length": 600}),
        ("trl-kto", {"max_length": 600}),
        ("axolotl", {"sequence_len": 600}),
        ("llama-factory", {"cutoff_len": 600}),
    ):
        found = converted(tmp_path, project, options)
        assert found.problems == [] and field(found, "data.seq_len") == 1200
        (line,) = (line for line in found.lines if line.key in options)
        assert "twice 600, the limit of a document there" in line.said.text
    for how in ("keep_start", "keep_end"):
        found = converted(tmp_path, "trl-dpo", {"truncation_mode": how})
        assert found.problems == [] and field(found, "data.long_documents") == "truncate"


@pytest.mark.parametrize(
    ("loss", "value", "fate"), [("robust", 0.1, "carried"), ("robust", 0, "same"), ("sigmoid", 0.1, "left")]
)
def test_smoothing_is_reported_as_it_is_carried(loss: str, value: float, fate: str, tmp_path: Path) -> None:
    found = converted(tmp_path, "trl-dpo", {"loss_type": loss, "label_smoothing": value})
    (line,) = (line for line in found.lines if line.key == "label_smoothing")
    assert line.said.fate == fate
    assert ("label_smoothing" in field(found, "train.objective")) == (fate == "carried")


def test_dropout_of_adapters_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As there, where lora_dropout has a value that is never used."""
    monkeypatch.chdir(tmp_path)
    for project, options, key in (
        ("trl-dpo", TRL_LORA, "lora_dropout"),
        ("axolotl", {**LORA, "lora_dropout": 0.05}, "lora_dropout"),
        ("llama-factory", {"finetuning_type": "lora", "lora_dropout": 0.05}, "lora_dropout"),
    ):
        found = converted(tmp_path, project, options)
        assert found.problems == [] and field(found, "method.dropout") == 0.0
        assert {line.key: line.said.fate for line in found.lines}[key] == "left"
    kept = converted(tmp_path, "trl-dpo", {**TRL_LORA, "disable_dropout": False})
    assert field(kept, "method.dropout") == 0.05


OWN = {"trl-gkd": {"teacher_model_name_or_path": "org/large", "lmbda": 0.0, "beta": 0.0}}
OF_TRL = [(project, written) for project in ("trl-dpo", "trl-reward", "trl-gkd") for written in (True, False, None)]


@pytest.mark.parametrize(("project", "written"), [*OF_TRL, ("axolotl", None), ("llama-factory", None)])
def test_what_to_do_about_dropout_of_the_model_itself_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, project: str, written: bool | None
) -> None:
    """Their trainers set it to 0; here a model trains with what its config has."""
    monkeypatch.chdir(tmp_path)
    found = converted(
        tmp_path, project, OWN.get(project, {}) | ({} if written is None else {"disable_dropout": written})
    )
    said = {line.key: line.said for line in found.lines}
    key = "model.overrides" if written is None else "disable_dropout"
    assert said[key].fate == {True: "left", False: "same", None: "default"}[written]
    assert ("set them to 0 in model.overrides" in said[key].text) == (written is not False)
    assert written is None or "model.overrides" not in said
    assert "dropout" not in found.tree.get("method", {})


def test_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours is what the run starts from; LLaMA-Factory takes a continued adapter off."""
    monkeypatch.chdir(tmp_path)
    lora = {"finetuning_type": "lora", "adapter_name_or_path": "out/sft"}
    assert field(converted(tmp_path, "llama-factory", lora), "reference") == {"model": "base"}
    other = converted(tmp_path, "llama-factory", {**lora, "ref_model": "org/other"})
    assert other.problems == [] and field(other, "reference") == {"model": "org/other"}
    assert "reference" not in converted(tmp_path, "llama-factory", {**lora, "pref_loss": "simpo"}).tree
    assert "reference" not in converted(tmp_path, "trl-dpo", {**TRL_LORA, "precompute_ref_log_probs": True}).tree


def test_the_order_of_kto_is_that_of_the_rows_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    assert field(converted(tmp_path, "trl-kto", {}), "data.shuffle") == "none"
    assert "shuffle" not in converted(tmp_path, "trl-kto", {"train_sampling_strategy": "random"}).tree["data"]


def test_the_command_of_trl_is_guessed_where_a_key_tells_it(tmp_path: Path) -> None:
    least = {key: LEAST["trl"][key] for key in ("model_name_or_path", "dataset_name")}
    for options, project in (
        ({}, "trl"),
        ({"packing": True}, "trl"),
        ({"f_divergence_type": "reverse_kl", "beta": 0.1}, "trl-dpo"),
        ({"desirable_weight": 1.0}, "trl-kto"),
        ({"simpo_gamma": 0.5, "beta": 2.0}, "trl-cpo"),
    ):
        found = convert(write(tmp_path, {**least, **options}), gpus=1)
        assert (found.project.name, found.problems) == (project, [])
        assert ("--from trl-dpo, --from trl-kto" in found.guessed) == (not options)
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump({**least, "beta": 0.1}))
    with pytest.raises(ConfigError, match=r"its trainer is unclear \(.*trl-dpo knows 3, trl-kto knows 3"):
        convert(str(file))
