"""What a step of packed documents costs with borders, and with the dense mask: processor time per token.

    python -m benchmarks.attention [--rounds 7] [--out benchmarks/results/attention.json]

One process, one thread, fp32; a Llama of hidden size 256, four layers, 8,192 tokens, as in benchmarks.step. Documents
of lognormal lengths around 400 are packed into samples of 2,048 and of 4,096 tokens, one a step. Two networks with the
same weights train on the same batches with the whole step (`train_step`: loss, gradients, clipping, AdamW); they differ
in `model.attention` alone, and take turns step by step. The losses of all steps must agree. A round is one step of each
after two that do not count; ratios are of the same round, and their median counts.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.ranks import one_step
from benchmarks.record import write_result
from raytune_fsdp.base.batch import StepBatches
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.demo import TOKENIZER
from raytune_fsdp.launch.worker import join
from raytune_fsdp.run.assemble import assemble
from raytune_fsdp.run.loop import RankRun
from raytune_fsdp.run.prepare import prepare

VOCABULARY, MEAN, WARMUP_STEPS = 8192, 400, 2
LENGTHS = (2048, 4096)
NONE: Mapping[str, Any] = {}
WAYS = {"borders": "documents", "mask": "sdpa"}
ARCHITECTURE = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 688,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip


def write_rows(path: Path, tokens: int, longest: int = 2048) -> None:
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        while tokens > 0:
            length = int(np.clip(rng.lognormal(np.log(MEAN) - 0.5, 1.0), 8, longest))
            file.write(json.dumps({"input_ids": rng.integers(3, VOCABULARY, length).tolist()}) + "\n")
            tokens -= length


def learner(
    directory: Path, name: str, seq_len: int, steps: int, *, model: Mapping[str, Any] = NONE, **parallel: Any
) -> RankRun:
    """A run of this name, with what `model` and `parallel` have besides."""
    rows = {"path": str(directory / "rows.jsonl"), "format": {"type": "tokens", "labels": None}}
    config = FinetuneConfig.model_validate(
        {
            "run": {"name": f"{name}-{seq_len}", "storage": str(directory)},
            "model": {"init": "random", "architecture": ARCHITECTURE, "tokenizer": str(TOKENIZER), **model},
            "data": {"train": [rows], "seq_len": seq_len},
            "parallel": {"precision": "fp32", **parallel},
            "optim": {"lr": 1e-4, "warmup_steps": 0, "schedule": {"type": "constant"}},
            "train": {"global_batch": 1, "micro_batch": 1, "max_steps": steps},
            "tracking": {"console": False, "mlflow": {"enabled": False}},
        }
    )  # fmt: skip
    return assemble(config, *prepare(config, 1), torch.device("cpu"))


def step(parts: RankRun, batches: StepBatches) -> tuple[float, float]:
    """Processor time, and the loss."""
    since = time.process_time()
    tensors = one_step(parts, batches)
    return time.process_time() - since, tensors.values[0].item()


def measure(directory: Path, seq_len: int, rounds: int) -> dict[str, Any]:
    steps = WARMUP_STEPS + rounds
    learners = {way: learner(directory, way, seq_len, steps, model={"attention": name}) for way, name in WAYS.items()}
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    documents = []
    for number, batches in enumerate(islice(learners["borders"].batches, steps)):
        losses = {}
        for way in (WAYS, reversed(WAYS))[number % 2]:
            seconds, losses[way] = step(learners[way], batches)
            if number >= WARMUP_STEPS:
                found[way].append(seconds)
        np.testing.assert_allclose(losses["borders"], losses["mask"], rtol=1e-5)
        documents.append(len(batches.micro_batches[0].borders.starts) - 1)
    ratios = [a / b for a, b in zip(found["borders"], found["mask"], strict=True)]
    row = {
        "seq_len": seq_len,
        "documents_per_sample": float(np.mean(documents)),
        **{f"{way}_us_per_token": 1e6 * median(values) / seq_len for way, values in found.items()},
        "ratio": median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }
    print(
        f"{seq_len} tokens, {row['documents_per_sample']:.1f} documents: {row['borders_us_per_token']:.1f} us a token "
        f"with borders, {row['mask_us_per_token']:.1f} with a mask: {row['ratio']:.3f} "
        f"({row['ratio_min']:.3f} to {row['ratio_max']:.3f}), load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="of samples (default: 2048 4096)")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    join(torch.device("cpu"), alone=True)
    with tempfile.TemporaryDirectory() as name:
        tokens = max(arguments.lengths) * (arguments.rounds + WARMUP_STEPS + 2)
        write_rows(Path(name) / "rows.jsonl", tokens, longest=min(arguments.lengths))
        rows = [measure(Path(name), seq_len, arguments.rounds) for seq_len in arguments.lengths]
    dist.destroy_process_group()
    if arguments.out:
        what = "processor time per token of a step, one thread, fp32; llama h256 l4 v8192, documents of mean 400"
        write_result(arguments.out, {"what": what, "rounds": arguments.rounds, "table": rows})


if __name__ == "__main__":
    main()
