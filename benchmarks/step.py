"""What the training loop costs above a bare PyTorch loop: processor time per token, same model, weights and batches.

    python benchmarks/step.py [--rounds 7] [--steps 10] [--out benchmarks/results/step.json]

One process, one thread, fp32, AdamW fused, clipping at 1.0. Every round runs every variant once, in an order that
rotates; a variant's first two steps and everything before and after its loop do not count. What counts is the time of
all threads of the process (`time.process_time`), from the start of step 3 to the start of the last step. The bare loop
runs twice in every round: the difference between the two is the noise, their mean is what the others are compared with.

- bare: the Hugging Face model with its own loss, zero_grad, clip, step, a scheduler; batches lie ready as tensors
- ours: `assemble` and `loop.train`, metrics fetched and written to metrics.jsonl and to a console on /dev/null at every
  step, rows read and packed while it trains
- ours, MLflow: the same with MLflow on SQLite, its thread counted too
- HF Trainer: logs at every step (needs accelerate and datasets)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from common import quiet, write_result

quiet()
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from raytune_fsdp.assemble import assemble
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.demo import TOKENIZER
from raytune_fsdp.launch.worker import join
from raytune_fsdp.loop import train
from raytune_fsdp.prepare import prepare
from raytune_fsdp.tracking.jsonl import read_trajectory

SEQ_LEN, BATCH, VOCABULARY, LR = 512, 4, 8192, 1e-4
WARMUP_STEPS = 2
BARE, BARE_AGAIN, OURS, OURS_MLFLOW, TRAINER = "bare", "bare, again", "ours", "ours, MLflow", "HF Trainer"


class Marks:
    """Processor time at the start of every step; the loss of every step, to see that the variants do the same."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def mark(self) -> bool:
        self.seconds.append(time.process_time())
        return False

    def per_token(self) -> float:
        measured = self.seconds[WARMUP_STEPS:]
        return (measured[-1] - measured[0]) / ((len(measured) - 1) * SEQ_LEN * BATCH)


def make_inputs(directory: Path, total_steps: int) -> np.ndarray:
    """Write the weights and the rows that all variants use; the rows also as an array."""
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=4096, tie_word_embeddings=False, use_cache=False,
        )  # fmt: skip
    ).save_pretrained(directory / "model")
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (total_steps * BATCH, SEQ_LEN))
    with (directory / "rows.jsonl").open("w") as file:
        file.writelines(json.dumps({"input_ids": row.tolist()}) + "\n" for row in ids)
    return ids


def bare(directory: Path, ids: np.ndarray) -> Marks:
    model = LlamaForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    batches = torch.from_numpy(ids).reshape(-1, BATCH, SEQ_LEN)
    marks = Marks()
    losses = []
    for batch in batches:
        marks.mark()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    marks.losses = torch.stack(losses).tolist()
    return marks


