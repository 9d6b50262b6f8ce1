"""What the training loop costs above a bare PyTorch loop: processor time per token, same model, weights and batches.

    python -m benchmarks.step [--rounds 9] [--steps 10] [--out benchmarks/results/step.json]

One process, fp32, AdamW fused, clipping at 1.0, every step's metrics written. The variants take turns step by step, so
that what else happens on the machine hits all of them: each has a Python thread, which computes with one thread, and
only one runs at a time. What counts is the time of all threads of the process (`time.process_time`), from the start of
a step to the start of the next; a variant's first two steps, and what comes before and after its loop, do not count. A
round starts all variants anew, in another order. The bare loop takes part twice: the difference between the two is the
noise, their mean is what the others are compared with.

- bare: the Hugging Face model with its own loss, clip, step, scheduler, zero_grad; batches lie ready as tensors
- ours: `assemble` and `loop.train`, metrics fetched and written to metrics.jsonl and to a console on /dev/null at every
  step; rows are read, packed and hashed while it trains, a window a step
- ours, MLflow: the processor time of MLflow's thread in a run of its own, on top of ours (SQLite, a batch a step)
- ours, documents: with the loss of every document recorded (`tracking.documents`)
- ours, everything: that, and on top of it the threads of MLflow and TensorBoard
- HF Trainer: logs at every step (needs accelerate and datasets)
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean, median

import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.record import installed, write_result
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.demo import TOKENIZER
from raytune_fsdp.launch.worker import join
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record import names
from raytune_fsdp.record.jsonl import read_trajectory
from raytune_fsdp.run.assemble import assemble
from raytune_fsdp.run.loop import train
from raytune_fsdp.run.prepare import prepare

BATCH, VOCABULARY, LR = 4, 8192, 1e-4
WARMUP_STEPS = 2
BARE, BARE_AGAIN, OURS, TRAINER = "bare", "bare, again", "ours", "HF Trainer"
OURS_MLFLOW, OURS_DOCUMENTS, EVERYTHING = "ours, MLflow", "ours, documents", "ours, everything"


class Turns:
    """Lets threads run one at a time, in a fixed order, from one call of `next` to its next one."""

    def __init__(self, names: list[str]) -> None:
        self._names = list(names)
        self._changed = threading.Condition()

    def begin(self, name: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._names[0] == name)

    def next(self, name: str) -> None:
        with self._changed:
            self._names.append(self._names.pop(0))
            self._changed.notify_all()
        self.begin(name)

    def leave(self, name: str) -> None:
        with self._changed:
            self._names.remove(name)
            self._changed.notify_all()


class Clock:
    """Processor time of one variant's steps. `__call__` is the start of a step, and the moment to let others go on."""

    def __init__(self, next_turn: Callable[[], None] = lambda: None) -> None:
        self._next_turn = next_turn
        self._since: float | None = None
        self.seconds: list[float] = []

    def __call__(self) -> None:  # as `stop` of loop.train: go on
        if self._since is not None:
            self.seconds.append(time.process_time() - self._since)
        self._next_turn()
        self._since = time.process_time()

    def per_token(self, tokens: int) -> float:
        """Of steps with so many tokens."""
        return fmean(self.seconds[WARMUP_STEPS:]) / tokens


Variant = Callable[[Callable[[], None]], list[float]]
"""Trains, calls what it is given at the start of every step, and returns the loss of every step."""


def make_inputs(directory: Path, total_steps: int, seq_len: int) -> np.ndarray:
    """Write the weights and the rows that all variants use; the rows also as an array."""
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            use_cache=False,
        )
    ).save_pretrained(directory / "model")
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (total_steps * BATCH, seq_len))
    with (directory / "rows.jsonl").open("w") as file:
        file.writelines(json.dumps({"input_ids": row.tolist()}) + "\n" for row in ids)
    return ids


