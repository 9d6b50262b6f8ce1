"""Configs of other trainers become ours: every key is named once, and what changes what is learned is never lost."""

from __future__ import annotations

import ast
import json
import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.make.coming_from import PAGE, page
from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.cli.convert import _PROJECTS
from raytune_fsdp.cli.main import main
from raytune_fsdp.config.load import load_config
from raytune_fsdp.convert.file import PROJECTS, Converted, convert
from raytune_fsdp.plan.counts import Census
from raytune_fsdp.plan.plan import resolve
from tests.forgeries import MERGE_BOMB

EXAMPLES = sorted((Path(__file__).parent / "convert").glob("*-*.*"))
FRAGMENTS = tuple(name for name, project in PROJECTS.items() if project.fragment)
DROPS = {
    "trl-lora": ["packing_strategy"],
    "llama-factory-lora": ["template"],
}
FATES = {"carried", "same", "left", "refused"}

# The least that a file of each project says.
LORA = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16}
OUR_LORA = {"type": "lora", "rank": 8, "alpha": 16, "dropout": 0.0}
ALL_LINEAR = {"lora_target_linear": True}
OUR_QLORA = {**OUR_LORA, "type": "qlora", "target_modules": "all-linear", "quantization": "nf4"}
TRL_LORA = {"use_peft": True, "lora_target_modules": "all-linear"}
LEAST: dict[str, dict[str, Any]] = {
    "axolotl": {
        "base_model": "org/model",
        "datasets": [{"path": "rows.jsonl", "type": "chat_template"}],
        "learning_rate": 1e-4,
    },
    "trl": {"model_name_or_path": "org/model", "dataset_name": "rows.jsonl"},
    **{
        f"trl-{command}": {"model_name_or_path": "org/model", "dataset_name": "rows.jsonl", **key}
        for command, key in (
            ("dpo", {"precompute_ref_log_probs": True, "label_smoothing": 0.0}),
            ("kto", {"desirable_weight": 1.0}),
            ("orpo", {"beta": 0.1}),
            ("cpo", {"cpo_alpha": 1.0}),
            ("reward", {"center_rewards_coefficient": 0.01}),
            ("gkd", {"teacher_model_name_or_path": "org/teacher", "lmbda": 0.0, "beta": 0.0}),
        )
    },
    "llama-factory": {
        "model_name_or_path": "org/model",
        "finetuning_type": "full",
        "dataset": "org/rows",
        "dataset_dir": "ONLINE",
    },
    "torchtune": {
        "model": {"_component_": "torchtune.models.llama3_1.llama3_1_8b"},
        "checkpointer": {"checkpoint_dir": "org/model"},
        "dataset": {"_component_": "torchtune.datasets.chat_dataset", "source": "org/rows"},
        "optimizer": {"_component_": "torch.optim.AdamW"},
    },
    "accelerate": {"distributed_type": "FSDP", "num_processes": 8},
    "deepspeed": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
}


def test_there_are_enough_examples() -> None:
    of = Counter(next(name for name in PROJECTS if path.stem.startswith(name)) for path in EXAMPLES)
    assert of == {"axolotl": 5, "trl": 5, "llama-factory": 4, "torchtune": 2, "accelerate": 2, "deepspeed": 1}


def example(path: Path, *, drop: bool) -> Converted:
    gpus = None if path.stem.startswith(FRAGMENTS) else 8
    return convert(str(path), gpus=gpus, drop=DROPS.get(path.stem, []) if drop else [])


def test_most_of_the_examples_is_carried() -> None:
    fates = Counter(
        line.said.fate for path in EXAMPLES for line in example(path, drop=False).lines if line.said.fate in FATES
    )
    assert fates["carried"] + fates["same"] >= 0.7 * sum(fates.values()), fates


