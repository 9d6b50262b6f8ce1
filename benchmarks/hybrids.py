"""What packing saves a hybrid: tokens a second of packed and of padded samples, from the same rows.

    python -m benchmarks.hybrids [--rounds 3] [--steps 4] [--out benchmarks/results/hybrids.json]

One process, one thread, fp32, on a CPU, without any package for state mixers: their mixers are called for documents.
Rows of random tokens have lognormal lengths (mean 300, sigma 1); a sample has 2048 tokens. Both runs read the same
rows: a step is one sample where they are packed, and seven rows, about as many tokens, where each is a sample of its
own, padded. The runs take turns step by step. What counts is the processor time from the start of a step to the start
of the next, without a run's first two steps, over the tokens of these steps, padding left out. A round starts both
again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.record import write_result
from benchmarks.step import WARMUP_STEPS, Clock, Turns
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.demo import TOKENIZER
from raytune_fsdp.launch.worker import join
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record.jsonl import read_trajectory
from raytune_fsdp.run.assemble import assemble
from raytune_fsdp.run.loop import train
from raytune_fsdp.run.prepare import prepare

SEQ_LEN, MEAN, SIGMA, VOCABULARY = 2048, 300, 1.0, 1024
SAMPLES = {"best_fit": 1, "none": 7}
"""Samples of a step, by `data.packing`: as many tokens, about."""
NAMES = {"best_fit": "packed", "none": "padded"}

_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": SEQ_LEN,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_THREE_OF_FOUR = ["linear_attention"] * 3 + ["full_attention"]
NETWORKS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        **_SIZES, "layer_types": _THREE_OF_FOUR, "linear_num_value_heads": 4, "linear_num_key_heads": 4,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    },
    "granitemoehybrid": {
        **_SIZES, "layer_types": _THREE_OF_FOUR, "num_local_experts": 0, "shared_intermediate_size": 384,
        "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 64,
        "position_embedding_type": "rope",
    },
    "lfm2": {**_SIZES, "layer_types": ["conv"] * 3 + ["full_attention"]},
}  # fmt: skip


def write_rows(path: Path, many: int) -> None:
    random = np.random.default_rng(0)
    lengths = random.lognormal(math.log(MEAN) - SIGMA**2 / 2, SIGMA, many).clip(8, SEQ_LEN).astype(int)
    with path.open("w") as file:
        for length in lengths:
            file.write(json.dumps({"input_ids": random.integers(3, VOCABULARY, length).tolist()}) + "\n")


def run(directory: Path, network: str, packing: str, steps: int, clock: Clock) -> float:
    """Train, and return the tokens of a measured step."""
    storage = Path(tempfile.mkdtemp(dir=directory))
    rows = {"path": str(directory / "rows.jsonl"), "format": {"type": "tokens", "labels": None}}
    architecture = {"model_type": network, **NETWORKS[network]}
    config = FinetuneConfig.model_validate({
        "run": {"name": packing, "storage": str(storage)},
        "model": {"init": "random", "architecture": architecture, "tokenizer": str(TOKENIZER)},
        "data": {"train": [rows], "seq_len": SEQ_LEN, "packing": packing, "shuffle": "none", "window": 64},
        "parallel": {"precision": "fp32", "activation_checkpointing": "none"},
        "train": {"global_batch": SAMPLES[packing], "micro_batch": 1, "max_steps": steps},
        "tracking": {"mlflow": {"enabled": False}},
        "export": {"at_end": False},
    })  # fmt: skip
    parts = assemble(config, *prepare(config, 1), torch.device("cpu"))
    train(parts, stop=clock)
    parts.tracker.finish("finished")
    measured = read_trajectory(RunDir.of(config).metrics)[WARMUP_STEPS : len(clock.seconds)]
    shutil.rmtree(storage)
    return float(np.mean([row["tokens"] for row in measured]))


def run_round(directory: Path, network: str, steps: int) -> dict[str, float]:
    """Return tokens a second of both runs, which take turns."""
    turns = Turns([*SAMPLES])
    clocks = {packing: Clock(partial(turns.next, packing)) for packing in SAMPLES}

    def one(packing: str) -> float:
        try:
            turns.begin(packing)
            # A last step, whose start ends the measurement.
            return 1 / clocks[packing].per_token(run(directory, network, packing, steps + 1, clocks[packing]))  # type: ignore[arg-type]
        finally:
            turns.leave(packing)

    with (
        ThreadPoolExecutor(len(SAMPLES)) as pool,
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        return dict(zip(SAMPLES, pool.map(one, SAMPLES), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a run in a round")
    parser.add_argument("--only", nargs="+", default=[*NETWORKS], choices=[*NETWORKS])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "hybrids.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    join(torch.device("cpu"), alone=True)
    table = {}
    with tempfile.TemporaryDirectory() as name:
        directory, steps = Path(name), WARMUP_STEPS + options.steps
        write_rows(directory / "rows.jsonl", SAMPLES["none"] * (steps + 3))
        for network in options.only:
            rounds = [run_round(directory, network, steps) for _ in range(options.rounds)]
            ratios = [each["best_fit"] / each["none"] for each in rounds]
            speeds = {name: median(each[packing] for each in rounds) for packing, name in NAMES.items()}
            table[network] = {**speeds, "ratio": median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}
            row = table[network]
            print(f"{network:18}  packed {row['packed']:7.1f}  padded {row['padded']:7.1f} tokens/s  "
                  f"{row['ratio']:.2f} ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})", flush=True)  # fmt: skip
    dist.destroy_process_group()
    what = f"tokens/s of a process, one thread, fp32; lognormal mean {MEAN} sigma {SIGMA}, samples of {SEQ_LEN} tokens"
    write_result(options.out, {"what": what, "rounds": options.rounds, "measured_steps": options.steps, "table": table})


if __name__ == "__main__":
    main()
