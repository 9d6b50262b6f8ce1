"""What people write who use Ray Train directly: the other side of benchmarks/startup.py.

    python -m benchmarks.bare_ray_train CONFIG MARKS [--dashboard]

CONFIG is a config of ours; of it are the model, the batch, the stream and the steps. The script starts a Ray of
$BENCHMARK_CPUS logical CPUs, or joins the cluster at $RAY_ADDRESS. A failure of ranks is answered with another try, and
the same command again goes on from the newest checkpoint (it has a name and a storage path). MARKS gets a line for each
thing that is done, with the time. The stream is ours, through TorchTrainer's `datasets`; after a failure it begins
anew, as Ray Data does. All else is as in Ray's guide to FSDP2: `fully_shard`, torch.distributed.checkpoint into a
temporary directory, `ray.train.report`, `ray.train.get_checkpoint`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed.checkpoint as dcp
import yaml
from ray.train import Checkpoint, DataConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from raytune_fsdp import config as ours
from raytune_fsdp.base.batch import Cursor
from raytune_fsdp.data.stream import Stream
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.launch.ray.tasks.batches import ray_batches
from raytune_fsdp.launch.ray.tasks.stream import split, stream_dataset
from raytune_fsdp.plan.division import Division


def mark(path: str, what: str, **values: Any) -> None:
    with open(path, "a") as file:
        file.write(json.dumps({"what": what, "time": time.time(), "pid": os.getpid(), **values}) + "\n")


class Noticed(ray.train.UserCallback):
    def __init__(self, marks: str) -> None:
        self.marks = marks

    def after_exception(self, run_context: Any, worker_exceptions: Any) -> None:
        mark(self.marks, "noticed")


class StreamSplit(DataConfig):
    """Our stream is in blocks of one size, so they are handed out in turn and not cut into equal halves."""

    def configure(self, datasets: Any, world_size: int, *_: Any, **__: Any) -> list[dict[str, Any]]:
        return [{"train": shard} for shard in split(datasets["train"], world_size)]


def build_model(architecture: dict[str, Any]) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture), dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


class Training:
    """Model and optimizer, as torch.distributed.checkpoint wants them."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def save(training: Training, step: int, metrics: dict[str, float]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        dcp.save({"training": training}, checkpoint_id=directory)
        Path(directory, "step.json").write_text(json.dumps(step))
        ray.train.report({"step": step, **metrics}, checkpoint=Checkpoint.from_directory(directory))


def evaluate(model: torch.nn.Module, texts: list[list[int]]) -> dict[str, float]:
    """The mean loss of a token, of texts that are padded eight at a time; each rank has its part of them."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    sums = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for first in range(0, len(texts), 8 * world):
            mine = texts[first + 8 * rank : first + 8 * (rank + 1)] or texts[:1]  # every rank takes part in every pass
            longest = max(map(len, mine))
            ids = torch.tensor([each + [0] * (longest - len(each)) for each in mine])
            mask = torch.tensor([[1] * len(each) + [0] * (longest - len(each)) for each in mine])
            tokens = int(mask[:, 1:].sum())
            loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
            sums += torch.tensor([loss.item() * tokens, tokens])
    model.train()
    torch.distributed.all_reduce(sums)
    return {"loss": (sums[0] / sums[1]).item()}


def resume(training: Training) -> int:
    """The step after which the run goes on."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as directory:
        dcp.load({"training": training}, checkpoint_id=directory)
        return int(json.loads(Path(directory, "step.json").read_text()))


def train(given: dict[str, Any]) -> None:
    rank, config, division = ray.train.get_context().get_world_rank(), given["config"], given["division"]
    tell = partial(mark, given["marks"]) if rank == 0 else lambda *_, **__: None
    mark(given["marks"], "rank", rank=rank, node_id=ray.get_runtime_context().get_node_id())
    tell("workers")
    model = build_model(config["model"]["architecture"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["optim"]["lr"], fused=True)
    training = Training(model, optimizer)
    done = resume(training)
    tell("model")
    last = config["train"]["max_steps"]
    shard, steps = ray.train.get_dataset_shard("train"), range(1, last + 1)
    batches = ray_batches(shard, given["windows"], division, steps, data_rank=rank)
    for step in range(done + 1, last + 1):
        blocks = next(batches).micro_batches
        if step == done + 1:
            tell("data")
        for block in blocks:
            loss = model(input_ids=block.input_ids, labels=block.labels.long(), position_ids=block.position_ids).loss
            (loss / len(blocks)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tell("step", step=step, loss=loss.item())
        if step % config["checkpoint"]["every"] == 0:
            measured = evaluate(model, given["texts"]) if given["texts"] else {}
            save(training, step, measured)
            tell("saved", step=step)


def trainer_of(config: dict[str, Any], marks: str, callbacks: list[Any], texts: list[list[int]]) -> TorchTrainer:
    """`texts`: tokens of what is evaluated whenever a checkpoint is saved."""
    tokenizer = AutoTokenizer.from_pretrained(config["model"]["tokenizer"])
    data, run = ours.DataConfig.model_validate(config["data"]), config["run"]
    windows = Windows(
        data.train, data, seed=run["seed"], tokenizer=tokenizer, vocab_size=len(tokenizer),
        cache=Path(run["storage"]) / "cache",
    )  # fmt: skip
    sizes = config["train"]
    division = Division(
        total_samples=None, global_batch=sizes["global_batch"], micro_batch=sizes["micro_batch"],
        data_ranks=config["cluster"]["workers"],
    )  # fmt: skip
    given = {"config": config, "windows": windows, "division": division, "marks": marks, "texts": texts}
    return TorchTrainer(
        train,
        train_loop_config=given,
        datasets={
            "train": lambda: stream_dataset(
                Stream(windows, seed=run["seed"]),
                Cursor(),
                micro_batch=division.micro_batch,
                samples=sizes["max_steps"] * sizes["global_batch"],
            )
        },
        dataset_config=StreamSplit(),
        scaling_config=ScalingConfig(
            num_workers=division.data_ranks,
            resources_per_worker={"CPU": 1, **config["cluster"].get("resources_per_worker", {})},
        ),
        run_config=RunConfig(
            name=run["name"],
            storage_path=run["storage"],
            failure_config=FailureConfig(max_failures=3),
            callbacks=callbacks,
        ),
    )


def main() -> None:
    marks = sys.argv[2]
    mark(marks, "start")
    if "BENCHMARK_CPUS" in os.environ:
        ray.init(num_cpus=int(os.environ["BENCHMARK_CPUS"]), include_dashboard="--dashboard" in sys.argv)
    else:
        ray.init()
    mark(marks, "Ray")
    trainer = trainer_of(yaml.safe_load(Path(sys.argv[1]).read_text()), marks, [Noticed(marks)], [])
    mark(marks, "checks")
    trainer.fit()


if __name__ == "__main__":
    main()