def keys_of(value: Any, key: str = "") -> Iterator[str]:
    """The keys of a tree down to its values, by a reader that knows nothing of ours."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from keys_of(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        for index, inner in enumerate(value):
            yield from keys_of(inner, f"{key}.{index}")
    else:
        yield key


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_key_is_listed_once(path: Path) -> None:
    listed = [line.key for line in example(path, drop=False).lines if line.said.fate != "default"]
    assert len(listed) == len(set(listed))
    text = path.read_text()
    for key in keys_of(json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)):
        assert sum(key == each or key.startswith(f"{each}.") for each in listed) == 1, key


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_becomes_a_config_that_can_be_planned(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(path.parent)
    arguments = ["convert", path.name, "--out", str(tmp_path / "ours.yaml")]
    fragment = path.stem.startswith(FRAGMENTS)
    if not fragment:
        arguments += ["--gpus", "8"]
    if path.stem in DROPS:
        assert main(arguments) == 2 and not (tmp_path / "ours.yaml").exists()
        said = capsys.readouterr().err
        for key in DROPS[path.stem]:
            assert f"--drop {key} converts without it" in said
        arguments += ["--drop", *DROPS[path.stem]]
    assert main(arguments) == 0, capsys.readouterr().err
    rest = ["--run.name", "x", "--model.path", "x", "--data.train.0.path", "x", "--train.global_batch", "16"]
    config = load_config(tmp_path / "ours.yaml", [*rest, "--train.max_steps", "5"] if fragment else [])
    world = config.cluster.workers if fragment and isinstance(config.cluster.workers, int) else 8
    census = Census(seq_len=config.data.seq_len, epochs=(3_000,))
    plan = resolve(config, world, census)
    assert plan.layout.world == world
    assert fragment or plan.division.global_batch % 8 == 0


def write(tmp_path: Path, content: dict[str, Any] | str | bytes) -> str:
    file = tmp_path / "theirs.yaml"
    if isinstance(content, dict):
        content = yaml.safe_dump(content, sort_keys=False)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(file)


def ours(converted: Converted, field: str) -> Any:
    value: Any = converted.tree
    for part in field.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


# Project, options, and what is expected: our field with its value, or the fate of the (first) option.
Expected = tuple[str, Any] | str
MEANINGS: list[tuple[str, dict[str, Any], Expected]] = [
    ("axolotl", {"revision_of_model": "v1"}, ("model.revision", "v1")),
    ("axolotl", {"tokenizer_config": "org/other"}, ("model.tokenizer", "org/other")),
    ("axolotl", {"model_config": {"attention_dropout": 0.1}}, ("model.overrides", {"attention_dropout": 0.1})),
    ("axolotl", {"reinit_weights": True}, ("model.init", "random")),
    ("axolotl", {"sequence_len": 8192}, ("data.seq_len", 8192)),
    ("axolotl", {"sample_packing": True}, ("data.packing", "best_fit")),
    ("axolotl", {"sample_packing": False}, ("data.packing", "none")),
    ("axolotl", {"excess_length_strategy": "truncate"}, ("data.long_documents", "truncate")),
    ("axolotl", {"excess_length_strategy": "raise"}, ("data.long_documents", "error")),
    ("axolotl", {"micro_batch_size": 3}, ("train.micro_batch", 3)),
    ("axolotl", {"gradient_accumulation_steps": 4}, ("train.global_batch", 16)),
    ("axolotl", {"batch_size": 6, "micro_batch_size": 2}, ("train.global_batch", 24)),
    ("axolotl", {"tensor_parallel_size": 2, "micro_batch_size": 4}, ("train.global_batch", 8)),
    ("axolotl", {"num_epochs": 2.5}, ("train.epochs", 2.5)),
    ("axolotl", {"max_steps": 70, "num_epochs": 3}, ("train.max_steps", 70)),
    ("axolotl", {"lr_scheduler": "linear"}, ("optim.schedule", {"type": "linear"})),
    ("axolotl", {"cosine_min_lr_ratio": 0.2}, ("optim.schedule", {"type": "cosine", "floor": 0.2})),
    ("axolotl", {"lr_scheduler": "rex"}, "refused"),
    ("axolotl", {"cosine_constant_lr_ratio": 0.8}, "refused"),
    ("axolotl", {"warmup_steps": 20}, ("optim.warmup_steps", 20)),
    ("axolotl", {"max_steps": 10_000}, ("optim.warmup_steps", 100)),
    ("axolotl", {"optimizer": "adamw_torch_fused"}, "same"),
    ("axolotl", {"optimizer": "adamw_bnb_8bit"}, ("optim.optimizer", {"type": "adamw", "moments": "8bit"})),
    ("axolotl", {"adam_beta2": 0.98, "optimizer": "lion_8bit"}, ("optim.optimizer.beta2", 0.98)),
    ("axolotl", {"adam_beta2": 0.98, "optimizer": "lion_8bit"}, "same"),
    ("axolotl", {"adam_epsilon": 1e-6, "optimizer": "lion_8bit"}, "left"),
    ("axolotl", {"optimizer": "muon"}, "refused"),
    ("axolotl", {"adam_beta2": 0.95}, ("optim.beta2", 0.95)),
    ("axolotl", {"max_grad_norm": 0.3}, ("optim.max_grad_norm", 0.3)),
    ("axolotl", {"bf16": True}, ("parallel.precision", "bf16_pure")),
    ("axolotl", {"bf16": "auto", "fsdp": ["full_shard", "auto_wrap"]}, ("parallel.precision", "bf16")),
    ("axolotl", {"fp16": True}, ("parallel.precision", "fp16")),
    ("axolotl", {"bf16": False}, ("parallel.precision", "fp32")),
    ("axolotl", {"tf32": True}, ("parallel.tf32", True)),
    ("axolotl", {"gradient_checkpointing": "offload"}, ("parallel.activation_offload", True)),
    ("axolotl", {"flash_attention": True}, "same"),
    ("axolotl", {"attn_implementation": "flash_attention_2"}, "same"),
    ("axolotl", {"attn_implementation": "sdpa"}, ("model.attention", "sdpa")),
    ("axolotl", {"xformers_attention": True}, "left"),
    ("axolotl", {"train_on_inputs": True}, "refused"),
    ("axolotl", {"chat_template": "chatml"}, ("data.chat_template", "chatml")),
    ("axolotl", {"chat_template": "tokenizer_default"}, "same"),
    ("axolotl", {"chat_template": "gemma"}, "refused"),
    ("axolotl", {"chat_template_kwargs": {"think": False}}, ("data.chat_template_kwargs", {"think": False})),
    ("axolotl", {"val_set_size": 200}, ("data.eval", {"rows": 200})),
    ("axolotl", {"eval_steps": 50, "early_stopping_patience": 3}, ("eval.early_stop", {"patience": 3})),
    ("axolotl", {"early_stopping_patience": 3}, "refused"),
    ("llama-factory", {"early_stopping_steps": 0}, "same"),
    ("axolotl", {"tokens": ["<think>"]}, ("model.add_tokens", [{"text": "<think>"}])),
    ("axolotl", {"special_tokens": {"pad_token": "<pad>"}}, ("model.add_tokens", [{"text": "<pad>", "special": True}])),
    ("axolotl", {**LORA, "lora_target_linear": True}, ("method.target_modules", "all-linear")),
    ("axolotl", {**LORA, "lora_target_modules": ["q_proj"]}, ("method", {**OUR_LORA, "target_modules": ["q_proj"]})),
    ("axolotl", {**LORA, "lora_target_modules": ["q_proj"], "loraplus_lr_ratio": 16}, ("method.lr_ratio", 16)),
    ("axolotl", {**LORA, **ALL_LINEAR, "adapter": "qlora", "load_in_4bit": True}, ("method", OUR_QLORA)),
    ("axolotl", {**LORA, **ALL_LINEAR, "adapter": "qlora"}, ("method.type", "qlora")),
    ("axolotl", {**LORA, **ALL_LINEAR, "load_in_8bit": True}, ("method", {**OUR_QLORA, "quantization": "int8"})),
    ("axolotl", {**LORA, **ALL_LINEAR, "bf16": True}, ("parallel.precision", "bf16")),
    ("axolotl", {"adapter": "llama-adapter"}, "refused"),
    ("axolotl", {"load_in_4bit": True}, "refused"),
    ("axolotl", {"lora_rank_pattern": {"q_proj": 4}, "adapter": "lora"}, "refused"),
    ("axolotl", {"lora_r": 8}, "left"),
    ("axolotl", {"load_in_4bit": False}, "same"),
    ("axolotl", {"neftune_noise_alpha": 5}, ("train.neftune_noise_alpha", 5)),
    ("axolotl", {"noisy_embedding_alpha": 5}, ("train.neftune_noise_alpha", 5)),
    ("llama-factory", {"neftune_noise_alpha": 7.5}, ("train.neftune_noise_alpha", 7.5)),
    ("trl", {"neftune_noise_alpha": 5}, ("train.neftune_noise_alpha", 5)),
    ("llama-factory", {"moe_aux_loss_coef": 0.001}, ("train.router_aux_loss_coef", 0.001)),
    ("trl", {"neftune_noise_alpha": 0.0}, "same"),
    ("axolotl", {"rl": "grpo"}, "refused"),
    ("axolotl", {"plugins": ["axolotl.integrations.liger.LigerPlugin"]}, "left"),
    ("axolotl", {"plugins": ["axolotl.integrations.grokfast.GrokfastPlugin"]}, "refused"),
    ("axolotl", {"group_by_length": True}, "left"),
    ("axolotl", {"curriculum_sampling": True}, ("data.shuffle", "none")),
    ("axolotl", {"deepspeed": "deepspeed_configs/zero2.json"}, ("parallel.strategy", "shard_grad_op")),
    ("axolotl", {"mlflow_experiment_name": "mine"}, ("tracking.mlflow.experiment", "mine")),
    ("axolotl", {"seed": 5}, ("run.seed", 5)),
    ("trl", {"max_length": 512}, ("data.seq_len", 512)),
    ("trl", {"max_length": None}, "refused"),
    ("trl", {"packing": True}, ("data.packing", "best_fit")),
    ("trl", {"packing_strategy": "wrapped", "packing": True}, "refused"),
    (
        "trl",
        {"packing_strategy": "wrapped", "packing": True, "dataset_text_field": "text"},
        ("data.packing", "concat"),
    ),
    ("trl", {"packing_strategy": "bfd_split", "packing": True}, ("data.long_documents", "split")),
    ("trl", {"assistant_only_loss": True}, ("data.train.0.format", {"type": "chat", "loss": "assistant"})),
    ("trl", {"dataset_text_field": "body"}, ("data.train.0.format", {"type": "completion", "text": "body"})),
    ("trl", {"completion_only_loss": True}, ("data.train.0.format.type", "instruction")),
    ("trl", {"dataset_train_split": "train_sft", "dataset_name": "org/rows"}, ("data.train.0.split", "train_sft")),
    ("trl", {"test_split_size": 0.05}, ("data.eval", {"fraction": 0.05})),
    ("trl", {"dtype": "bfloat16"}, ("parallel.precision", "bf16_pure")),
    ("trl", {"dtype": "bfloat16", "fsdp": "full_shard"}, ("parallel.precision", "bf16")),
    ("trl", {"bf16": False}, ("parallel.precision", "fp32")),
    ("trl", {"fp16": True}, ("parallel.precision", "fp16")),
    ("trl", {"attn_implementation": "eager"}, ("model.attention", "eager")),
    ("trl", {"attn_implementation": "kernels-community/flash-attn3"}, "left"),
    ("trl", {"gradient_checkpointing": False}, ("parallel.activation_checkpointing", "none")),
    ("trl", {"per_device_train_batch_size": 2}, ("train.global_batch", 8)),
    ("trl", {"lr_scheduler_type": "constant"}, ("optim.schedule", {"type": "constant"})),
    (
        "trl",
        {"lr_scheduler_type": "cosine_with_min_lr", "learning_rate": 1e-4, "lr_scheduler_kwargs": {"min_lr": 1e-5}},
        ("optim.schedule", {"type": "cosine", "floor": 0.1}),
    ),
    ("trl", {"lr_scheduler_type": "cosine_with_restarts"}, ("optim.schedule", {"type": "cosine"})),
    ("trl", {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 3}}, "refused"),
    ("trl", {"lr_scheduler_type": "polynomial", "learning_rate": 1e-4}, ("optim.schedule.floor", 0.001)),
    ("trl", {"lr_scheduler_type": "reduce_lr_on_plateau"}, "refused"),
    ("trl", {"lr_scheduler_type": "inverse_sqrt"}, ("optim.schedule", {"type": "inverse_sqrt"})),
    (
        "trl",
        {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2, "lr_end": 0}},
        ("optim.schedule", {"type": "polynomial", "power": 2, "floor": 0.0}),
    ),
    ("trl", {"lr_scheduler_type": "warmup_stable_decay"}, "refused"),
    ("trl", {"warmup_steps": 0.1}, ("optim.warmup_ratio", 0.1)),
    ("trl", {"warmup_ratio": 0.1}, ("optim.warmup_ratio", 0.1)),
    ("trl", {"max_grad_norm": 0}, ("optim.max_grad_norm", None)),
    ("trl", {"label_smoothing_factor": 0.1}, ("train.label_smoothing", 0.1)),
    ("trl", {"label_smoothing_factor": 0}, "same"),
    ("trl", {"neftune_noise_alpha": None}, "same"),
    ("trl", {"loss_type": "dft"}, "refused"),
    ("trl", {"optim": "paged_adamw_32bit"}, "same"),
    ("trl", {"optim": "lion_32bit"}, ("optim.optimizer", {"type": "lion", "beta1": 0.9, "beta2": 0.999})),
    ("trl", {"optim": "adafactor"}, ("optim.optimizer.type", "adafactor")),
    ("trl", {"adam_beta1": 0.8, "optim": "adafactor"}, "left"),
    ("trl", {"optim": "sgd"}, ("optim.optimizer", {"type": "sgd", "momentum": 0.0})),
    ("trl", {"optim": "ao_adamw_4bit"}, "carried"),
    ("trl", {"optim": "apollo_adamw"}, "refused"),
    ("trl", {"use_peft": False}, "same"),
    ("trl", {**TRL_LORA, "load_in_4bit": True}, ("method.quantization", "nf4")),
    ("trl", {**TRL_LORA, "load_in_8bit": True}, ("method.quantization", "int8")),
    ("trl", {**TRL_LORA, "load_in_8bit": False}, ("method.type", "lora")),
    ("trl", {"bnb_4bit_quant_type": "nf4", **TRL_LORA, "load_in_4bit": True}, "carried"),
    ("trl", {"use_bnb_nested_quant": True, **TRL_LORA, "load_in_4bit": True}, "same"),
    ("trl", {"use_bnb_nested_quant": False, **TRL_LORA, "load_in_4bit": True}, "carried"),
    ("trl", {"bnb_4bit_quant_type": "fp4"}, "left"),
    ("trl", {"load_in_4bit": True}, "refused"),
    ("trl", {"average_tokens_across_devices": True}, "same"),
    ("trl", {"average_tokens_across_devices": False}, "refused"),
    ("trl", {"save_total_limit": 1}, ("checkpoint.keep_last", 2)),
    ("trl", {"save_steps": 0.1, "max_steps": 400}, ("checkpoint.every", 40)),
    ("trl", {"save_strategy": "epoch"}, ("checkpoint.every", {"per_epoch": 1})),
    ("trl", {"save_strategy": "epoch", "max_steps": 40}, "left"),
    ("trl", {"save_steps": 7, "save_strategy": "epoch"}, "left"),
    ("trl", {"save_strategy": "no"}, "same"),
    ("trl", {"eval_strategy": "epoch", "dataset_name": "org/rows"}, ("eval.every", {"per_epoch": 1})),
    ("axolotl", {"saves_per_epoch": 2}, ("checkpoint.every", {"per_epoch": 2})),
    ("axolotl", {"evals_per_epoch": 4}, ("eval.every", {"per_epoch": 4})),
    ("axolotl", {"evals_per_epoch": 0}, "same"),
    ("axolotl", {"save_strategy": "epoch"}, ("checkpoint.every", {"per_epoch": 1})),
    ("axolotl", {"save_steps": 10, "saves_per_epoch": 2}, "left"),
    ("axolotl", {"saves_per_epoch": 2, "max_steps": 40}, "left"),
    ("llama-factory", {"save_strategy": "epoch"}, ("checkpoint.every", {"per_epoch": 1})),
    ("trl", {"eval_strategy": "steps", "eval_steps": 50, "dataset_name": "org/rows"}, ("eval.every", 50)),
    ("trl", {"eval_strategy": "steps", "dataset_name": "org/rows"}, ("data.eval.0.split", "test")),
    ("trl", {"output_dir": "/shared/runs/one"}, ("run", {"name": "one", "storage": "/shared/runs", "seed": 42})),
    ("trl", {"report_to": ["wandb"]}, ("tracking.wandb.enabled", True)),
    ("trl", {"report_to": ["tensorboard", "comet_ml"]}, ("tracking.tensorboard.enabled", True)),
    ("trl", {"report_to": ["comet_ml"]}, "left"),
    ("trl", {"report_to": "mlflow"}, ("tracking.mlflow.enabled", True)),
    ("axolotl", {"wandb_project": "mine"}, ("tracking.wandb", {"enabled": True, "project": "mine"})),
    ("axolotl", {"wandb_project": ""}, "same"),
    ("axolotl", {"use_tensorboard": True}, ("tracking.tensorboard.enabled", True)),
    ("deepspeed", {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "log"}}}, "carried"),
    ("trl", {"push_to_hub": True, "hub_model_id": "me/mine"}, ("export.push", "me/mine")),
    ("trl", {"ddp_timeout": 600}, ("cluster.collective_minutes", 10.0)),
    ("trl", {"ddp_timeout": 86400}, ("cluster.collective_minutes", 1440.0)),
    ("llama-factory", {"ddp_timeout": 180000000}, "left"),
    ("trl", {"torch_compile": True}, ("parallel.compile", True)),
    ("trl", {"full_determinism": True}, ("run.deterministic", True)),
    ("trl", {"env": {"NCCL_DEBUG": "INFO"}}, ("cluster.env", {"NCCL_DEBUG": "INFO"})),
    ("trl", {"dataloader_num_workers": 4}, "left"),
    ("trl", {"resume_from_checkpoint": True}, "same"),
    ("trl", {"resume_from_checkpoint": "out/checkpoint-5"}, "refused"),
    ("trl", {"chat_template_path": "chat.jinja"}, ("data.chat_template", "chat.jinja")),
    ("llama-factory", {"cutoff_len": 1024}, ("data.seq_len", 1024)),
    ("llama-factory", {"template": "llama3"}, ("data.chat_template", "llama-3")),
    ("llama-factory", {"template": "qwen"}, "refused"),
    ("llama-factory", {"enable_thinking": False}, ("data.chat_template_kwargs", {"enable_thinking": False})),
    ("llama-factory", {"enable_thinking": True}, "same"),
    ("llama-factory", {"neat_packing": True}, ("data.packing", "best_fit")),
    ("llama-factory", {"packing": True}, ("data.packing", "best_fit")),
    ("llama-factory", {"packing": False}, ("data.packing", "none")),
    ("llama-factory", {"stage": "pt"}, ("data.packing", "concat")),
    ("llama-factory", {"stage": "ppo"}, "refused"),
    ("llama-factory", {"mask_history": True}, "carried"),
    ("llama-factory", {"train_on_prompt": True}, ("data.train.0.format.then.loss", "all")),
    ("llama-factory", {"max_samples": 10}, ("data.train.0.rows", {"first": 10})),
    ("llama-factory", {"val_size": 0.2}, ("data.eval", {"fraction": 0.2})),
    ("llama-factory", {"mix_strategy": "interleave_over"}, "refused"),
    ("llama-factory", {"flash_attn": "fa2"}, "same"),
    ("llama-factory", {"flash_attn": "disabled"}, ("model.attention", "eager")),
    ("llama-factory", {"flash_attn": "auto"}, "same"),
    ("llama-factory", {"pure_bf16": True}, ("parallel.precision", "bf16_pure")),
    ("llama-factory", {"bf16": True}, ("parallel.precision", "bf16")),
    ("llama-factory", {"disable_gradient_checkpointing": True}, ("parallel.activation_checkpointing", "none")),
    ("llama-factory", {"split_special_tokens": True}, ("data.special_tokens_in_text", "escape")),
    ("llama-factory", {"add_tokens": "<a>,<b>"}, ("model.add_tokens", [{"text": "<a>"}, {"text": "<b>"}])),
    ("llama-factory", {"resize_vocab": True}, ("model.resize_embeddings", True)),
    ("llama-factory", {"train_from_scratch": True}, ("model.init", "random")),
    ("llama-factory", {"use_galore": True, "galore_rank": 8}, "refused"),
    ("llama-factory", {"galore_rank": 8}, "left"),
    ("llama-factory", {"quantization_bit": 4}, "refused"),
    ("llama-factory", {"quantization_bit": 4, "finetuning_type": "lora"}, ("method.quantization", "nf4")),
    ("llama-factory", {"quantization_bit": 8, "finetuning_type": "lora"}, ("method.quantization", "int8")),
    ("llama-factory", {"quantization_method": "bnb", "quantization_bit": 8, "finetuning_type": "lora"}, "same"),
    ("llama-factory", {"quantization_type": "nf4", "quantization_bit": 4, "finetuning_type": "lora"}, "carried"),
    ("llama-factory", {"double_quantization": False, "quantization_bit": 4, "finetuning_type": "lora"}, "carried"),
    ("llama-factory", {"double_quantization": True}, "left"),
    ("llama-factory", {"rope_scaling": "dynamic"}, "refused"),
    ("llama-factory", {"ray_num_workers": 4}, ("cluster.workers", 4)),
    ("llama-factory", {"deepspeed": "ds_z3_offload_config.json"}, ("parallel.cpu_offload", True)),
    ("accelerate", {"mixed_precision": "bf16"}, ("parallel.precision", "bf16")),
    ("accelerate", {"mixed_precision": "no"}, ("parallel.precision", "fp32")),
    ("accelerate", {"mixed_precision": "fp8"}, "refused"),
    ("accelerate", {"num_processes": 16}, ("cluster.workers", 16)),
    ("accelerate", {"distributed_type": "MULTI_GPU"}, ("parallel.strategy", "replicate")),
    (
        "accelerate",
        {"fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}},
        ("parallel.strategy", "shard_grad_op"),
    ),
    ("accelerate", {"fsdp_config": {"fsdp_sharding_strategy": 3}}, ("parallel.strategy", "replicate")),
    ("accelerate", {"fsdp_config": {"reshard_after_forward": False}}, ("parallel.strategy", "shard_grad_op")),
    (
        "accelerate",
        {"fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}, "num_processes": 16, "num_machines": 4},
        ("parallel.shard_size", 4),
    ),
    ("accelerate", {"fsdp_config": {"fsdp_offload_params": True}}, ("parallel.cpu_offload", True)),
    (
        "accelerate",
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3, "gradient_clipping": 0.5}},
        ("optim.max_grad_norm", 0.5),
    ),
    ("accelerate", {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, ("parallel.compile", True)),
    ("accelerate", {"use_cpu": True}, ("cluster.device", "cpu")),
    ("accelerate", {"deepspeed_config": {"gradient_clipping": "auto"}}, "left"),
    ("accelerate", {"main_process_port": 29500}, "left"),
    ("accelerate", {"fp8_config": {"backend": "TE"}}, "refused"),
]
assert len({(project, *options) for project, options, _ in MEANINGS}) >= 60


@pytest.mark.parametrize(
    ("project", "options", "expected"), MEANINGS, ids=[f"{p}-{json.dumps(o)[1:-1]}"[:60] for p, o, _ in MEANINGS]
)
def test_what_an_option_means(project: str, options: dict[str, Any], expected: Expected, tmp_path: Path) -> None:
    gpus = None if project == "accelerate" else 4
    found = convert(write(tmp_path, {**LEAST[project], **options}), project=project, gpus=gpus)
    if isinstance(expected, tuple):
        assert found.problems == []
        assert ours(found, expected[0]) == expected[1]
        return
    key = next(iter(options))
    lines = [line for line in found.lines if line.said.fate != "default"]
    fates = {line.said.fate for line in lines if line.key == key or line.key.startswith(f"{key}.")}
    assert fates == {expected}
    assert bool(found.problems) == (expected == "refused")
    if expected == "refused":
        without = convert(found_file := str(tmp_path / "theirs.yaml"), project=project, gpus=gpus, drop=list(options))
        assert without.problems == [] and f"without {key}" in without.config(found_file)


@pytest.mark.parametrize("project", LEAST)
def test_defaults_that_are_not_ours_are_written(project: str, tmp_path: Path) -> None:
    named = project if project == "trl-orpo" else None  # all of its options are also those of trl-cpo
    found = convert(write(tmp_path, LEAST[project]), project=named, gpus=None if project in FRAGMENTS else 4)
    assert (found.project.name, found.problems) == (project, [])
    if project == "accelerate":
        assert found.tree == {
            "parallel": {"strategy": "full_shard", "precision": "fp32"},
            "cluster": {"workers": 8},
        }
        return
    if project == "deepspeed":
        assert found.tree == {"parallel": {"strategy": "full_shard", "precision": "bf16"}}
        return
    expected: dict[str, dict[str, Any]] = {
        "axolotl": {
            "run": {"name": "model-out", "storage": ".", "seed": 42},
            "data.seq_len": 512,
            "data.packing": "none",
            "data.long_documents": "drop",
            "parallel.precision": "bf16_pure",
            "optim": {"lr": 1e-4, "weight_decay": 0.0},
            "train": {"global_batch": 4, "micro_batch": 1, "epochs": 1.0},
        },
        "trl": {
            "run": {"name": "trainer_output", "storage": ".", "seed": 42},
            "data.seq_len": 1024,
            "data.packing": "none",
            "data.long_documents": "truncate",
            "parallel": {"activation_checkpointing": "full"},
            "optim": {"lr": 2e-5, "weight_decay": 0.0, "warmup_ratio": 0.0, "schedule": {"type": "linear"}},
            "train": {"global_batch": 32, "micro_batch": 8, "epochs": 3.0},
            "checkpoint.every": 500,
        },
        "llama-factory": {
            "run": {"name": "saves", "storage": ".", "seed": 42},
            "data.packing": "none",
            "data.long_documents": "truncate",
            "parallel": {"precision": "fp32", "activation_checkpointing": "full"},
            "optim": {"weight_decay": 0.0, "warmup_ratio": 0.0, "schedule": {"type": "linear"}},
            "train": {"global_batch": 32, "micro_batch": 8, "epochs": 3.0},
            "checkpoint.every": 500,
        },
        "torchtune": {
            "run": {"name": "torchtune-out", "storage": "."},
            "data.packing": "none",
            "data.train.0.format": {"type": "chat", "messages": "messages", "loss": "assistant"},
            "parallel.precision": "bf16_pure",
            "optim": {
                "lr": 1e-3, "weight_decay": 0.01, "warmup_ratio": 0.0, "schedule": {"type": "constant"},
                "max_grad_norm": None,
            },
            "train": {"global_batch": 4, "micro_batch": 1, "epochs": 1},
            "checkpoint.every": {"per_epoch": 1},
        },
    }  # fmt: skip
    of_pairs: dict[str, Any] = {
        "data.seq_len": 2048,
        "data.packing": "none",
        "data.long_documents": "truncate",
        "optim.lr": 1e-6,
    }
    expected["trl-reward"] = {**of_pairs, "data.long_documents": "drop", "optim.lr": 1e-4}
    expected["trl-gkd"] = {**of_pairs, "data.seq_len": 1024, "optim.lr": 2e-5}
    for field, value in expected.get(project, of_pairs).items():
        assert ours(found, field) == value, field


def test_options_and_defaults_of_the_installed_libraries() -> None:
    """What is assumed of TRL, transformers and accelerate is what they have."""
    of_trl = {**declared("transformers", "training_args.py"), **declared("trl", "trainer/base_config.py")}
    of_trl |= {**declared("trl", "trainer/sft_config.py"), **declared("trl", "trainer/model_config.py")}
    tables = {name: {key.partition(".")[0] for key in project.options} for name, project in PROJECTS.items()}
    assert not of_trl.keys() - tables["trl"]
    shared = {**declared("transformers", "training_args.py"), **declared("trl", "trainer/base_config.py")}
    shared |= declared("trl", "trainer/model_config.py")
    for command in ("dpo", "kto", "orpo", "cpo"):
        place = "trainer" if command in ("dpo", "kto") else f"experimental/{command}"
        own = declared("trl", f"{place}/{command}_config.py")
        assert not (shared.keys() | own.keys()) - tables[f"trl-{command}"]
        assert own["learning_rate"] == 1e-6 and own["max_length"] == 1024 and own["beta"] == 0.1
        assert own.get("disable_dropout") is True
    reward, gkd = declared("trl", "trainer/reward_config.py"), declared("trl", "experimental/gkd/gkd_config.py")
    assert not (shared.keys() | reward.keys()) - tables["trl-reward"]
    assert not (of_trl.keys() | gkd.keys()) - tables["trl-gkd"]
    assert (reward["learning_rate"], reward["max_length"], reward["disable_dropout"]) == (1e-4, 1024, True)
    assert (gkd["lmbda"], gkd["beta"], gkd["disable_dropout"]) == (0.5, 0.5, True)
    assert not declared("transformers", "training_args.py").keys() - tables["llama-factory"]
    assert not declared("accelerate", "commands/config/config_args.py", "ClusterConfig").keys() - tables["accelerate"]
    assumed = {
        "learning_rate": 2e-5,
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "max_grad_norm": 1.0,
        "num_train_epochs": 3.0,
        "max_steps": -1,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "warmup_steps": 0,
        "lr_scheduler_type": "linear",
        "seed": 42,
        "save_steps": 500,
        "save_strategy": "steps",
        "eval_strategy": "no",
        "max_length": 1024,
        "packing": False,
        "packing_strategy": "bfd",
        "gradient_checkpointing": True,
        "dtype": "float32",
        "label_smoothing_factor": 0.0,
    }
    assert {name: of_trl[name] for name in assumed} == assumed


def declared(package: str, file: str, of: str | None = None) -> dict[str, Any]:
    """The fields of the dataclasses in a file, with their defaults, without importing it."""
    spec = find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip(f"{package} is not installed")
    found: dict[str, Any] = {}
    for node in ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text()).body:
        if isinstance(node, ast.ClassDef) and of in (None, node.name):
            for each in node.body:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    found[each.target.id] = default_of(each.value)
    return found


def default_of(value: ast.expr | None) -> Any:
    if isinstance(value, ast.Call):
        value = next((keyword.value for keyword in value.keywords if keyword.arg == "default"), None)
    try:
        return None if value is None else ast.literal_eval(value)
    except ValueError:
        return None


def test_datasets_of_axolotl(tmp_path: Path) -> None:
    sets = [
        {"path": "org/chats", "type": "chat_template", "field_messages": "turns", "name": "en", "revision": "abc"},
        {"path": "rows/", "type": "sharegpt", "roles": {"user": ["asker"], "assistant": ["helper"]}},
        {"path": "json", "data_files": "own.jsonl", "type": "alpaca"},
        {"path": "org/texts", "data_files": "part.parquet", "type": "completion", "field": "body"},
        {
            "path": "few.jsonl",
            "type": "chat_template",
            "split": "train[:50]",
        },
        {"path": "tokens.parquet", "type": None},
    ]
    file = write(tmp_path, {**LEAST["axolotl"], "datasets": sets})
    found = convert(file, gpus=1, drop=["excess_length_strategy"])
    assert found.problems == []
    assert found.tree["data"]["train"] == [
        {"hub": "org/chats", "subset": "en", "revision": "abc", "format": {"type": "chat", "messages": "turns"}},
        {
            "path": "rows/",
            "split": "train",
            "format": {
                "type": "chat",
                "messages": "conversations",
                "roles": {"asker": "user", "helper": "assistant"},
            },
        },
        {"path": "own.jsonl", "format": {"type": "instruction", "style": "alpaca"}},
        {"path": "hf://datasets/org/texts/part.parquet", "format": {"type": "completion", "text": "body"}},
        {"path": "few.jsonl", "rows": {"first": 50}, "format": {"type": "chat"}},
        {"path": "tokens.parquet", "format": {"type": "tokens"}},
    ]


@pytest.mark.parametrize(
    ("dataset", "way_out"),
    [
        ({"type": "alpaca_w_system.load_open_orca"}, "--drop datasets.0 "),
        ({"type": {"field_instruction": "q", "format": "{instruction} {input}"}}, "--drop datasets.0 "),
        ({"type": "chat_template", "roles_to_train": ["tool"]}, "--drop datasets.0.roles_to_train "),
        ({"type": "chat_template", "train_on_eos": "all"}, "--drop datasets.0.train_on_eos "),
        ({"type": "chat_template", "no_such": 1}, "--drop datasets.0.no_such "),
        ({"type": "chat_template", "split": "test"}, "--drop datasets.0.split "),
    ],
)
def test_datasets_of_axolotl_that_are_refused(dataset: dict[str, Any], way_out: str, tmp_path: Path) -> None:
    file = write(tmp_path, {**LEAST["axolotl"], "datasets": [{"path": "rows.jsonl", **dataset}]})
    problems = convert(file, gpus=1).problems
    assert problems and all(way_out in problem for problem in problems)


def test_datasets_of_llama_factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By dataset_info.json, seen from where the command runs."""
    monkeypatch.chdir(EXAMPLES[0].parent)
    least = {**LEAST["llama-factory"], "dataset_dir": "data"}
    found = convert(write(tmp_path, {**least, "dataset": "identity,questions,sharegpt_demo"}), gpus=1)
    assert found.problems == []
    assert found.tree["data"]["train"] == [
        {
            "path": "data/identity.json",
            "format": {
                "type": "python",
                "function": "raytune_fsdp.convert.llama_factory_rows:with_input",
                "then": {
                    "type": "instruction",
                    "style": "chat",
                    "prompt": "instruction",
                    "input": None,
                    "completion": "output",
                },
            },
        },
        {
            "hub": "org/questions",
            "format": {
                "type": "instruction",
                "style": "chat",
                "prompt": "question",
                "input": None,
                "completion": "answer",
            },
        },
        {
            "path": "data/demo.json",
            "format": {
                "type": "chat",
                "messages": "turns",
                "role": "who",
                "content": "what",
                "roles": {"customer": "user", "agent": "assistant"},
                "system": None,
            },
        },
    ]
    for names, expected in (
        ("nothing", "has no map nothing"),
        ("preferences", "with `ranking` is for stages dpo and rm, and these for such datasets"),
        ("pictures", "images is not read here"),
    ):
        assert expected in convert(write(tmp_path, {**least, "dataset": names}), gpus=1).problems[0]
    missing = convert(write(tmp_path, {**least, "dataset": "identity", "dataset_dir": "elsewhere"}), gpus=1)
    assert "run the command where elsewhere is" in missing.problems[0]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "dataset_info.json").write_text("[" * 5_000)
    broken = convert(write(tmp_path, {**least, "dataset": "identity", "dataset_dir": "elsewhere"}), gpus=1)
    assert len(broken.problems) == 1 and "dataset_info.json: it is nested too deeply" in broken.problems[0]


