"""Files of trainers that have parts (torchtune, DeepSpeed), older configs of ours, and what PEFT chooses by itself."""

from __future__ import annotations

import ast
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.cli.main import main
from raytune_fsdp.config.load import load_config
from raytune_fsdp.convert.adapters import PEFT_CHOOSES
from raytune_fsdp.convert.file import convert
from tests.unit.test_convert import LEAST, Expected, ours, write

PAIRS_OF_TORCHTUNE = {"_component_": "x.preference_dataset", "source": "a/b", "column_map": {"chosen": "good"}}
STACK_EXCHANGE = {"_component_": "torchtune.datasets.stack_exchange_paired_dataset"}
TORCHTUNE: list[tuple[dict[str, Any], Expected]] = [
    ({"model": {"_component_": "torchtune.models.qwen3.lora_qwen3_8b"}}, "refused"),
    ({"model": {"_component_": "x.qlora_llama3_8b", "lora_attn_modules": ["q_proj"]}}, ("method.quantization", "nf4")),
    (
        {"model": {"_component_": "x.lora_gemma_2b", "lora_attn_modules": ["output_proj"], "apply_lora_to_mlp": True}},
        ("method.target_modules", ["o_proj", "gate_proj", "up_proj", "down_proj"]),
    ),
    ({"model": {"_component_": "x.lora_phi3_mini", "lora_attn_modules": ["q_proj"]}}, "refused"),
    ({"checkpointer": {"_component_": "x.FullModelMetaCheckpointer", "checkpoint_dir": "m"}}, "refused"),
    ({"output_dir": "/kept", "checkpointer": {"checkpoint_dir": "${output_dir}/m"}}, ("model.path", "/kept/m")),
    ({"checkpointer": {"checkpoint_dir": "${nowhere}/m"}}, "refused"),
    ({"dataset": {"_component_": "my.own_dataset", "source": "x"}}, "refused"),
    ({"dataset": {"_component_": "x.instruct_dataset"}}, "refused"),
    (
        {"dataset": {"_component_": "x.alpaca_cleaned_dataset", "packed": True}},
        ("data.train.0.format", {"type": "instruction", "style": "alpaca", "loss": "all"}),
    ),
    (
        {"dataset": {"_component_": "x.text_completion_dataset", "source": "a/b", "packed": True}},
        ("data.packing", "concat"),
    ),
    ({"dataset": {"_component_": "x.chat_dataset", "source": "a/b", "packed": True}}, ("data.packing", "best_fit")),
    (
        {"dataset_val": {"_component_": "x.chat_dataset", "source": "a/b", "split": "test"}},
        ("data.eval.0.split", "test"),
    ),
    ({"tokenizer": {"max_seq_len": 512}}, ("data.long_documents", "truncate")),
    ({"shuffle": False}, ("data.shuffle", "none")),
    ({"dtype": "fp32"}, ("parallel.precision", "fp32")),
    ({"dtype": "fp16"}, "refused"),
    ({"epochs": 3, "max_steps_per_epoch": 7}, ("train.max_steps", 21)),
    ({"batch_size": 2, "gradient_accumulation_steps": 3}, ("train.global_batch", 24)),
    ({"batch_size": 2, "tensor_parallel_dim": 2}, ("train.global_batch", 4)),
    ({"optimizer": {"_component_": "bitsandbytes.optim.PagedAdamW8bit"}}, ("optim.optimizer.moments", "8bit")),
    ({"optimizer": {"_component_": "torch.optim.SGD", "momentum": 0.9}}, ("optim.optimizer.momentum", 0.9)),
    ({"optimizer": {"_component_": "torch.optim.Adagrad"}}, "refused"),
    ({"optimizer": {"_component_": "torch.optim.AdamW", "betas": [0.8, 0.9]}}, ("optim.beta1", 0.8)),
    (
        {"lr_scheduler": {"_component_": "x.get_cosine_schedule_with_warmup", "num_warmup_steps": 9}},
        ("optim.warmup_steps", 9),
    ),
    ({"lr_scheduler": {"_component_": "x.get_rex_scheduler"}}, "refused"),
    ({"loss": {"_component_": "torchtune.rlhf.loss.SimPOLoss"}}, "refused"),
    (
        {"loss": {"_component_": "x.DPOLoss", "beta": 0.2, "label_smoothing": 0.1}, "dataset": PAIRS_OF_TORCHTUNE},
        ("train.objective", {"type": "dpo", "beta": 0.2, "label_smoothing": 0.1}),
    ),
    (
        {"loss": {"_component_": "x.RSOLoss", "gamma": 0.3}, "dataset": PAIRS_OF_TORCHTUNE},
        ("train.objective", {"type": "dpo", "loss": "hinge", "beta": 0.3}),
    ),
    (
        {"loss": {"_component_": "x.DPOLoss"}, "dataset": PAIRS_OF_TORCHTUNE, "tokenizer": {"max_seq_len": 512}},
        ("data.seq_len", 1024),
    ),
    (
        {"loss": {"_component_": "x.DPOLoss"}, "dataset": PAIRS_OF_TORCHTUNE},
        ("data.train.0.format", {"type": "preference", "prompt": None, "chosen": "good"}),
    ),
    (
        {"loss": {"_component_": "x.DPOLoss"}, "dataset": STACK_EXCHANGE},
        (
            "data.train.0",
            {
                "path": "hf://datasets/lvwerra/stack-exchange-paired/data/rl/*",
                "format": {
                    "type": "preference",
                    "prompt": "question",
                    "chosen": "response_j",
                    "rejected": "response_k",
                },
            },
        ),
    ),
    (
        {"loss": {"_component_": "x.DPOLoss"}, "dataset": {**STACK_EXCHANGE, "column_map": {"chosen": "good"}}},
        ("data.train.0.format.chosen", "good"),
    ),
    ({"loss": {"_component_": "x.DPOLoss"}, "dataset": {**STACK_EXCHANGE, "source": "a/b"}}, "refused"),
    (
        {"loss": {"_component_": "x.DPOLoss"}, "dataset": STACK_EXCHANGE, "ref_checkpointer": {"checkpoint_dir": "r"}},
        ("reference.model", "r"),
    ),
    (
        {
            "loss": {"_component_": "x.DPOLoss"},
            "dataset": STACK_EXCHANGE,
            "checkpointer": {"checkpoint_dir": "m/"},
            "ref_checkpointer": {"checkpoint_dir": "m"},
        },
        "same",
    ),
    (
        {
            "loss": {"_component_": "x.DPOLoss"},
            "dataset": STACK_EXCHANGE,
            "ref_checkpointer": {"_component_": "x.FullModelMetaCheckpointer", "checkpoint_dir": "r"},
        },
        "refused",
    ),
    ({"ref_checkpointer": {"checkpoint_dir": "r"}}, "left"),
    ({"clip_grad_norm": 0.5}, ("optim.max_grad_norm", 0.5)),
    ({"device": "mps"}, "refused"),
    ({"metric_logger": {"_component_": "x.WandBLogger", "project": "p"}}, ("tracking.wandb.project", "p")),
    ({"resume_from_checkpoint": True}, "refused"),
    ({"optimizer": {"_component_": "torch.optim.SGD"}}, ("optim.lr", 1e-3)),
    ({"tokenizer": {"max_seq_len": None}}, "left"),
]


