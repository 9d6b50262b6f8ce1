"""What `run.exact` costs: processor time of a step with it, beside the same step without, on one, two and three ranks.

    python -m benchmarks.same_bits [--rounds 7] [--worlds 1 2 3] [--out benchmarks/results/same_bits.json]

Six micro-batches of 512 tokens a step, in the network of benchmarks.attention. The two runs of a world differ in
`run.exact` alone, are in the same processes over gloo, and take turns step by step on the same batches. A round is one
step of each, after two that do not count; its figure is the processor time of all ranks, and ratios are to the run
without it in the same round. What exact runs send is another thing, and in a test (test_traffic.py).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.attention import ARCHITECTURE, WARMUP_STEPS, write_rows
from benchmarks.record import write_result
from raytune_fsdp.demo import TOKENIZER
from tests.ranks import run_ranks

LENGTH = 512
PRECISIONS = ("fp32", "bf16")
KINDS = {"exact": True, "by-rank": False}


def config_of(directory: Path, kind: str, precision: str, world: int, steps: int) -> dict[str, Any]:
    rows = {"path": str(directory / "rows.jsonl"), "format": {"type": "tokens", "labels": None}}
    return {
        "run": {
            "name": f"{kind.replace(' ', '-')}-{precision}-{world}",
            "storage": str(directory),
            "exact": KINDS[kind],
        },
        "model": {"init": "random", "architecture": ARCHITECTURE, "tokenizer": str(TOKENIZER)},
        "data": {"train": [rows], "seq_len": LENGTH},
        "parallel": {"precision": precision},
        "optim": {"lr": 1e-4, "warmup_steps": 0, "schedule": {"type": "constant"}},
        "train": {"global_batch": 6, "micro_batch": 1, "max_steps": steps},
        "tracking": {"console": False, "mlflow": {"enabled": False}},
        "cluster": {"launch": "local", "device": "cpu"},
    }


def measured(configs: Mapping[str, Mapping[str, Any]], steps: int) -> dict[str, list[float]]:
    """This rank's processor time for each step of each run, in turns."""
    import torch
    import torch.distributed as dist

    from benchmarks.ranks import one_step
    from raytune_fsdp.config import FinetuneConfig
    from raytune_fsdp.run.assemble import assemble
    from tests.runs import prepare_on_rank0

    runs = {}
    for kind, values in configs.items():
        config = FinetuneConfig.model_validate(values)
        runs[kind] = assemble(config, *prepare_on_rank0(config), torch.device("cpu"))
    seconds: dict[str, list[float]] = {kind: [] for kind in runs}
    for number, batches in enumerate(islice(next(iter(runs.values())).batches, steps)):
        for kind in (list(runs), list(reversed(runs)))[number % 2]:
            parts = runs[kind]
            dist.barrier()
            since = time.process_time()
            one_step(parts, batches)
            seconds[kind].append(time.process_time() - since)
    return {kind: each[WARMUP_STEPS:] for kind, each in seconds.items()}


def compared(directory: Path, precision: str, world: int, rounds: int) -> dict[str, float]:
    steps = WARMUP_STEPS + rounds
    configs = {kind: config_of(directory, kind, precision, world, steps) for kind in KINDS}
    ranks: Sequence[dict[str, list[float]]] = run_ranks(measured, world, configs, steps, seconds=1200)
    exact, plain = ([sum(each) for each in zip(*(rank[kind] for rank in ranks), strict=True)] for kind in KINDS)
    ratios = [a / b for a, b in zip(exact, plain, strict=True)]
    return {"ratio": median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios), "seconds": median(plain)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    table: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        write_rows(Path(name) / "rows.jsonl", 6 * LENGTH * (arguments.rounds + 6), longest=LENGTH)
        for precision in PRECISIONS:
            for world in arguments.worlds:
                found = table[f"{precision}, {world}"] = compared(Path(name), precision, world, arguments.rounds)
                ratios = f"{found['ratio']:.3f} ({found['ratio_min']:.3f} to {found['ratio_max']:.3f})"
                print(f"{precision}, {world} ranks: {found['seconds']:.2f} s; exact {ratios} of it", flush=True)
    print(f"load {os.getloadavg()[0]:.1f}")
    if arguments.out:
        what = (
            f"processor time of a step of all ranks over gloo; llama h256 l4 v8192, 6 micro-batches of {LENGTH} tokens"
        )
        write_result(arguments.out, {"what": what, "rounds": arguments.rounds, "worlds": table})


if __name__ == "__main__":
    main()
