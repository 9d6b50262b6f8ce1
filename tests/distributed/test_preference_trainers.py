"""Preferences by TRL 1.16 and by us: the same tokens count, the same losses, the same gradients, step by step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml

from raytune_fsdp.base.batch import IGNORE, PADDING, Cursor, PackedSample
from raytune_fsdp.cli.main import main
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.load import load_config
from raytune_fsdp.data.stream import Stream
from raytune_fsdp.demo import CONVERSATIONS
from raytune_fsdp.run.prepare import open_as_run
from tests.models import save_checkpoint
from tests.runs import trajectory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed"),  # not imported to collect tests
]

BATCH, STEPS, DIFFERENT, LENGTH = 4, 20, 8, 128
RATES = {False: 2e-3, True: 1e-2}
"""Of all weights, and of adapters."""
ADAM = {"weight_decay": 0.1, "adam_beta2": 0.95, "max_grad_norm": 0.5}


class Case(NamedTuple):
    """What TRL calls an objective, and what it is called here."""

    trainer: str
    theirs: dict[str, Any]
    ours: dict[str, Any]


CASES = {
    "dpo": Case("DPO", {"beta": 0.3}, {"type": "dpo", "beta": 0.3}),
    "dpo hinge": Case("DPO", {"beta": 0.3, "loss_type": "hinge"}, {"type": "dpo", "beta": 0.3, "loss": "hinge"}),
    "dpo robust": Case(
        "DPO",
        {"beta": 0.3, "loss_type": "robust", "label_smoothing": 0.1},
        {"type": "dpo", "beta": 0.3, "loss": "robust", "label_smoothing": 0.1},
    ),
    "dpo by length": Case(
        "DPO", {"beta": 2.0, "loss_type": "sigmoid_norm"}, {"type": "dpo", "beta": 2.0, "normalize": "length"}
    ),
    "dpo and sft": Case(
        "DPO",
        {"beta": 0.3, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7]},
        {"type": "dpo", "beta": 0.3, "sft": {"weight": 0.7}},
    ),
    "ipo": Case("DPO", {"beta": 0.3, "loss_type": "ipo"}, {"type": "ipo", "beta": 0.3}),
    "orpo": Case("ORPO", {"beta": 0.4}, {"type": "orpo", "beta": 0.4}),
    "cpo": Case("CPO", {"beta": 0.2}, {"type": "cpo", "beta": 0.2}),
    "cpo hinge": Case(
        "CPO",
        {"beta": 0.2, "loss_type": "hinge", "cpo_alpha": 0.5},
        {"type": "cpo", "beta": 0.2, "loss": "hinge", "sft": {"weight": 0.5}},
    ),
    "simpo": Case(
        "CPO",
        {"beta": 2.0, "loss_type": "simpo", "simpo_gamma": 0.8, "cpo_alpha": 0.0},
        {"type": "simpo", "beta": 2.0, "gamma": 0.8},
    ),
    "kto": Case(
        "KTO",
        {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.75},
        {"type": "kto", "beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.75},
    ),
}


def rows_of(case: Case) -> list[dict[str, Any]]:
    """A few questions and answers of the demo, again and again; a rejected answer is that of another question."""
    turns = [json.loads(line)["messages"][-2:] for line in CONVERSATIONS.read_text().splitlines()[:DIFFERENT]]
    made: list[dict[str, Any]] = []
    for number in range(BATCH * STEPS):
        question, right = turns[number % DIFFERENT]
        wrong = turns[(number + 1) % DIFFERENT][1]
        if case.trainer == "KTO":
            good = number % 3 > 0
            made.append({"prompt": [question], "completion": [right if good else wrong], "label": good})
        else:
            made.append({"prompt": [question], "chosen": [right], "rejected": [wrong]})
    return made


def config_of(directory: Path, case: Case, adapter: Path | None) -> FinetuneConfig:
    lora = {"type": "lora", "rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    return load_config(
        {
            "run": {"name": "ours", "storage": str(directory / "runs"), "seed": 3},
            "model": {"path": str(directory / "model")},
            "method": {"type": "full"} if adapter is None else {**lora, "adapter": str(adapter)},
            "data": {
                "train": [
                    {
                        "path": str(directory / "rows.jsonl"),
                        "format": {"type": "binary" if case.trainer == "KTO" else "preference"},
                    }
                ],
                "seq_len": 2 * LENGTH,
                "packing": "none",
                "shuffle": "none",
            },
            "parallel": {"precision": "fp32"},
            "optim": {
                "lr": RATES[adapter is not None],
                "weight_decay": ADAM["weight_decay"],
                "beta2": ADAM["adam_beta2"],
                "max_grad_norm": ADAM["max_grad_norm"],
                "warmup_ratio": 0.0,
                "schedule": {"type": "linear"},
            },
            "train": {"global_batch": BATCH, "micro_batch": BATCH, "max_steps": STEPS, "objective": case.ours},
            "tracking": {"console": False, "mlflow": {"enabled": False}},
            "cluster": {"launch": "local", "device": "cpu"},
            "export": {"at_end": False},
        }
    )


def make_adapter(directory: Path) -> Path:
    """An adapter that already changes what the model says."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(directory / "model")
    modules = ["q_proj", "v_proj", "down_proj"]
    options = LoraConfig(r=4, lora_alpha=8, target_modules=modules, init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(base, options).save_pretrained(str(directory / "adapter"))
    return directory / "adapter"


Answer = tuple[list[int], list[int]]
"""The tokens of a prompt, and those of an answer."""


def members_of(sample: PackedSample) -> Iterator[Answer]:
    """The documents of a sample."""
    assert sample.columns is not None
    starts = np.flatnonzero((sample.position_ids == 0) & (sample.source_ids != PADDING)).tolist()
    end = int((sample.source_ids != PADDING).sum())
    for first, last in zip(starts, [*starts[1:], end], strict=True):
        ids, labels = sample.input_ids[first:last].tolist(), sample.labels[first:last]
        begin = int(np.flatnonzero(labels != IGNORE)[0] + sample.columns[3, first])
        yield ids[:begin], ids[begin:]


def tokens_of(rows: Any, trainer: str) -> list[tuple[Answer, Answer]]:
    """What counts of each row of a dataset that TRL has prepared; KTO's second answer is the mismatched one."""
    found = []
    for row in rows:
        if trainer in ("DPO", "KTO"):
            names = ("chosen_ids", "rejected_ids") if trainer == "DPO" else ("completion_ids", "KL_completion_ids")
            first, second = ((row["prompt_ids"], row[name]) for name in names)
        else:
            first, second = (_split(row[f"{side}_input_ids"], row[f"{side}_labels"]) for side in ("chosen", "rejected"))
        found.append((first, second))
    return found


def _split(ids: list[int], labels: list[int]) -> Answer:
    begin = sum(label == IGNORE for label in labels)
    return ids[:begin], ids[begin:]


def trainer_of(directory: Path, case: Case, adapter: Path | None) -> Any:
    """TRL's trainer of the rows in their order, all of a step in one batch."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = import_module("trl" if case.trainer in ("DPO", "KTO") else f"trl.experimental.{case.trainer.lower()}")
    options = getattr(place, f"{case.trainer}Config")(
        output_dir=str(directory / "theirs"), use_cpu=True, bf16=False, gradient_checkpointing=False,
        per_device_train_batch_size=BATCH, max_steps=STEPS, max_length=LENGTH, lr_scheduler_type="linear",
        warmup_steps=0, logging_steps=1, save_strategy="no", report_to="none", seed=3, disable_tqdm=True,
        train_sampling_strategy="sequential", learning_rate=RATES[adapter is not None], **ADAM, **case.theirs,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(directory / "model")
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    return getattr(place, f"{case.trainer}Trainer")(
        model=model,
        args=options,
        train_dataset=Dataset.from_list(rows_of(case)),
        processing_class=AutoTokenizer.from_pretrained(directory / "model"),
    )


RUNS = [(name, adapted) for name in CASES for adapted in (False, True)]


@pytest.mark.parametrize(
    ("name", "adapted"),
    RUNS,
    ids=[f"{name} {'lora' if adapted else 'full'}" for name, adapted in RUNS],
)
def test_an_objective_is_trl_s(name: str, adapted: bool, tmp_path: Path) -> None:
    case = CASES[name]
    save_checkpoint(tmp_path / "model", "llama", tokenizer=True, vocab_size=1024, max_position_embeddings=2 * LENGTH)
    adapter = make_adapter(tmp_path) if adapted else None
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(case)))
    config = config_of(tmp_path, case, adapter)
    _, windows, _ = open_as_run(config)
    samples = [each.sample for each in islice(Stream(windows, seed=0).samples(Cursor()), BATCH * STEPS)]
    ours = [tuple(members_of(sample)) for sample in samples]

    trainer = trainer_of(tmp_path, case, adapter)
    if case.trainer == "KTO":  # the mismatched answers are ours: TRL's are those of the rows before
        other = [second[1] for _, second in ours]
        trainer.train_dataset = trainer.train_dataset.map(
            lambda _, number: {"KL_completion_ids": other[number]}, with_indices=True
        )
    assert ours == tokens_of(trainer.train_dataset, case.trainer), "tokens, and which of them are the answer's"
    trainer.train()
    logged = [row for row in trainer.state.log_history if "loss" in row]

    steps = trajectory(config, world=1)
    assert len(steps) == len(logged) == STEPS
    for found, wanted in zip(steps, logged, strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5, abs=1e-5)
        assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
        assert found["lr"] == pytest.approx(wanted["learning_rate"], rel=1e-6)
    again = STEPS - DIFFERENT // BATCH  # a step of the first one's rows
    assert abs(steps[again]["loss"] / steps[0]["loss"] - 1) > 5e-4, "it has learned something"


def test_a_converted_file_is_the_same_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One file for `trl dpo --config`, by TRL as it is and by us as `convert` makes it; all rows are in every step."""
    trl, scripts = import_module("trl"), import_module("trl.scripts.utils")
    save_checkpoint(tmp_path / "model", "llama", tokenizer=True, vocab_size=1024, max_position_embeddings=2 * LENGTH)
    rows = rows_of(CASES["dpo"])[:DIFFERENT]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    theirs = {
        "model_name_or_path": str(tmp_path / "model"), "dtype": "float32", "bf16": False,
        "datasets": [{"path": "json", "data_files": str(tmp_path / "rows.jsonl")}],
        "output_dir": str(tmp_path / "theirs"), "max_length": LENGTH, "max_steps": 6, "beta": 0.2,
        "loss_type": ["sigmoid_norm", "sft"], "loss_weights": [1.0, 0.3], "precompute_ref_log_probs": True,
        "per_device_train_batch_size": DIFFERENT, "gradient_checkpointing": False, "logging_steps": 1,
        "learning_rate": 2e-3, "save_strategy": "no", "report_to": "none", **ADAM,
    }  # fmt: skip
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(theirs))
    ours = tmp_path / "ours.yaml"
    assert main(["convert", str(file), "--gpus", "1", "--out", str(ours)]) == 0, capsys.readouterr().err
    changes = ["--cluster.device", "cpu", "--tracking.mlflow.enabled", "false", "--train.micro_batch", "4"]
    config = load_config(ours, [*changes, "--data.train.0.format.style", "chat"])  # rows of messages, as `convert` says

    parser = trl.TrlParser((trl.ScriptArguments, trl.DPOConfig, trl.ModelConfig, scripts.DatasetMixtureConfig))
    _, options, model, mixture = parser.parse_args_and_config(["--config", str(file), "--use_cpu", "true"])
    options.model_init_kwargs, options.disable_tqdm = {"dtype": model.dtype}, True
    data = trl.get_dataset(mixture)["train"]
    trainer = trl.DPOTrainer(model=model.model_name_or_path, args=options, train_dataset=data)
    trainer.train()
    logged = [row for row in trainer.state.log_history if "loss" in row]

    steps = trajectory(config, world=2)
    assert len(steps) == len(logged) == 6
    for found, wanted in zip(steps, logged, strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
        assert found["lr"] == pytest.approx(wanted["learning_rate"], rel=1e-6)