def test_a_report_of_pairs_names_what_the_result_has(tmp_path: Path) -> None:
    """And what is trained on decides nothing between two answers with one prompt."""
    dataset = {**PAIRS_OF_TORCHTUNE, "train_on_input": True}
    found = convert(
        write(tmp_path, {**LEAST["torchtune"], "loss": {"_component_": "x.DPOLoss"}, "dataset": dataset}), gpus=1
    )
    said = {line.key: line.said for line in found.lines}
    assert said["dataset.column_map"].text == "format.type=preference, format.chosen=good"
    assert said["dataset.train_on_input"].fate == "same"


def warmed_up(kind: str, **params: Any) -> dict[str, Any]:
    """A file of DeepSpeed's whose optimizer has one rate, and whose schedule may have another."""
    optimizer = {"type": "AdamW", "params": {"lr": 1e-5}}
    return {"optimizer": optimizer, "scheduler": {"type": kind, "params": params}}


DEEPSPEED: list[tuple[dict[str, Any], Expected]] = [
    ({"zero_optimization": {"stage": 2}}, ("parallel.strategy", "shard_grad_op")),
    ({"zero_optimization": {"stage": 7}}, "refused"),
    ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, ("parallel.cpu_offload", True)),
    ({"fp16": {"enabled": True, "loss_scale": 0}, "bf16": {"enabled": False}}, ("parallel.precision", "fp16")),
    ({"bf16": {"enabled": "auto"}}, "left"),
    ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, ("train.global_batch", 32)),
    ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, ("train.global_batch", 24)),
    ({"train_batch_size": "auto"}, "left"),
    ({"gradient_clipping": 0.0}, ("optim.max_grad_norm", None)),
    ({"optimizer": {"type": "Lion"}}, ("optim.optimizer", {"type": "lion"})),
    ({"optimizer": {"type": "OneBitAdam"}}, "refused"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.7, 0.8]}}}, ("optim.beta2", 0.8)),
    ({"scheduler": {"type": "WarmupCosineLR"}}, ("optim.schedule", {"type": "cosine"})),
    ({"scheduler": {"type": "OneCycle"}}, "refused"),
    ({"scheduler": {"type": "auto"}}, "left"),
    (warmed_up("WarmupLR", warmup_max_lr=3e-4), ("optim.lr", 3e-4)),
    (warmed_up("WarmupLR", warmup_max_lr="auto"), ("optim.lr", 1e-5)),
    (warmed_up("WarmupLR"), ("optim.lr", 1e-3)),
    (warmed_up("WarmupCosineLR"), ("optim.lr", 1e-5)),
    (warmed_up("WarmupLR"), ("optim.warmup_steps", 1000)),
    (warmed_up("WarmupLR"), ("optim.weight_decay", 0.0)),
    (warmed_up("WarmupLR"), ("optim.max_grad_norm", None)),
    (warmed_up("WarmupDecayLR", warmup_min_lr=3e-5, warmup_max_lr=3e-4), ("optim.schedule.floor", 0.1)),
    (warmed_up("WarmupLR", warmup_min_lr=3e-5), "left"),
    ({"scheduler": warmed_up("WarmupDecayLR", warmup_min_lr=1, warmup_max_lr="auto")["scheduler"]}, "refused"),
    ({"optimizer": {"type": "Adam"}}, ("optim.lr", 1e-3)),
    ({"optimizer": {"type": "AdamW", "params": {"bias_correction": False}}}, "refused"),
    ({"optimizer": {"type": "AdamW", "params": {"bias_correction": True}}}, "same"),
]