def test_lora_by_default_is_named(tmp_path: Path) -> None:
    """LLaMA-Factory trains an adapter unless the file says otherwise."""
    least = {key: value for key, value in LEAST["llama-factory"].items() if key != "finetuning_type"}
    file = write(tmp_path, {**least, "lora_rank": 6})
    found = convert(file, gpus=1)
    assert found.problems == []
    ours = {"type": "lora", "rank": 6, "alpha": 12, "dropout": 0.0, "target_modules": "all-linear"}
    assert found.tree["method"] == ours
    assert {line.key for line in found.lines if line.said.fate == "default"} >= {"method.type", "method.alpha"}
    assert "method" not in convert(file, gpus=1, drop=["finetuning_type"]).tree
    frozen = convert(write(tmp_path, {**least, "finetuning_type": "freeze", "freeze_trainable_layers": 2}), gpus=1)
    assert {problem.partition("=")[0] for problem in frozen.problems} == {"finetuning_type", "freeze_trainable_layers"}


def test_what_an_adapter_needs_is_asked_for(tmp_path: Path) -> None:
    """PEFT chooses modules by the type of model, which a file does not name."""
    trl = convert(write(tmp_path, {**LEAST["trl"], "use_peft": True}), gpus=1)
    assert [problem.partition(":")[0] for problem in trl.problems] == ["lora_target_modules"]
    assert "q_proj and v_proj in most" in trl.problems[0]
    least = {**LEAST["axolotl"], "adapter": "lora", "lora_target_linear": True}
    axolotl = convert(write(tmp_path, least), gpus=1)
    assert [problem.partition(":")[0] for problem in axolotl.problems] == ["lora_r", "lora_alpha"]
    both = convert(write(tmp_path, {**least, **LORA, "lora_target_modules": ["q_proj"]}), gpus=1)
    assert len(both.problems) == 1 and "lora_target_linear" in both.problems[0]


