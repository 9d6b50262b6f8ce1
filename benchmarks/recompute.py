"""What it costs to compute activations again in backward: processor time of a step, by mode.

    python -m benchmarks.recompute [--rounds 7] [--out benchmarks/results/recompute.json]

The network, the data and the step of benchmarks.attention, at 2,048 tokens. The networks differ in
`parallel.activation_checkpointing` alone, take turns step by step on the same batches, and must have the same losses to
the bit. A round is one step of each after two that do not count; ratios are to `none` in the same round, and their
median counts.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.attention import WARMUP_STEPS, learner, step, write_rows
from benchmarks.record import write_result
from raytune_fsdp.launch.worker import join

MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"activation_checkpointing": "selective"},
    "every_n": {"activation_checkpointing": "every_n", "recompute_every": 2},
    "full": {"activation_checkpointing": "full"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--length", type=int, default=2048, help="of samples (default: 2048)")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    join(torch.device("cpu"), alone=True)
    length, steps = arguments.length, WARMUP_STEPS + arguments.rounds
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as name:
        write_rows(Path(name) / "rows.jsonl", length * (steps + 2), longest=length)
        learners = {mode: learner(Path(name), mode, length, steps, **fields) for mode, fields in MODES.items()}
        for number, batches in enumerate(islice(learners["none"].batches, steps)):
            losses = set()
            for mode in (list(MODES), list(reversed(MODES)))[number % 2]:
                took, loss = step(learners[mode], batches)
                losses.add(loss)
                if number >= WARMUP_STEPS:
                    seconds[mode].append(took)
            assert len(losses) == 1, losses
    dist.destroy_process_group()
    table = {}
    for mode, values in seconds.items():
        ratios = [value / none for value, none in zip(values, seconds["none"], strict=True)]
        table[mode] = {"ratio": median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}
        table[mode]["us_per_token"] = 1e6 * median(values) / length
        print(f"{mode:10} {table[mode]['us_per_token']:.0f} us a token, {median(ratios):.3f} of none's")
    print(f"load {os.getloadavg()[0]:.1f}")
    if arguments.out:
        what = f"processor time per token of a step, one thread, fp32; llama h256 l4 v8192, samples of {length}"
        write_result(arguments.out, {"what": what, "rounds": arguments.rounds, "modes": table})


if __name__ == "__main__":
    main()
