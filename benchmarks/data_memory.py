"""Private memory of the processes that count and stream a JSON Lines file of 2 GB: all of it becomes tokens.

    python -m benchmarks.data_memory [--gigabytes 2] [--ray]

What is sampled, four times a second, is RssAnon of the measuring process and of all its children: what nothing but the
process holds. With --ray the census and the stream go through Ray Data; what counts is the largest of its processes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.record import write_result

SEQ_LEN, MEAN_TOKENS, VOCABULARY = 2048, 400, 1024


class Sampler(threading.Thread):
    """Peaks of RssAnon by process, of this one and those below it."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peaks: dict[str, int] = defaultdict(int)
        self._ended = threading.Event()

    def run(self) -> None:
        here = psutil.Process()
        while not self._ended.wait(0.25):
            for process in (here, *here.children(recursive=True)):
                try:
                    name = "this process" if process.pid == here.pid else f"{process.name()[:24]} {process.pid}"
                    self.peaks[name] = max(self.peaks[name], _anonymous(process.pid))
                except (psutil.Error, OSError):
                    continue

    def end(self) -> dict[str, int]:
        self._ended.set()
        self.join()
        return {name: peak // 2**20 for name, peak in sorted(self.peaks.items(), key=lambda item: -item[1])}


def _anonymous(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def write_rows(path: Path, size: int) -> int:
    """Rows of token ids with lognormal lengths, until the file has this size."""
    rng = np.random.default_rng(0)
    rows = written = 0
    with path.open("w") as file:
        while written < size:
            for length in rng.lognormal(np.log(MEAN_TOKENS) - 0.5, 1.0, 1000).astype(int):
                ids = rng.integers(3, VOCABULARY, min(max(length, 2), SEQ_LEN)).tolist()
                written += file.write(f'{{"input_ids": {ids}}}\n')
                rows += 1
    return rows


def measure(directory: Path, *, on_ray: bool) -> dict[str, Any]:
    from transformers import AutoTokenizer

    from raytune_fsdp.config import DataConfig, DatasetConfig, TokensFormat
    from raytune_fsdp.data.census import build_here, census
    from raytune_fsdp.data.windows import Windows
    from raytune_fsdp.demo import TOKENIZER

    rows = DatasetConfig(path=str(directory / "rows.jsonl"), format=TokensFormat(type="tokens", labels=None))
    build = build_here
    if on_ray:
        from raytune_fsdp.launch.ray.tasks.stream import build_on_ray as build

    start = time.perf_counter()
    windows = Windows(
        [rows], DataConfig(train=[rows], seq_len=SEQ_LEN), seed=0, tokenizer=AutoTokenizer.from_pretrained(TOKENIZER),
        vocab_size=VOCABULARY, cache=directory / "cache",
    )  # fmt: skip
    opened = time.perf_counter()
    counted = census(windows, build=build)
    census_done = time.perf_counter()
    taken = (_stream_ray if on_ray else _stream_here)(windows, sum(counted.epochs))
    return {
        "rows": counted.total.rows, "tokens": counted.tokens, "windows": counted.windows, "samples_streamed": taken,
        "open_seconds": round(opened - start, 1), "census_seconds": round(census_done - opened, 1),
        "stream_seconds": round(time.perf_counter() - census_done, 1),
    }  # fmt: skip


def _stream_here(windows: Any, samples: int) -> int:
    from itertools import islice

    from raytune_fsdp.base.batch import Cursor
    from raytune_fsdp.data.stream import Stream

    return sum(
        len(each.sample.input_ids) == SEQ_LEN for each in islice(Stream(windows, seed=0).samples(Cursor()), samples)
    )


def _stream_ray(windows: Any, samples: int) -> int:
    """Two ranks, eight samples a block."""
    import ray

    from raytune_fsdp.base.batch import Cursor
    from raytune_fsdp.data.stream import Stream
    from raytune_fsdp.launch.ray.tasks.batches import ray_batches
    from raytune_fsdp.launch.ray.tasks.stream import split, stream_dataset
    from raytune_fsdp.plan.division import Division

    division = Division(total_samples=samples, global_batch=16, micro_batch=8, data_ranks=2)
    steps = range(1, -(-samples // 16) + 1)
    dataset = stream_dataset(Stream(windows, seed=0), Cursor(), micro_batch=8, samples=samples)
    shards = split(dataset, 2)

    @ray.remote(num_cpus=0)
    def consume(shard: Any, rank: int) -> int:
        batches = ray_batches(shard, windows, division, steps, data_rank=rank)
        return sum(len(block.sample_ids) for step in batches for block in step.micro_batches)

    return sum(ray.get([consume.remote(shard, rank) for rank, shard in enumerate(shards)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    with tempfile.TemporaryDirectory(prefix="ray-") as temporary:
        directory = Path(temporary)
        write_rows(directory / "rows.jsonl", int(options.gigabytes * 1e9))
        if options.ray:
            import ray

            os.environ["RAY_AUTH_MODE"] = "disabled"
            ray.init(num_cpus=2, include_dashboard=False, object_store_memory=1 << 30, _temp_dir=temporary)
        sampler = Sampler()
        sampler.start()
        counted = measure(directory, on_ray=options.ray)
        peaks = sampler.end()
        if options.ray:
            ray.shutdown()
    print(counted)
    for name, peak in list(peaks.items())[:8]:
        print(f"{peak:6} MiB at most  {name}")
    if options.out:
        write_result(options.out, {"through_ray": options.ray, **counted, "peak_mib": dict(list(peaks.items())[:8])})


if __name__ == "__main__":
    main()
