"""What `run.digest_every` costs: processor time of a digest, beside that of a step, on one and two ranks.

    python -m benchmarks.digests [--rounds 5] [--worlds 1 2] [--out benchmarks/results/digests.json]

The network of benchmarks.attention with AdamW in fp32, and steps of six micro-batches of 512 tokens. A digest hashes
weights and moments, as a save does; its time is a matter of their bytes alone. A round is a step and a digest, after
two rounds that do not count; figures are the processor time of all ranks. The rows of this network have 1 KiB, the
least that is hashed in one call; of longer rows, as larger networks have them, hashing alone is measured, too.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.attention import WARMUP_STEPS, write_rows
from benchmarks.record import write_result
from benchmarks.same_bits import LENGTH, config_of
from tests.ranks import run_ranks

ROWS = (1 << 10, 4 << 10, 16 << 10)


def measured(values: dict[str, Any], steps: int) -> tuple[list[float], list[float], int]:
    """This rank's processor time for each step, and for each digest, and the bytes of a checkpoint."""
    import torch
    import torch.distributed as dist

    from benchmarks.ranks import one_step
    from raytune_fsdp.config import FinetuneConfig
    from raytune_fsdp.run.assemble import assemble
    from tests.runs import prepare_on_rank0

    config = FinetuneConfig.model_validate(values)
    parts = assemble(config, *prepare_on_rank0(config), torch.device("cpu"))
    seconds: tuple[list[float], list[float]] = ([], [])
    for batches in islice(parts.batches, steps):
        dist.barrier()
        since = time.process_time()
        one_step(parts, batches)
        between = time.process_time()
        parts.saves.saver.digest(parts.state)
        for found, took in zip(seconds, (between - since, time.process_time() - between), strict=True):
            found.append(took)
    return seconds[0][WARMUP_STEPS:], seconds[1][WARMUP_STEPS:], parts.saves.saver.nbytes


def of_rows(row_bytes: int) -> float:
    """Processor time to hash a GB of rows of this size with two threads."""
    import torch

    from raytune_fsdp.base.row_hashes import TensorRows

    tensor = torch.zeros((64 << 20) // row_bytes, row_bytes, dtype=torch.uint8)
    rows = TensorRows.of("weight", tensor.dtype, tensor.shape)
    with ThreadPoolExecutor(2) as threads:
        since = time.process_time()
        rows.digest(rows.hashed(0, tensor, threads))
        return (time.process_time() - since) / tensor.nbytes * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    table: dict[str, dict[str, float]] = {}
    steps = WARMUP_STEPS + arguments.rounds
    with tempfile.TemporaryDirectory() as name:
        write_rows(Path(name) / "rows.jsonl", 6 * LENGTH * (steps + 4), longest=LENGTH)
        for world in arguments.worlds:
            config = config_of(Path(name), "exact", "fp32", world, steps)
            ranks = run_ranks(measured, world, config, steps, seconds=1200)
            step, digest = (median(map(sum, zip(*(rank[i] for rank in ranks), strict=True))) for i in (0, 1))
            size = ranks[0][2]
            table[str(world)] = {"step": step, "digest": digest, "bytes": size, "seconds_per_gb": digest / size * 1e9}
            print(
                f"{world} ranks: a step {step:.2f} s, a digest of {size / 1e6:.0f} MB {digest:.3f} s, "
                f"{digest / size * 1e9:.2f} s a GB",
                flush=True,
            )
    by_rows = {str(size): median(of_rows(size) for _ in range(arguments.rounds)) for size in ROWS}
    print(*(f"rows of {int(size) >> 10} KiB: {took:.2f} s a GB" for size, took in by_rows.items()), sep="\n")
    print(f"load {os.getloadavg()[0]:.1f}")
    if arguments.out:
        what = f"processor time of all ranks over gloo; llama h256 l4 v8192, fp32, 6 micro-batches of {LENGTH} tokens"
        write_result(arguments.out, {"what": what, "rounds": arguments.rounds, "worlds": table, "rows": by_rows})


if __name__ == "__main__":
    main()