def test_a_mixture_of_trl(tmp_path: Path) -> None:
    sets = [{"path": "org/a", "fraction": 3}, {"path": "org/b", "fraction": 1, "split": "sft"}]
    least = {**LEAST["trl"], "datasets": sets}
    found = convert(write(tmp_path, least), gpus=1)
    assert found.problems == []
    rows = {"type": "chat", "loss": "all"}
    assert found.tree["data"]["train"] == [
        {"hub": "org/a", "share": 0.75, "format": rows},
        {"hub": "org/b", "split": "sft", "share": 0.25, "format": rows},
    ]
    fates = {line.key: line.said.fate for line in found.lines}
    assert (fates["dataset_name"], fates["datasets.0.fraction"]) == ("left", "carried")


def test_unknown_keys_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, {**LEAST["trl"], "learning_rat": 1e-4, "my_own": {"a": 1}})
    assert main(["convert", file, "--gpus", "1"]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert errors == [
        "error: learning_rat=0.0001: not an option of TRL that is known here; nearest: learning_rate; "
        "--drop learning_rat converts without it",
        'error: my_own={"a": 1}: not an option of TRL that is known here; --drop my_own converts without it',
    ]
    assert main(["convert", file, "--gpus", "1", "--drop", "learning_rat", "my_own"]) == 0
    assert main(["convert", file, "--gpus", "1", "--drop", "learning_rat", "--drop", "my_one"]) == 2
    assert "error: --drop my_one: the file has no such key; nearest: my_own" in capsys.readouterr().err


def test_the_number_of_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, LEAST["axolotl"])
    assert main(["convert", file]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: micro_batch_size=1 x gradient_accumulation_steps=1 is the batch of one GPU, and train.global_batch is "
        "that of all: give the number of GPUs that the file was meant for with --gpus N"
    )
    assert main(["convert", file, "--gpus", "0"]) == 2
    other = write(tmp_path, LEAST["accelerate"])
    assert main(["convert", other]) == 0 and main(["convert", other, "--gpus", "8"]) == 0
    assert main(["convert", other, "--gpus", "4"]) == 2
    assert "num_processes=8 in the file, and --gpus 4" in capsys.readouterr().err


