"""Rewards by TRL 1.16, classes and numbers by transformers' Trainer, and all by us: equal losses and gradients."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.base.batch import Cursor
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.load import load_config
from raytune_fsdp.data.stream import Stream
from raytune_fsdp.demo import CONVERSATIONS
from raytune_fsdp.run.prepare import open_as_run
from tests.models import ARCHITECTURES, add_tokenizer
from tests.runs import trajectory
from tests.scores import documents_in

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed"),  # not imported to collect tests
]

BATCH, STEPS, DIFFERENT, LENGTH, RATE = 4, 20, 8, 128, 2e-3
ADAM = {"weight_decay": 0.1, "adam_beta2": 0.95, "max_grad_norm": 0.5}


def save_scoring(directory: Path, outputs: int, kind: str = "llama", **changes: Any) -> Path:
    """A model of transformers' class for scores, as transformers writes it, with the demo's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    values = {**ARCHITECTURES[kind], "vocab_size": 1024, "max_position_embeddings": 2 * LENGTH, **changes}
    torch.manual_seed(4)
    config = AutoConfig.for_model(kind, num_labels=outputs, **values)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # as large as in tests.models: tiny gradients would be Adam's rounding
            parameter.normal_(0.1, 0.1)
    model.save_pretrained(directory)
    add_tokenizer(directory)
    return directory


def rows_of(kind: str) -> list[dict[str, Any]]:
    """A few questions and answers of the demo, again and again."""
    turns = [json.loads(line)["messages"][-2:] for line in CONVERSATIONS.read_text().splitlines()[:DIFFERENT]]
    made: list[dict[str, Any]] = []
    for number in range(BATCH * STEPS):
        question, right = turns[number % DIFFERENT]
        wrong = turns[(number + 1) % DIFFERENT][1]
        if kind == "reward":
            margin = number % DIFFERENT % 3 / 4
            made.append({"prompt": [question], "chosen": [right], "rejected": [wrong], "margin": margin})
        else:
            made.append({"text": right["content"], "label": number % DIFFERENT % 3, "score": number % DIFFERENT / 7})
    return made


def config_of(directory: Path, kind: str, center: float) -> FinetuneConfig:
    format = {
        "type": "score",
        "text": "text",
        **({"label": "label"} if kind == "classification" else {"score": "score"}),
    }
    if kind == "reward":
        format = {"type": "preference", "margin": "margin"}
    head = {"type": "score", "outputs": 3 if kind == "classification" else 1}
    return load_config(
        {
            "run": {"name": "ours", "storage": str(directory / "runs"), "seed": 3},
            "model": {"path": str(directory / "model"), "head": head},
            "data": {
                "train": [{"path": str(directory / "rows.jsonl"), "format": format}],
                "seq_len": 2 * LENGTH,
                "packing": "none",
                "shuffle": "none",
            },
            "parallel": {"precision": "fp32"},
            "optim": {
                "lr": RATE,
                "weight_decay": ADAM["weight_decay"],
                "beta2": ADAM["adam_beta2"],
                "max_grad_norm": ADAM["max_grad_norm"],
                "warmup_ratio": 0.0,
                "schedule": {"type": "linear"},
                "groups": [{"match": "embed_tokens", "weight_decay": ADAM["weight_decay"]}],  # theirs decays, too
            },
            "train": {
                "global_batch": BATCH,
                "micro_batch": BATCH,
                "max_steps": STEPS,
                "objective": {"type": kind, **({"center": center} if kind == "reward" else {})},
            },
            "tracking": {"console": False, "mlflow": {"enabled": False}},
            "cluster": {"launch": "local", "device": "cpu"},
            "export": {"at_end": False},
        }
    )


def options_of(directory: Path) -> dict[str, Any]:
    return {
        "output_dir": str(directory / "theirs"), "use_cpu": True, "bf16": False, "per_device_train_batch_size": BATCH,
        "max_steps": STEPS, "lr_scheduler_type": "linear", "warmup_steps": 0, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "seed": 3, "disable_tqdm": True, "train_sampling_strategy": "sequential",
        "learning_rate": RATE, **ADAM,
    }  # fmt: skip


def by_trl(directory: Path, center: float) -> Any:
    """TRL's trainer of the rows in their order, all of a step in one batch."""
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    trl = import_module("trl")
    return trl.RewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(directory / "model"),
        args=trl.RewardConfig(
            gradient_checkpointing=False, max_length=LENGTH, center_rewards_coefficient=center, **options_of(directory)
        ),
        train_dataset=Dataset.from_list(rows_of("reward")),
        processing_class=AutoTokenizer.from_pretrained(directory / "model"),
    )


def by_transformers(directory: Path, kind: str, documents: list[list[int]], pad: int) -> Any:
    """transformers' trainer of the tokens of our documents, in their order."""
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, Trainer
    from transformers import TrainingArguments as Arguments

    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    tokenizer.pad_token_id = pad
    model = AutoModelForSequenceClassification.from_pretrained(directory / "model")
    model.config.pad_token_id = pad
    column = "label" if kind == "classification" else "score"
    rows = [{"input_ids": ids, "labels": row[column]} for ids, row in zip(documents, rows_of(kind), strict=True)]
    return Trainer(
        model=model, args=Arguments(**options_of(directory)), train_dataset=Dataset.from_list(rows),
        data_collator=DataCollatorWithPadding(tokenizer),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "center"),
    [("reward", 0.2), ("reward", 0.0), ("classification", 0.0), ("regression", 0.0)],
)
def test_an_objective_of_scores_is_theirs(kind: str, center: float, tmp_path: Path) -> None:
    save_scoring(tmp_path / "model", 3 if kind == "classification" else 1)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(kind)))
    config = config_of(tmp_path, kind, center)
    _, windows, _ = open_as_run(config)
    samples = [each.sample for each in islice(Stream(windows, seed=0).samples(Cursor()), BATCH * STEPS)]
    ours = [[list(each.ids) for each in documents_in(sample)] for sample in samples]
    if kind == "reward":
        trainer = by_trl(tmp_path, center)
        assert ours == [[row["chosen_ids"], row["rejected_ids"]] for row in trainer.train_dataset], "the same tokens"
    else:
        assert windows.scoring is not None
        trainer = by_transformers(tmp_path, kind, [ids for (ids,) in ours], windows.scoring.pad_token)
    trainer.train()
    logged = [row for row in trainer.state.log_history if "loss" in row]

    steps = trajectory(config, world=1)
    assert len(steps) == len(logged) == STEPS
    for found, wanted in zip(steps, logged, strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5, abs=1e-5)
        assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
        assert found["lr"] == pytest.approx(wanted["learning_rate"], rel=1e-6)
    again = STEPS - DIFFERENT // BATCH  # a step of the first one's rows
    assert abs(steps[again]["loss"] / steps[0]["loss"] - 1) > 1e-4, "it has learned something"
