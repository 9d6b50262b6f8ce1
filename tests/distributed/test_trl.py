"""One YAML file, trained on by TRL as it is and by us as `convert` makes it: the same tokens count, the same losses."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

from raytune_fsdp.base.batch import PADDING, Cursor
from raytune_fsdp.cli.main import main
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

ROWS, STEPS = 12, 6


def theirs(directory: Path) -> dict[str, Any]:
    """The content of a file for `trl sft --config`. All rows are in every batch, as the two shuffle differently."""
    return {
        "model_name_or_path": str(directory / "model"),
        "datasets": [{"path": "json", "data_files": str(directory / "rows.jsonl")}],
        "output_dir": str(directory / "theirs"),
        "dtype": "float32",
        "bf16": False,
        "assistant_only_loss": True,
        "packing": False,
        "max_length": 128,
        "per_device_train_batch_size": ROWS // 2,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": False,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0,  # transformers begins with a step at a rate of 0, and we do not
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "seed": 3,
    }


def trained_by_trl(file: Path) -> tuple[list[tuple[list[int], list[int]]], list[dict[str, float]]]:
    """What counts of each row, and what was logged of each step."""
    from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_dataset
    from trl.scripts.utils import DatasetMixtureConfig

    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig))
    _, options, model, mixture = parser.parse_args_and_config(["--config", str(file), "--use_cpu", "true"])
    options.model_init_kwargs = {"dtype": model.dtype}
    options.disable_tqdm = True
    trainer = SFTTrainer(model=model.model_name_or_path, args=options, train_dataset=get_dataset(mixture)["train"])
    seen = []
    for batch in trainer.get_train_dataloader():
        for ids, labels, kept in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
            long = int(kept.sum())
            seen.append((ids[:long].tolist(), labels[:long].tolist()))
    trainer.train()
    return seen, [row for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("world", [1, 2])
def test_a_converted_file_is_the_same_training(tmp_path: Path, world: int, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint(tmp_path / "model", "llama", tokenizer=True, vocab_size=1024)
    lines = CONVERSATIONS.read_text().splitlines(keepends=True)[:ROWS]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(theirs(tmp_path)))
    ours = tmp_path / "ours.yaml"
    assert main(["convert", str(file), "--gpus", "1", "--out", str(ours)]) == 0, capsys.readouterr().err
    config = load_config(ours, ["--cluster.device", "cpu", "--tracking.mlflow.enabled", "false"])
    _, windows, _ = open_as_run(config)
    rows = [each.sample for each in islice(Stream(windows, seed=0).samples(Cursor()), ROWS)]
    masks = []
    for row in rows:
        long = int((row.source_ids != PADDING).sum())
        masks.append((row.input_ids[:long].tolist(), row.labels[:long].tolist()))
    seen, logged = trained_by_trl(file)
    assert sorted(masks) == sorted(seen), "tokens, and which of them count"

    steps = trajectory(config, world)
    assert len(steps) == len(logged) == STEPS
    for found, wanted in zip(steps, logged, strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
        assert found["lr"] == pytest.approx(wanted["learning_rate"], rel=1e-6)
    assert steps[-1]["loss"] < 0.97 * steps[0]["loss"], "it has learned something"