def test_a_wrong_value_is_named_with_both_names(tmp_path: Path) -> None:
    least = {**LEAST["trl"], "learning_rate": "fast", "max_length": -5, "packing": [1]}
    assert convert(write(tmp_path, least), gpus=1).problems == [
        "learning_rate=fast: must be a number; --drop learning_rate converts without it",
        "packing=[1]: must be true or false; --drop packing converts without it",
    ]
    problems = convert(file := write(tmp_path, {**LEAST["trl"], "max_length": -5}), gpus=1).problems
    assert problems == [f"data.seq_len=-5: must be integer >= 2 (from max_length in {file})"]


OTHER_VALUES: list[Any] = [0.5, 1e300, [], {}]
"""Other numbers, and lists and maps without anything."""


@pytest.mark.parametrize("project", PROJECTS)
@pytest.mark.parametrize(
    "value",
    [
        *(None, True, -1, 10**30, math.nan, "no such\n\x1b[2Jthing", "", ["a", 1], {"a": {"b": 1}}, [{"a": 1}]),
        *(pytest.param(value, marks=pytest.mark.slow) for value in OTHER_VALUES),
    ],
    ids=lambda value: str(value)[:12],
)
def test_any_value_of_any_option_gets_its_line(project: str, value: Any, tmp_path: Path) -> None:
    """No value makes it fail, and none is lost: all options of a table at once."""
    content: dict[str, Any] = {}
    # The longest names first, so that a map is there before the value that could stand in its place.
    for name in sorted(PROJECTS[project].options, key=lambda name: -name.count(".")):
        inner = content
        *parents, last = name.replace(".*.", ".0.").removesuffix(".*").split(".")
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner.setdefault(last, deepcopy(value))
    listed = {name: [each["0"]] if isinstance(each, dict) and "0" in each else each for name, each in content.items()}
    found = convert(write(tmp_path, listed), project=project, gpus=4)
    keys = [line.key for line in found.lines if line.value is not None]
    assert len(keys) == len(set(keys)) and {key.partition(".")[0] for key in keys} == set(listed)
    report = found.report().splitlines()
    assert all(line.isprintable() for line in (*found.problems, *report)) and len(report) == len(found.lines) + 1


