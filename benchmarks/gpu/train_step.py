"""Training speed on one GPU: tokens a second, MFU and memory, eager and compiled, through the real path.

    python -m benchmarks.gpu.train_step --out DIRECTORY [--size 1b] [--micro 2] [--steps 20] [--checkpointing]
    python -m benchmarks.gpu.train_step --out DIRECTORY --device cpu --size tiny      to see that it works

A random Llama of that size trains in bf16 (fp32 master weights, fused AdamW) on documents of random tokens, lengths
log-normal around 600, packed into samples of 4096. Metrics are fetched every five steps, as a run on a cluster would do
it; the first ten steps do not count. MFU is what `raytune_fsdp.estimate.flops` describes: 6 operations a token and
weight, input embedding left out, plus the attention inside documents, over the device's dense bf16 peak. Beside it, as
6N, the count of 6 for every weight and none for attention, which many tables show. Needs neither Ray nor MLflow.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.record import write_result
from raytune_fsdp.assemble import assemble
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.demo import TOKENIZER
from raytune_fsdp.estimate.flops import peak_flops
from raytune_fsdp.launch.worker import choose_device, join
from raytune_fsdp.loop import train
from raytune_fsdp.run.prepare import prepare
from raytune_fsdp.tracking.jsonl import read_metrics

WARMUP_STEPS, LOG_EVERY = 10, 5
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 2048, "seq_len": 256},
    # The shapes of Llama 3.2 1B and 3B.
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256, "seq_len": 4096},
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "seq_len": 4096},
}  # fmt: skip


class EnoughError(Exception):
    """Leaves the loop before its last step, which would write a checkpoint that nobody needs."""


def write_rows(path: Path, *, vocabulary: int, seq_len: int, samples: int) -> None:
    rng = np.random.default_rng(0)
    left = samples * seq_len
    with path.open("w") as file:
        while left > 0:
            length = int(np.clip(rng.lognormal(np.log(0.15 * seq_len), 1.0), 8, seq_len))
            file.write(json.dumps({"input_ids": rng.integers(3, vocabulary, length).tolist()}) + "\n")
            left -= length


def make_config(directory: Path, arguments: argparse.Namespace, *, compiled: bool) -> FinetuneConfig:
    architecture = {"model_type": "llama", "tie_word_embeddings": True, **SIZES[arguments.size]}
    seq_len = architecture.pop("seq_len")
    rows = directory / "rows.jsonl"
    if not rows.exists():
        write_rows(rows, vocabulary=architecture["vocab_size"], seq_len=seq_len, samples=32 * arguments.micro)
    return FinetuneConfig.model_validate(
        {
            "run": {"name": "compiled" if compiled else "eager", "storage": str(directory)},
            "model": {
                "init": "random",
                "architecture": {**architecture, "max_position_embeddings": seq_len},
                "tokenizer": str(TOKENIZER),
            },
            "data": {"train": [{"path": str(rows), "format": {"type": "tokens", "labels": None}}], "seq_len": seq_len},
            "parallel": {
                "precision": "bf16",
                "compile": compiled,
                "activation_checkpointing": "full" if arguments.checkpointing else "none",
            },
            "train": {
                "global_batch": arguments.micro,
                "micro_batch": arguments.micro,
                "max_steps": WARMUP_STEPS + arguments.steps + 1,
                "log_every": LOG_EVERY,
            },
            "tracking": {"console": False, "mlflow": {"enabled": False}},
            "export": {"at_end": False},
        }
    )


def measure(config: FinetuneConfig, device: torch.device) -> dict[str, Any]:
    """Train, and sum up the steps after the first ones."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    prepared, standing = prepare(config, 1)
    parts = assemble(config, prepared, standing, device)
    weights = sum(p.numel() for p in parts.model.parameters())
    calls = iter(range(1, standing.plan.steps + 1))

    def stop() -> bool:
        if next(calls) == standing.plan.steps:
            raise EnoughError
        return False

    try:
        train(parts, stop)
    except EnoughError:
        parts.tracker.finish("finished")
    lines = [line for line in read_metrics(prepared.place.metrics) if line["kind"] == "step"]
    lines = lines[WARMUP_STEPS:]
    speed = median(line["tokens_per_second"] for line in lines)
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return {
        "parameters": weights,
        "tokens_per_second": speed,
        "step_seconds": median(line["step_seconds"] for line in lines),
        "data_seconds": median(line["data_seconds"] for line in lines),
        "mfu": median(line["mfu"] for line in lines) if peak else None,
        "mfu_6n": 6 * weights * speed / peak if peak else None,
        "memory_bytes": lines[-1]["memory_bytes"],
        "losses": [lines[0]["trajectory"]["loss"], lines[-1]["trajectory"]["loss"]],
        "steps": len(lines),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for the result")
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--micro", type=int, default=2, help="packed samples of a step")
    parser.add_argument("--steps", type=int, default=20, help=f"measured steps, a multiple of {LOG_EVERY}")
    parser.add_argument("--checkpointing", action="store_true", help="activation checkpointing")
    parser.add_argument("--modes", nargs="+", choices=["eager", "compiled"], default=["eager", "compiled"])
    arguments = parser.parse_args()
    device = choose_device(arguments.device, 1)
    join(device, alone=True)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        for mode in arguments.modes:
            config = make_config(Path(directory), arguments, compiled=mode == "compiled")
            found[mode] = row = measure(config, device)
            percent = f"{row['mfu']:.1%} (6N: {row['mfu_6n']:.1%})" if row["mfu"] else "peak not known"
            print(
                f"{mode:8}  {row['tokens_per_second']:9.0f} tok/s  {row['step_seconds']:.3f} s/step  MFU {percent}  "
                f"{row['memory_bytes'] / 2**30:.1f} GiB",
                flush=True,
            )
    dist.destroy_process_group()
    settings = {key: value for key, value in vars(arguments).items() if key != "out"}
    write_result(arguments.out / f"gpu_train_step_{arguments.size}.json", {"gpu": name, **settings, "modes": found})


if __name__ == "__main__":
    main()
