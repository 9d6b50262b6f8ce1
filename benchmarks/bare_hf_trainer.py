"""What people write who use Hugging Face's Trainer under Ray Train: the other side of benchmarks/end_to_end.py.

    python -m benchmarks.bare_hf_trainer CONFIG MARKS

CONFIG is a config of ours; of it are the files, the model, the batch and the steps. MARKS gets a line for each step of
rank 0. As in Ray's guide to Transformers and in Hugging Face's example of causal language modelling: rows are read by
Ray Data, tokenized, concatenated and cut into sequences of one length by `map_batches` (documents see each
other; what is left over of a batch is dropped), and reach Trainer through `prepare_trainer`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.train
import torch
import yaml
from ray.train import RunConfig, ScalingConfig
from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


def tokenize(batch: dict[str, Any], tokenizer: Any, seq_len: int) -> dict[str, np.ndarray]:
    ends = [text + tokenizer.eos_token for text in batch["text"]]
    ids = np.concatenate([np.array(row) for row in tokenizer(ends, add_special_tokens=False)["input_ids"]])
    sequences = ids[: len(ids) // seq_len * seq_len].reshape(-1, seq_len)
    return {"input_ids": sequences, "labels": sequences.copy()}


class TimedIterator:
    """Notes how long it took to get what it gives."""

    def __init__(self, inner: Iterator[Any]) -> None:
        self.inner, self.seconds = inner, 0.0

    def __iter__(self) -> TimedIterator:
        return self

    def __next__(self) -> Any:
        since = time.perf_counter()
        try:
            return next(self.inner)
        finally:
            self.seconds += time.perf_counter() - since


class Timed(Trainer):
    """Notes how long it waits for the batches of a step."""

    waited = 0.0

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *arguments: Any, **named: Any) -> Any:
        timed = TimedIterator(epoch_iterator)
        found = super().get_batch_samples(timed, *arguments, **named)
        self.waited = timed.seconds
        return found


class Marks(TrainerCallback):
    def __init__(self, path: str, trainer: Timed) -> None:
        self.path, self.trainer = path, trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            line = {"step": state.global_step, "time": time.time(), "waited": self.trainer.waited}
            with open(self.path, "a") as file:
                file.write(json.dumps(line) + "\n")


def train(given: dict[str, Any]) -> None:
    config, marks = given["config"], given["marks"]
    sizes, world = config["train"], ray.train.get_context().get_world_size()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config["model"]["architecture"]), dtype=torch.float32
    )
    with tempfile.TemporaryDirectory() as directory:
        trainer = Timed(
            model=model,
            args=TrainingArguments(
                output_dir=directory,
                max_steps=sizes["max_steps"],
                per_device_train_batch_size=sizes["micro_batch"],
                gradient_accumulation_steps=sizes["global_batch"] // sizes["micro_batch"] // world,
                learning_rate=config["optim"]["lr"],
                max_grad_norm=1.0,
                logging_steps=1,
                save_steps=sizes["max_steps"],
                report_to="none",
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=ray.train.get_dataset_shard("train").iter_torch_batches(
                batch_size=sizes["micro_batch"], dtypes=torch.long
            ),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Marks(marks, trainer))
        trainer.add_callback(RayTrainReportCallback())
        prepare_trainer(trainer).train()


def main() -> None:
    config, marks = yaml.safe_load(Path(sys.argv[1]).read_text()), sys.argv[2]
    ray.init(num_cpus=int(os.environ["BENCHMARK_CPUS"]), include_dashboard=False)
    data = config["data"]
    tokenizer = AutoTokenizer.from_pretrained(config["model"]["tokenizer"])
    dataset = ray.data.read_json([each["path"] for each in data["train"]], lines=True).map_batches(
        partial(tokenize, tokenizer=tokenizer, seq_len=data["seq_len"]), batch_size=1000
    )
    TorchTrainer(
        train,
        train_loop_config={"config": config, "marks": marks},
        datasets={"train": dataset},
        scaling_config=ScalingConfig(num_workers=config["cluster"]["workers"]),
        run_config=RunConfig(name=config["run"]["name"], storage_path=config["run"]["storage"]),
    ).fit()


if __name__ == "__main__":
    main()
