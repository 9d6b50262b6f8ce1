"""Files of other trainers of which one reading is nearly right, and would train on something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from raytune_fsdp.cli.main import main
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.convert.file import Converted, convert
from raytune_fsdp.convert.llama_factory_rows import with_input
from raytune_fsdp.data.rows.own_code import RowFunction
from tests.unit import test_convert

LEAST = {
    **test_convert.LEAST,
    "llama-factory": {"model_name_or_path": "org/model", "finetuning_type": "full", "dataset": "rows"},
}


def converted(tmp_path: Path, project: str, options: dict[str, Any], drop: tuple[str, ...] = ()) -> Converted:
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump({**LEAST[project], **options}, sort_keys=False))
    return convert(str(file), project=project, gpus=None if project == "accelerate" else 1, drop=drop)


def field(found: Converted, name: str) -> Any:
    value: Any = found.tree
    for part in name.split("."):
        value = value[int(part)] if isinstance(value, list) else value.get(part)
    return value


def said(found: Converted, key: str) -> str:
    """The fate of a key, and why."""
    return next(f"{line.said.fate}: {line.said.text}" for line in found.lines if line.key == key)


TEXTS = {"path": "texts.jsonl", "type": "completion"}
CHATS = {"path": "chats.jsonl", "type": "chat_template"}
OWN = {"field_instruction": "q", "field_output": "a", "format": "Q: {instruction} A: "}
PARTS = "hf://datasets/org/x"

CARRIED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # Long texts of pretraining: windows with packing, their start without.
    (
        "axolotl",
        {"datasets": None, "pretraining_dataset": "org/texts", "sample_packing": True},
        {"data.packing": "best_fit", "data.long_documents": "split"},
    ),
    (
        "axolotl",
        {"datasets": None, "pretraining_dataset": [{"path": "org/texts"}]},
        {"data.packing": "none", "data.long_documents": "truncate"},
    ),
    ("axolotl", {"datasets": [TEXTS]}, {"data.long_documents": "split"}),
    ("axolotl", {"datasets": [CHATS, {"path": "b.jsonl", "type": "alpaca"}]}, {"data.long_documents": "drop"}),
    (
        "axolotl",
        {"datasets": [{"path": "b.jsonl", "type": "alpaca"}], "train_on_inputs": True},
        {"data.train.0.format.loss": "all"},
    ),
    (
        "axolotl",
        {
            "datasets": [
                {"path": "b.jsonl", "type": {**OWN, "system_prompt": "Be {kind}", "system_format": "[{system}]"}}
            ]
        },
        {"data.train.0.format.prompt": "[Be {{kind}}]Q: {q} A: "},
    ),
    (
        "axolotl",
        {"datasets": [{"path": "org/x", "data_files": "a.jsonl", "revision": "abc123", "type": "completion"}]},
        {"data.train.0.path": f"{PARTS}@abc123/a.jsonl"},
    ),
    (
        "axolotl",
        {"special_tokens": {"eos_token": "<|im_end|>", "pad_token": "<pad>"}, "tokens": ["<a>", "<pad>"]},
        {
            "model.add_tokens": [
                {"text": "<pad>", "special": True},
                {"text": "<|im_end|>", "special": True},
                {"text": "<a>"},
            ]
        },
    ),
    ("axolotl", {"dataset_exact_deduplication": True}, {"data.drop_duplicates": True}),
    ("trl", {"dataset_train_split": "train[:100]"}, {"data.train.0.rows": {"first": 100}, "data.train.0.split": None}),
    (
        "trl",
        {"datasets": [{"path": "json", "data_files": "a.jsonl", "split": "train[-5:]"}]},
        {"data.train.0.path": "a.jsonl", "data.train.0.rows": {"last": 5}, "data.train.0.split": None},
    ),
    (
        "trl",
        {"dataset_name": "org/rows", "eval_strategy": "steps", "dataset_test_split": "valid"},
        {"data.train.0.hub": "org/rows", "data.eval.0.split": "valid"},
    ),
    (
        "trl",
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": '{"min_lr_rate": 0.1}'},
        {"optim.schedule": {"type": "cosine", "floor": 0.1}},
    ),
    (
        "trl",
        {"metric_for_best_model": "eval_loss", "greater_is_better": False, "load_best_model_at_end": True},
        {"checkpoint.best_is": "lowest", "checkpoint.keep_best": 1},
    ),
    (
        "trl",
        {
            "deepspeed": {
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True},
                "gradient_clipping": 0.1,
                "bf16": {"enabled": "auto"},
                "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
                "train_batch_size": "auto",
            }
        },
        {"parallel.strategy": "shard_grad_op", "parallel.cpu_offload": True, "optim.max_grad_norm": 0.1},
    ),
    ("trl", {"deepspeed": '{"zero_optimization": {"stage": 0}}'}, {"parallel.strategy": "replicate"}),
    ("trl", {"label_smoothing_factor": 0.0, "neftune_noise_alpha": 0.0}, {"train.epochs": 3.0}),
    ("accelerate", {"parallelism_config": {"parallelism_config_sp_size": 2}}, {"parallel.strategy": "full_shard"}),
]
AXOLOTL_LORA = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True}
TRL_LORA = {"use_peft": True, "lora_target_modules": "all-linear"}
OF_FACTORY = {"finetuning_type": "lora", "dataset": "org/rows", "dataset_dir": "ONLINE"}


@pytest.mark.parametrize(("project", "options", "expected"), CARRIED, ids=lambda value: json.dumps(value)[:70])
def test_it_is_carried_as_it_is_meant(
    project: str, options: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    found = converted(tmp_path, project, options)
    assert found.problems == []
    assert {name: field(found, name) for name in expected} == expected


def only(dataset: dict[str, Any]) -> dict[str, Any]:
    return {"datasets": [dataset]}


# Project, options, the key that is refused, and the fields without it.
REFUSED: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("axolotl", {"fix_untrained_tokens": True}, "fix_untrained_tokens", {}),
    ("axolotl", {"pretraining_sample_concatenation": True}, "pretraining_sample_concatenation", {}),
    ("axolotl", {"shrink_embeddings": True}, "shrink_embeddings", {}),
    ("axolotl", {"tokens": ["<a>"], "mean_resizing_embeddings": False}, "mean_resizing_embeddings", {}),
    ("axolotl", {"fp32_norms": True}, "fp32_norms", {"parallel.precision": "bf16_pure"}),
    # Long texts would be dropped with long chats.
    ("axolotl", {"datasets": [CHATS, TEXTS]}, "excess_length_strategy", {"data.long_documents": None}),
    (
        "axolotl",
        {"pretraining_dataset": [{"path": "org/t"}], "sample_packing": True},
        "excess_length_strategy",
        {"data.long_documents": None},
    ),
    ("axolotl", {"train_on_inputs": True}, "train_on_inputs", {"data.train.0.format": {"type": "chat"}}),
    (
        "axolotl",
        only({**CHATS, "roles_to_train": ["user", "assistant"]}),
        "datasets.0.roles_to_train",
        {"data.train.0.format": {"type": "chat"}},
    ),
    ("axolotl", only({**CHATS, "name": "en"}), "datasets.0.name", {"data.train.0.path": "chats.jsonl"}),
    ("axolotl", only({**CHATS, "revision": "abc"}), "datasets.0.revision", {"data.train.0.path": "chats.jsonl"}),
    (
        "axolotl",
        only({"path": "org/x", "data_files": "a.jsonl", "revision": "refs/pr/1", "type": "alpaca"}),
        "datasets.0.revision",
        {"data.train.0.path": f"{PARTS}/a.jsonl"},
    ),
    (
        "axolotl",
        only({"path": "org/x", "data_files": "a.jsonl", "name": "en", "type": "alpaca"}),
        "datasets.0.name",
        {"data.train.0.path": f"{PARTS}/a.jsonl"},
    ),
    ("axolotl", {**AXOLOTL_LORA, "adapter": "qlora", "load_in_8bit": True}, "load_in_8bit", {"method.type": "qlora"}),
    ("axolotl", {**AXOLOTL_LORA, "adapter": "qlora", "load_in_4bit": False}, "adapter", {"method": None}),
    ("axolotl", {"load_in_8bit": True}, "load_in_8bit", {"method": None}),
    ("axolotl", {**AXOLOTL_LORA, "model_quantization_config": {"backend": "bnb"}}, "model_quantization_config", {}),
    ("trl", {"load_in_8bit": True}, "load_in_8bit", {"method": None}),
    (
        "trl",
        {**TRL_LORA, "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        "bnb_4bit_quant_type",
        {"method.type": "qlora", "method.quantization": "nf4"},
    ),
    ("llama-factory", {**OF_FACTORY, "quantization_bit": 3}, "quantization_bit", {"method.type": "lora"}),
    (
        "llama-factory",
        {**OF_FACTORY, "quantization_bit": 4, "quantization_type": "fp4"},
        "quantization_type",
        {"method.quantization": "nf4"},
    ),
    (
        "llama-factory",
        {**OF_FACTORY, "quantization_bit": 8, "quantization_method": "hqq"},
        "quantization_method",
        {"method.quantization": "int8"},
    ),
    ("trl", {"dataset_train_split": "test"}, "dataset_train_split", {"data.train.0.split": None}),
    ("trl", {"dataset_config": "en"}, "dataset_config", {"data.train.0.subset": None}),
    ("trl", {"eval_strategy": "epoch"}, "eval_strategy", {"data.eval": None}),
    ("trl", only({"path": "rows/", "split": "train[:20%]"}), "datasets.0.split", {"data.train.0.rows": None}),
    (
        "trl",
        only({"path": "json", "data_files": ["a.jsonl", "b.jsonl"], "split": "train[:9]"}),
        "datasets.0.split",
        {"data.train.1.path": "b.jsonl"},
    ),
    (
        "trl",
        {"metric_for_best_model": "eval_accuracy", "greater_is_better": True, "load_best_model_at_end": True},
        "metric_for_best_model",
        {"checkpoint.best_is": None, "checkpoint.keep_best": 1},
    ),
    (
        "trl",
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": "floor 0.1"},
        "lr_scheduler_kwargs",
        {"optim.schedule.floor": 0},
    ),
    ("trl", {"deepspeed": {"optimizer": {"type": "Lamb"}}}, "deepspeed.optimizer.type", {}),
    ("trl", {"deepspeed": {"optimizer": {"params": {"lr": 1e-3}}}}, "deepspeed.optimizer.params.lr", {}),
    ("trl", {"deepspeed": {"scheduler": {"type": "WarmupLR"}}}, "deepspeed.scheduler.type", {}),
    ("trl", {"deepspeed": {"train_batch_size": 64}}, "deepspeed.train_batch_size", {}),
    ("trl", {"deepspeed": {"fp16": {"enabled": True}}}, "deepspeed.fp16.enabled", {}),
    ("trl", {"deepspeed": {"no_such": 1}}, "deepspeed.no_such", {}),
    (
        "trl",
        {"max_grad_norm": 1.0, "deepspeed": {"gradient_clipping": 0.1}},
        "deepspeed.gradient_clipping",
        {"optim.max_grad_norm": 1.0},
    ),
    ("trl", {"output_dir": "s3://bucket/x/run"}, "output_dir", {"run.name": "trainer_output", "run.storage": "."}),
    ("accelerate", {"distributed_type": "MEGATRON_LM"}, "distributed_type", {"cluster.workers": 8}),
    ("accelerate", {"distributed_type": "XLA"}, "distributed_type", {"cluster.workers": 8}),
    (
        "accelerate",
        {"deepspeed_config": {"gradient_accumulation_steps": 4}},
        "deepspeed_config.gradient_accumulation_steps",
        {},
    ),
]


@pytest.mark.parametrize(
    ("project", "options", "key", "without"), REFUSED, ids=[f"{p}-{k}-{n}" for n, (p, _, k, _) in enumerate(REFUSED)]
)
def test_it_is_refused(
    project: str, options: dict[str, Any], key: str, without: dict[str, Any], tmp_path: Path
) -> None:
    problems = converted(tmp_path, project, options).problems
    assert len(problems) == 1 and problems[0].startswith(key)
    way_out = problems[0].rpartition("; --drop ")[2].removesuffix(" converts without it")
    found = converted(tmp_path, project, options, (way_out,))
    assert found.problems == []
    assert {name: field(found, name) for name in without} == without


def test_what_is_told_of_a_quantized_base(tmp_path: Path) -> None:
    """It is close to theirs, and never the same: where, is said."""
    four = converted(tmp_path, "trl", {**TRL_LORA, "load_in_4bit": True})
    assert "there the scales of scales span rows" in said(four, "load_in_4bit")
    assert "without use_bnb_nested_quant, the default, there scales are fp32" in four.report()
    nested = converted(tmp_path, "trl", {**TRL_LORA, "load_in_4bit": True, "use_bnb_nested_quant": True})
    assert "scales are fp32" not in nested.report()
    eight = converted(tmp_path, "axolotl", {**AXOLOTL_LORA, "load_in_8bit": True})
    assert "there (LLM.int8) the input of a layer is rounded, too" in said(eight, "load_in_8bit")
    bits = converted(tmp_path, "llama-factory", {**OF_FACTORY, "quantization_bit": 4})
    assert "span rows" in said(bits, "quantization_bit") and "fp32" not in said(bits, "quantization_bit")
    two = {**TRL_LORA, "load_in_4bit": True, "load_in_8bit": True}
    both = converted(tmp_path, "trl", two)
    assert {problem.partition("=")[0] for problem in both.problems} == {"load_in_4bit", "load_in_8bit"}
    assert field(converted(tmp_path, "trl", two, ("load_in_4bit",)), "method.quantization") == "int8"
    alone = converted(tmp_path, "axolotl", {"load_in_4bit": True}).problems
    assert alone == [
        "load_in_4bit=true: weights are quantized only under adapters: write adapter: qlora in the file; "
        "--drop load_in_4bit converts without it"
    ]


def test_what_is_told_of_long_texts(tmp_path: Path) -> None:
    options = {"datasets": None, "pretraining_dataset": "org/texts"}
    packed = converted(tmp_path, "axolotl", {**options, "sample_packing": True}).report()
    assert "data.long_documents=split: " in packed and "repeats the last 256 tokens" in packed
    assert "data.packing=none: sample_packing is off by default" in converted(tmp_path, "axolotl", options).report()
    mixed = converted(tmp_path, "axolotl", {"datasets": [CHATS, TEXTS], "excess_length_strategy": "truncate"})
    assert said(mixed, "excess_length_strategy").startswith("refused: there truncate is for chat only")
    found = converted(tmp_path, "llama-factory", {"dataset": "org/rows", "dataset_dir": "ONLINE"})
    assert "the end of a long row, with its answer, is lost" in found.report()


@pytest.mark.parametrize(
    "kind",
    [
        {**OWN, "field_system": "sys", "system_format": "[SYS]{system}[/SYS]"},
        {**OWN, "system_prompt": "Be kind", "system_format": "{system} {user}"},
        {"system_prompt": "You are X"},
        {"system_format": "{system}"},
    ],
)
def test_a_system_text_is_not_lost(kind: dict[str, str], tmp_path: Path) -> None:
    options = {"datasets": [CHATS, {"path": "b.jsonl", "type": kind}]}
    found = converted(tmp_path, "axolotl", options)
    fates = {line.said.fate for line in found.lines if line.key.startswith("datasets.1.type")}
    assert fates == {"refused"} and all("--drop datasets.1 " in problem for problem in found.problems)
    assert converted(tmp_path, "axolotl", options, ("datasets.1",)).problems == []


@pytest.mark.parametrize("project", ["axolotl", "trl"])
def test_of_a_directory_the_split_is_read_that_they_read(project: str, tmp_path: Path) -> None:
    keys = {"trl": "dataset_train_split", "axolotl": "split"}
    for given, expected in {
        None: {"split": "train"},
        "train_sft": {"split": "train_sft"},
        "test[:9]": {"split": "test", "rows": {"first": 9}},
    }.items():
        split = {} if given is None else {keys[project]: given}
        options = (
            {"dataset_name": "./data", **split}
            if project == "trl"
            else {"datasets": [{**CHATS, "path": "./data", **split}]}
        )
        found = converted(tmp_path, project, options)
        assert found.problems == []
        assert found.tree["data"]["train"][0].items() >= {"path": "./data", **expected}.items()
    if project == "trl":
        found = converted(tmp_path, project, {"dataset_name": "./data", "eval_strategy": "steps", "eval_steps": 5})
        assert found.tree["data"]["eval"][0]["split"] == "test"


@pytest.mark.parametrize("name", ["", "1st", "²", "٣", "9" * 5_000, "0"])
def test_datasets_by_names_that_are_no_numbers(name: str, tmp_path: Path) -> None:
    problems = converted(tmp_path, "trl", {"dataset_name": None, "datasets": {name: {"path": "a.jsonl"}}}).problems
    assert any("not an option of TRL" in problem for problem in problems)
    assert any("no dataset is named" in problem for problem in problems)


def test_megatron_means_nothing_to_fsdp(tmp_path: Path) -> None:
    megatron = {"megatron_lm_config": {"megatron_lm_gradient_clipping": 0.5}}
    assert converted(tmp_path, "accelerate", megatron).problems == []
    found = converted(tmp_path, "accelerate", {**megatron, "distributed_type": "MEGATRON_LM"})
    assert len(found.problems) == 2 and said(found, "megatron_lm_config").startswith("refused")
    keys = [f"parallelism_config_{each}" for each in ("cp_comm_strategy", "cp_backend", "sp_backend", "sp_seq_length")]
    ways = converted(tmp_path, "accelerate", {"parallelism_config": dict.fromkeys(keys, "x")})
    assert ways.problems == [] and all(
        said(ways, f"parallelism_config.{key}").startswith("left: how ranks share") for key in keys
    )


def llama_factory(tmp_path: Path, entry: dict[str, Any], **options: Any) -> Converted:
    (tmp_path / "data").mkdir(exist_ok=True)
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"rows": entry, "more": {"hf_hub_url": "org/m"}}))
    return converted(tmp_path, "llama-factory", options)


def test_reasoning_that_is_switched_off(tmp_path: Path) -> None:
    chats = {"file_name": "chats.jsonl", "formatting": "sharegpt"}
    off = llama_factory(tmp_path, chats, dataset="rows", enable_thinking=False)
    assert field(off, "data.train.0.format.reasoning") == "drop" and not off.problems
    assert field(llama_factory(tmp_path, chats, dataset="rows"), "data.train.0.format.reasoning") is None
    plain = llama_factory(tmp_path, chats, dataset="rows", enable_thinking=False, template="llama3")
    assert field(plain, "data.train.0.format.reasoning") is None and "left" in said(plain, "enable_thinking")
    texts = {"file_name": "texts.jsonl", "columns": {"prompt": "text"}}
    assert "left" in said(llama_factory(tmp_path, texts, stage="pt", enable_thinking=False), "enable_thinking")
    axolotl = converted(tmp_path, "axolotl", {"datasets": [TEXTS], "chat_template_kwargs": {"think": False}})
    assert "left" in said(axolotl, "chat_template_kwargs")
    wrong = converted(tmp_path, "axolotl", {"chat_template_kwargs": {"add_generation_prompt": True}})
    assert len(wrong.problems) == 1 and "chat_template_kwargs" in wrong.problems[0], wrong.problems


QUESTIONS = {"columns": {"prompt": "q", "response": "a"}}


@pytest.mark.parametrize(
    ("entry", "options", "expected"),
    [
        ({"hf_hub_url": "org/x", "revision": "abc", **QUESTIONS}, {}, {"hub": "org/x", "revision": "abc"}),
        ({"hf_hub_url": "org/x", "split": "test", "subset": "en", **QUESTIONS}, {}, {"split": "test", "subset": "en"}),
        ({"file_name": "a.json", "split": "train[:100]", **QUESTIONS}, {}, {"rows": {"first": 100}}),
        ({"file_name": "folder", **QUESTIONS}, {}, {"split": "all"}),
        (
            {"file_name": "a.json", "columns": {"prompt": "body"}},
            {"stage": "pt"},
            {"format": {"type": "completion", "text": "body"}},
        ),
        ({"file_name": "a.json"}, {"stage": "pt"}, {"format": "joined"}),
        *(
            (
                {"file_name": "a.json", "formatting": "sharegpt", "columns": {"messages": "turns", **columns}},
                {},
                {"format": {"type": "chat", "messages": "turns", **system}},
            )
            for columns, system in (
                ({"system": "sys"}, {"system": "sys"}),
                ({"system": "system"}, {}),
                ({}, {"system": None}),
            )
        ),
    ],
)
def test_an_entry_of_llama_factory(
    entry: dict[str, Any], options: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    found = llama_factory(tmp_path, entry, **options)
    assert found.problems == []
    if expected.get("format") == "joined":
        then = {"type": "completion", "text": "instruction"}
        function = "raytune_fsdp.convert.llama_factory_rows:with_input"
        expected = {"format": {"type": "python", "function": function, "then": then}}
    (ours,) = found.tree["data"]["train"]
    assert expected.items() <= ours.items()


@pytest.mark.parametrize(
    ("entry", "options", "why"),
    [
        ({"file_name": "a.json", "split": "test"}, {}, "a file has no split 'test'"),
        ({"file_name": "a.json", "split": "train[:9]"}, {"max_samples": 5}, "does not go with max_samples"),
        ({"file_name": "a.json", "revision": "abc"}, {}, "a file has no revision"),
        ({"hf_hub_url": "org/x", "reviison": "abc"}, {}, "reviison is not known here"),
        ({"file_name": "a.json", "formatting": "nonsense"}, {}, "'nonsense' is not known here"),
        ({"file_name": "a.json", "columns": {"prompt": "q", "query": "x"}}, {}, "a line break there"),
        ({"file_name": "a.json", "columns": {"prompt": "q", "query": "x"}}, {"stage": "pt"}, "a line break there"),
        ({"file_name": "a.json", "columns": {"response": "a"}}, {"stage": "pt"}, "name it"),
        ({"file_name": "a.json", "formatting": "sharegpt"}, {"stage": "pt"}, "the first message"),
    ],
)
def test_an_entry_of_llama_factory_that_is_refused(
    entry: dict[str, Any], options: dict[str, Any], why: str, tmp_path: Path
) -> None:
    (problem,) = llama_factory(tmp_path, entry, **options).problems
    assert why in problem


@pytest.mark.parametrize(("name", "fate"), [("training", "same"), ("weight", "same"), ("masked", "refused")])
def test_messages_that_axolotl_does_not_train_on(name: str, fate: str, tmp_path: Path) -> None:
    sets = [{"path": "rows.jsonl", "type": "chat_template", "message_field_training": name}]
    found = converted(tmp_path, "axolotl", {"datasets": sets})
    assert said(found, "datasets.0.message_field_training").startswith(fate)


def test_an_evaluation_is_named_once(tmp_path: Path) -> None:
    options = {"eval_dataset": "more", "val_size": 0.1}
    (problem,) = llama_factory(tmp_path, {"file_name": "a.json"}, **options).problems
    assert problem.startswith("val_size=0.1: eval_dataset says what is evaluated")
    found = converted(tmp_path, "llama-factory", options, ("val_size",))
    assert found.problems == [] and found.tree["data"]["eval"][0]["hub"] == "org/m"


def test_the_function_of_converted_rows() -> None:
    """As LLaMA-Factory joins them: by one line break, and by none where one of the two is empty."""
    function = RowFunction("raytune_fsdp.convert.llama_factory_rows:with_input")
    assert function({"instruction": "Add", "input": "1 2", "output": "3"}, "row") == {
        "instruction": "Add\n1 2",
        "input": "1 2",
        "output": "3",
    }
    assert [with_input(row)["instruction"] for row in ({"instruction": "a", "input": ""}, {"input": "b"}, {})] == [
        "a",
        "b",
        "",
    ]


def test_secrets_are_not_written(tmp_path: Path) -> None:
    secret = "hf_" + "abcdefgh" * 4
    env = {"HF_TOKEN": secret, "WANDB_API_KEY": "abc", "NCCL_DEBUG": "INFO"}
    found = converted(tmp_path, "trl", {"env": env})
    assert found.problems == [] and field(found, "cluster.env") == {"NCCL_DEBUG": "INFO"}
    assert "HF_TOKEN, WANDB_API_KEY looks like a secret and is not written" in said(found, "env")
    assert secret not in found.config("x") + found.report()
    alone = converted(tmp_path, "trl", {"env": {"HF_TOKEN": secret}})
    assert alone.problems == [] and "cluster" not in alone.tree and said(alone, "env").startswith("left: ")
    (problem,) = converted(tmp_path, "axolotl", {"mlflow_experiment_name": secret}).problems
    assert problem.startswith("tracking.mlflow.experiment: looks like a secret") and secret not in problem


def test_the_file_after_what_is_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump({**LEAST["axolotl"], "relora": True}))
    assert main(["convert", "--gpus", "1", "--drop", "relora", str(file)]) == 0
    assert "# Converted from theirs.yaml of axolotl, without relora." in capsys.readouterr().out
    assert main(["convert", "--gpus", "1", "--drop", "relora", "none.yaml"]) == 2
    assert "--drop took relora none.yaml for keys; name the file before --drop" in capsys.readouterr().err
    assert main(["convert", "--gpus", "1"]) == 2
    assert "FILE is missing: name the YAML file of the other trainer" in capsys.readouterr().err


def test_no_map_in_text_is_too_deep_or_too_large(tmp_path: Path) -> None:
    for text in ('{"a": ' * 5_000, '{"a": ' * 80 + "1" + "}" * 80, "{a: &a [1], b: *a, ", "{}"):
        problems = converted(tmp_path, "trl", {"lr_scheduler_kwargs": text}).problems
        assert len(problems) == (text != "{}"), text[:20]


def test_what_is_carried_is_a_config(tmp_path: Path) -> None:
    for project, options, _ in CARRIED:
        if project != "accelerate":
            FinetuneConfig.model_validate(converted(tmp_path, project, options).tree)