def bare(directory: Path, ids: np.ndarray, on_step: Callable[[], None]) -> list[float]:
    model = LlamaForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    batches = torch.from_numpy(ids).reshape(-1, BATCH, ids.shape[1])
    losses = []
    for batch in batches:
        on_step()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def ours(
    directory: Path, ids: np.ndarray, on_step: Callable[[], None], *, trackers: bool = False, documents: bool = False
) -> list[float]:
    storage = Path(tempfile.mkdtemp(dir=directory))
    rows = {"path": str(directory / "rows.jsonl"), "format": {"type": "tokens", "labels": None}}
    config = FinetuneConfig.model_validate(
        {
            "run": {"name": "step", "storage": str(storage)},
            "model": {"path": str(directory / "model"), "tokenizer": str(TOKENIZER)},
            # A window a step: the work of building them falls into the measured time at its true rate.
            "data": {"train": [rows], "seq_len": ids.shape[1], "packing": "none", "shuffle": "none", "window": BATCH},
            "parallel": {"precision": "fp32"},
            "optim": {"lr": LR, "weight_decay": 0.0, "warmup_steps": 0, "schedule": {"type": "constant"}},
            "train": {"global_batch": BATCH, "micro_batch": BATCH, "max_steps": len(ids) // BATCH},
            "tracking": {
                "documents": documents,
                "mlflow": {"enabled": trackers},
                "tensorboard": {"enabled": trackers},
            },
        }
    )
    parts = assemble(config, *prepare(config, 1), torch.device("cpu"))
    steps = itertools.count()

    def committed() -> None:
        # MLflow gets what is committed: here every step.
        parts.tracker.event(names.SAVED, step=next(steps))
        on_step()

    while trackers and not parts.tracker.state():
        time.sleep(0.1)  # until MLflow is imported and its run open: that is start-up, not training
    train(parts, stop=committed if trackers else on_step)
    parts.tracker.finish("finished")
    losses = [line["loss"] for line in read_trajectory(RunDir.of(config).metrics)]
    shutil.rmtree(storage)
    return losses


def trainer(directory: Path, ids: np.ndarray, on_step: Callable[[], None]) -> list[float]:
    from datasets import Dataset
    from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

    class Steps(TrainerCallback):
        def on_step_begin(self, *args: object, **kwargs: object) -> None:
            on_step()

    arguments = TrainingArguments(
        output_dir=str(directory / "trainer"), per_device_train_batch_size=BATCH, max_steps=len(ids) // BATCH,
        learning_rate=LR, weight_decay=0.0, optim="adamw_torch_fused", lr_scheduler_type="constant", max_grad_norm=1.0,
        train_sampling_strategy="sequential", logging_steps=1, report_to="none", save_strategy="no", use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    model = LlamaForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
    dataset = Dataset.from_dict({"input_ids": ids, "labels": ids})
    run = Trainer(model=model, args=arguments, train_dataset=dataset, data_collator=default_data_collator,
                  callbacks=[Steps()])  # fmt: skip
    run.train()
    return [line["loss"] for line in run.state.log_history if "loss" in line]


def variants(directory: Path, ids: np.ndarray) -> dict[str, Variant]:
    found: dict[str, Variant] = {
        BARE: partial(bare, directory, ids),
        OURS: partial(ours, directory, ids),
        BARE_AGAIN: partial(bare, directory, ids),
        OURS_DOCUMENTS: partial(ours, directory, ids, documents=True),
    }
    if installed("accelerate") and installed("datasets"):
        found[TRAINER] = partial(trainer, directory, ids)
    else:
        print("no HF Trainer row: it needs accelerate and datasets")
    return found


def run_round(chosen: dict[str, Variant], tokens: int) -> dict[str, float]:
    """Seconds per token of every variant, taking turns."""
    turns = Turns([*chosen])
    clocks = {name: Clock(partial(turns.next, name)) for name in chosen}

    def run(name: str) -> list[float]:
        try:
            turns.begin(name)
            return chosen[name](clocks[name])
        finally:
            turns.leave(name)

    with ThreadPoolExecutor(len(chosen)) as pool:
        losses = dict(zip(chosen, pool.map(run, chosen), strict=True))
    for name, values in losses.items():
        np.testing.assert_allclose(values, losses[BARE], rtol=1e-5, err_msg=f"{name} trains something else")
    return {name: clock.per_token(tokens) for name, clock in clocks.items()}


def tracker_seconds(directory: Path, ids: np.ndarray) -> dict[str, float]:
    """Processor time per token of the trackers' threads, while steps are trained and logged."""
    at: dict[str, list[float]] = {"mlflow": [], "tensorboard": []}

    def look() -> None:
        now = dict.fromkeys(at, 0.0)
        for thread in threading.enumerate():
            # tensorboardX writes in a thread of its own.
            name = "tensorboard" if type(thread).__name__ == "_EventLoggerThread" else thread.name
            if name in now and thread.ident is not None:
                now[name] += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for name, seconds in now.items():
            at[name].append(seconds)

    ours(directory, ids, look, trackers=True)
    measured = {name: seconds[WARMUP_STEPS:] for name, seconds in at.items()}
    return {
        name: (seconds[-1] - seconds[0]) / ((len(seconds) - 1) * BATCH * ids.shape[1])
        for name, seconds in measured.items()
    }


def measure(rounds: int, steps: int, seq_len: int) -> dict[str, list[float]]:
    """Seconds per token of every variant in every round."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        ids = make_inputs(directory, WARMUP_STEPS + steps + 1, seq_len)  # a last step, whose start ends the measurement
        chosen = variants(directory, ids)
        for number in range(rounds):
            turn = number % len(chosen)
            order = [*chosen][turn:] + [*chosen][:turn]
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                values = run_round({name: chosen[name] for name in order}, BATCH * seq_len)
                threads = tracker_seconds(directory, ids)
                values[OURS_MLFLOW] = values[OURS] + threads["mlflow"]
                values[EVERYTHING] = values[OURS_DOCUMENTS] + sum(threads.values())
            for variant in (*chosen, OURS_MLFLOW, EVERYTHING):
                found.setdefault(variant, []).append(values[variant])
            shown = "  ".join(f"{variant} {1e6 * found[variant][-1]:.1f}" for variant in found)
            print(f"round {number + 1}, load {os.getloadavg()[0]:.1f}, us per token: {shown}", flush=True)
    return found


def summarize(found: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Median time per token and median ratio to the mean of the round's two bare runs, with the ratios' range."""
    base = [(a + b) / 2 for a, b in zip(found[BARE], found[BARE_AGAIN], strict=True)]
    table = {}
    for variant, values in found.items():
        ratios = [value / reference for value, reference in zip(values, base, strict=True)]
        spread = {"ratio": median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}
        table[variant] = {"us_per_token": 1e6 * median(values), **spread}
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10, help="measured steps of a variant in a round")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "step.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    join(torch.device("cpu"), alone=True)
    found = measure(arguments.rounds, arguments.steps, arguments.seq_len)
    dist.destroy_process_group()
    table = summarize(found)
    noise = [b / a - 1 for a, b in zip(found[BARE], found[BARE_AGAIN], strict=True)]
    print(f"\n{'':16}  us/token  median ratio  range of {arguments.rounds} rounds")
    for variant, row in table.items():
        numbers = f"{row['us_per_token']:8.1f}  {row['ratio']:12.4f}  {row['ratio_min']:.4f} to {row['ratio_max']:.4f}"
        print(f"{variant:16}  {numbers}")
    print(f"bare against bare: median {median(noise):+.2%}, {min(noise):+.2%} to {max(noise):+.2%}")
    write_result(
        arguments.out,
        {
            "what": "processor time per token of one process, one thread, fp32; llama h256 l4 v8192, "
            f"{BATCH} x {arguments.seq_len} tokens",
            "rounds": arguments.rounds,
            "measured_steps": arguments.steps,
            "table": table,
            "bare_against_bare": {"median": median(noise), "min": min(noise), "max": max(noise)},
            "seconds_per_token": found,
        },
    )


if __name__ == "__main__":
    main()