def test_a_name_longer_than_any_path(tmp_path: Path) -> None:
    found = convert(write(tmp_path, {**LEAST["trl"], "dataset_name": "x" * 5_000, "seed": 10**300}), gpus=1)
    assert [problem.partition("=")[0] for problem in found.problems] == ["seed"]
    assert found.tree["data"]["train"][0]["hub"] == "x" * 5_000


def test_the_project_is_guessed_or_named(tmp_path: Path) -> None:
    assert tuple(PROJECTS) == _PROJECTS
    for path in EXAMPLES:
        assert path.stem.startswith(example(path, drop=True).project.name)
    for content in ({"learning_rate": 1e-4, "output_dir": "x"}, {"a": 1, "b": 2}):
        with pytest.raises(ConfigError, match=r"trainer is unclear .* --from axolotl\|trl\|trl-dpo\|.*\|torchtune\|"):
            convert(write(tmp_path, content))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\x00\xff\xfe\x80", "not UTF-8 text"),
        (b"- a\n- b\n", "is a list, must be a map of options"),
        (b"", "is empty, must be a map"),
        (b"just words", "is a single value"),
        (b"a: [1, 2", "line"),
        (b"a: " + b"[" * 200 + b"]" * 200, "nested deeper than 64 levels"),
        (b"base_model: x\nmodel_config: " + b"{a: " * 65 + b"1" + b"}" * 65, "nested deeper than 64 levels"),
        (b"x: 1\n" * 2_000_000, "has 10000000 bytes, more than"),
        (b"a: !!python/object/apply:os.system [id]", "line 1: could not determine a constructor"),
        (
            b"a: &a [x,x,x,x,x,x,x,x,x]\n"
            + b"".join(b"%c: &%c [%s]\n" % (n, n, b",".join([b"*%c" % (n - 1)] * 9)) for n in b"bcdefghi"),
            "values, with those that aliases repeat",
        ),
        (MERGE_BOMB, "values, with those that aliases repeat"),
        pytest.param(b"- a\n" * 900_000, "values, with those that aliases repeat", marks=pytest.mark.slow),
        (b"a: 0x" + b"f" * 100_000, "a number of more than 4300 digits"),
        (b"a: !" + b"!" * 1_000_000, "could not determine a constructor"),
    ],
    ids=["binary", "list", "empty", "words", "cut", "deep list", "deep map", "10MB", "python", "bomb", "merge bomb",
         "many values", "long number", "long tag"],
)  # fmt: skip
def test_a_hostile_file_is_one_line(
    content: bytes, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = time.process_time()
    assert main(["convert", file := write(tmp_path, content)]) == 2
    assert time.process_time() - start < 10
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith(f"error: {file}: ") and expected in err
    assert len(err) < 2000


@pytest.mark.parametrize("many", [5_000, pytest.param(60_000, marks=pytest.mark.slow)])
def test_the_nearest_option_is_not_looked_for_of_thousands_of_keys(
    many: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = "".join(f"gradient_accumulation_step{n}: 1\n" for n in range(many))
    start = time.process_time()
    assert main(["convert", "--from", "axolotl", write(tmp_path, keys)]) == 2
    assert time.process_time() - start < many / 3000  # it is the parsing that takes time
    assert f"{many} of its {many} keys are not known as options of axolotl" in capsys.readouterr().err


def test_no_file_and_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(tmp_path / "none.yaml")]) == 2
    assert main(["convert", str(tmp_path)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: {tmp_path}/none.yaml: no such file",
        f"error: {tmp_path}: it is a directory, not a regular file",
    ]


def test_secrets_are_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = "hf_" + "abcdefgh" * 4
    file = write(tmp_path, {**LEAST["trl"], "hub_token": secret, "tracking_password": "open sesame"})
    assert main(["convert", file, "--gpus", "1", "--drop", "tracking_password"]) == 0
    out, err = capsys.readouterr()
    assert secret not in out + err and "sesame" not in out + err and "hub_token=<redacted>" in err


def test_what_is_printed_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, LEAST["axolotl"])
    assert main(["convert", "theirs.yaml", "--gpus", "2"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("# Converted from theirs.yaml of axolotl.\nrun:\n  name: model-out\n")
    assert err.startswith("taken for a file of axolotl (it knows 3 of the 3 keys, ")
    assert main(["convert", "theirs.yaml", "--from", "axolotl", "--gpus", "2", "--out", "ours.yaml"]) == 0
    assert capsys.readouterr().out == "written to ours.yaml\nthen: raytune-fsdp data preview --config ours.yaml\n"
    assert (tmp_path / "ours.yaml").read_text() == out
    assert main(["convert", "theirs.yaml", "--gpus", "2", "--out", "ours.yaml"]) == 2
    assert "ours.yaml exists already; name another file, or remove it" in capsys.readouterr().err


def test_it_is_light() -> None:
    heavy = "('torch', 'ray', 'transformers')"
    code = f"import sys, raytune_fsdp.convert.file; print(*[m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m docs.make.coming_from"