@pytest.mark.parametrize(
    ("project", "options", "expected"),
    [("torchtune", *each) for each in TORCHTUNE] + [("deepspeed", *each) for each in DEEPSPEED],
)
def test_what_a_part_means(project: str, options: dict[str, Any], expected: Expected, tmp_path: Path) -> None:
    """Of trainers whose files have parts. They are in the place of those of the least file."""
    found = convert(write(tmp_path, {**LEAST[project], **options}), project=project, gpus=4)
    if isinstance(expected, tuple):
        assert found.problems == []
        assert ours(found, expected[0]) == expected[1]
        return
    fates = {line.said.fate for line in found.lines if line.key.partition(".")[0] in options}
    assert expected in fates and bool(found.problems) == (expected == "refused"), found.report()


def test_json_of_an_editor_that_writes_a_mark_and_tabs(tmp_path: Path) -> None:
    (tmp_path / "theirs.json").write_bytes(b'\xef\xbb\xbf{\n\t"bf16": {\n\t\t"enabled": true\n\t}\n}')
    found = convert(str(tmp_path / "theirs.json"), project="deepspeed")
    assert found.problems == [] and ours(found, "parallel.precision") == "bf16"


def test_an_older_config_of_ours_gets_the_names_of_today(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    formats = {"type": "python", "function": "rows:read", "returns": {"type": "chat"}}
    content = {
        "run": {"name": "x"},
        "model": {"path": "m"},
        "data": {"train": [{"path": "a.jsonl", "format": formats}]},
        "train": {"max_steps": 1, "global_batch": 1},
    }
    write(tmp_path, content)
    assert main(["convert", "theirs.yaml", "--out", "now.yaml"]) == 0
    said = capsys.readouterr().err
    assert "data.train.0.format.returns" in said and "is called data.train.0.format.then now" in said
    made = load_config(tmp_path / "now.yaml")
    assert made.data.train[0].format.model_dump()["then"]["type"] == "chat"
    assert main(["convert", "now.yaml"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: now.yaml: is a config of raytune-fsdp as it is: `raytune-fsdp train --config now.yaml` takes it"
    )
    write(tmp_path, {**content, "optim": {"lr": "fast"}})
    assert main(["convert", "theirs.yaml"]) == 2
    assert "error: optim.lr=fast: must be number > 0" in capsys.readouterr().err


def test_modules_that_peft_would_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the type of the model: a public one, one that is here, one of a type that it does not know."""
    monkeypatch.chdir(tmp_path)
    least = {**LEAST["trl"], "use_peft": True}
    (tmp_path / "here").mkdir()
    for name, kind, chosen in (
        ("Qwen/Qwen3-8B", None, ["q_proj", "v_proj"]),
        ("./here", "gpt_neox", ["query_key_value"]),
        ("here", "qwen3_moe", None),
    ):
        (tmp_path / "here" / "config.json").write_text(json.dumps({"model_type": kind}))
        found = convert(write(tmp_path, {**least, "model_name_or_path": name}), gpus=1)
        if chosen is None:
            assert found.problems == [
                "lora_target_modules: PEFT knows none for a qwen3_moe, and would refuse it: name them, or all-linear, "
                "in the file; --drop lora_target_modules converts without it"
            ]
        else:
            assert found.problems == [] and ours(found, "method.target_modules") == chosen
            assert any("what PEFT takes of a" in line.said.text for line in found.lines)


def test_peft_chooses_what_is_written_here() -> None:
    spec = find_spec("peft")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("peft is not installed")
    text = (Path(spec.submodule_search_locations[0]) / "utils" / "constants.py").read_text()
    (table,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("_TO_LORA_TARGET_MODULES_MAPPING")
    )
    assert {kind: table.get(kind) for kind in PEFT_CHOOSES} == PEFT_CHOOSES