def ours(directory: Path, ids: np.ndarray, *, mlflow: bool) -> Marks:
    storage = Path(tempfile.mkdtemp(dir=directory))
    rows = {"path": str(directory / "rows.jsonl"), "format": {"type": "tokens", "labels": None}}
    config = FinetuneConfig.model_validate(
        {
            "run": {"name": "step", "storage": str(storage)},
            "model": {"path": str(directory / "model"), "tokenizer": str(TOKENIZER)},
            # Windows of four steps: the work of building them falls into the measured time at its true rate.
            "data": {"train": [rows], "seq_len": SEQ_LEN, "packing": "none", "shuffle": "none", "window": 4 * BATCH},
            "parallel": {"precision": "fp32"},
            "optim": {"lr": LR, "weight_decay": 0.0, "warmup_steps": 0, "schedule": {"type": "constant"}},
            "train": {"global_batch": BATCH, "micro_batch": BATCH, "max_steps": len(ids) // BATCH},
            "tracking": {"mlflow": {"enabled": mlflow}},
        }
    )
    device = torch.device("cpu")
    marks = Marks()
    join(device, alone=True)
    try:
        parts = assemble(config, prepare(config, 1), device)
        parts.tracker.state()  # waits until MLflow is imported and its run open: that is start-up, not training
        train(parts, stop=marks.mark)
        parts.tracker.finish("finished")
    finally:
        dist.destroy_process_group()
    marks.losses = [line["loss"] for line in read_trajectory(parts.plan.run_dir / "metrics.jsonl")]
    shutil.rmtree(storage)
    return marks


def trainer(directory: Path, ids: np.ndarray) -> Marks:
    from datasets import Dataset
    from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

    marks = Marks()

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: object, **kwargs: object) -> None:
            marks.mark()

    arguments = TrainingArguments(
        output_dir=str(directory / "trainer"), per_device_train_batch_size=BATCH, max_steps=len(ids) // BATCH,
        learning_rate=LR, weight_decay=0.0, optim="adamw_torch_fused", lr_scheduler_type="constant", max_grad_norm=1.0,
        train_sampling_strategy="sequential", logging_steps=1, report_to="none", save_strategy="no", use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    model = LlamaForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
    dataset = Dataset.from_dict({"input_ids": ids, "labels": ids})
    run = Trainer(model=model, args=arguments, train_dataset=dataset, data_collator=default_data_collator,
                  callbacks=[Clock()])  # fmt: skip
    run.train()
    marks.losses = [line["loss"] for line in run.state.log_history if "loss" in line]
    return marks


def variants(directory: Path, ids: np.ndarray) -> dict[str, Callable[[], Marks]]:
    found: dict[str, Callable[[], Marks]] = {
        BARE: lambda: bare(directory, ids),
        OURS: lambda: ours(directory, ids, mlflow=False),
        BARE_AGAIN: lambda: bare(directory, ids),
        OURS_MLFLOW: lambda: ours(directory, ids, mlflow=True),
    }
    try:
        import accelerate
        import datasets  # noqa: F401
    except ImportError:
        print("no HF Trainer row: it needs accelerate and datasets")
    else:
        found[TRAINER] = lambda: trainer(directory, ids)
    return found


def measure(rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds per token of every variant in every round."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        ids = make_inputs(directory, WARMUP_STEPS + steps + 1)
        chosen = variants(directory, ids)
        names = list(chosen)
        for number in range(rounds):
            turn = number % len(names)
            losses = {}
            for variant in [*names[turn:], *names[:turn]]:
                with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                    marks = chosen[variant]()
                found.setdefault(variant, []).append(marks.per_token())
                losses[variant] = marks.losses
            _same(losses)
            shown = "  ".join(f"{variant} {1e6 * found[variant][-1]:.1f}" for variant in names)
            print(f"round {number + 1}, load {os.getloadavg()[0]:.1f}, us per token: {shown}", flush=True)
    return {variant: found[variant] for variant in names}


def _same(losses: dict[str, list[float]]) -> None:
    for variant, values in losses.items():
        np.testing.assert_allclose(values, losses[BARE], rtol=1e-5, err_msg=f"{variant} trains something else")


def summarize(found: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Median time per token and median ratio to the mean of the round's two bare runs, with the ratios' range."""
    bare_mean = [(a + b) / 2 for a, b in zip(found[BARE], found[BARE_AGAIN], strict=True)]
    table = {}
    for variant, values in found.items():
        ratios = [value / base for value, base in zip(values, bare_mean, strict=True)]
        table[variant] = {
            "us_per_token": 1e6 * median(values),
            "ratio": median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
        }
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="measured steps of a variant in a round")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "step.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(arguments.rounds, arguments.steps)
    table = summarize(found)
    noise = [b / a - 1 for a, b in zip(found[BARE], found[BARE_AGAIN], strict=True)]
    print(f"\n{'':14}  us/token  median ratio  range of the {arguments.rounds} rounds")
    for variant, row in table.items():
        print(
            f"{variant:14}  {row['us_per_token']:8.1f}  {row['ratio']:12.4f}  "
            f"{row['ratio_min']:.4f} to {row['ratio_max']:.4f}"
        )
    print(f"bare against bare: median {median(noise):+.2%}, {min(noise):+.2%} to {max(noise):+.2%}")
    write_result(
        arguments.out,
        {
            "what": "processor time per token of one process, one thread, fp32; llama h256 l4 v8192, 4 x 512 tokens",
            "rounds": arguments.rounds,
            "measured_steps": arguments.steps,
            "table": table,
            "bare_against_bare": {"median": median(noise), "min": min(noise), "max": max(noise)},
            "seconds_per_token": found,
        },
    )


if __name__ == "__main__":
    main()
