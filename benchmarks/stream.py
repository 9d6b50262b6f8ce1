"""How fast the stream comes through Ray Data, and how long ranks that compute wait for it.

    python -m benchmarks.stream [--rows 32768] [--datasets 2000] [--steps 400] [--out benchmarks/results/stream.json]

A Ray of this machine with a logical CPU for each core; the ranks are actors that need none and make their batches with
`ray_batches`. Rows are text of about 400 tokens, packed to 2048; a window is 1024 rows, about 200 samples.

- throughput: ranks take what they get as fast as they can. The windows are in the cache (`census`, on Ray, measured
  first), so this is the way from there: reading, Ray Data, tensors. It counts from a rank's 6th step to its last.
- waiting: two ranks take 100 ms a step; nothing is cached, windows are tokenized while they go on. What counts is the
  share of the time, from the 6th step to the last, that a rank waited for its batch. The target is 2 %.
- mixture: the same steps of 100 ms, but the rows are dealt out to 2,000 datasets, and windows are in the cache; beside
  it those of one dataset. What counts is `of_bare`, the time of a step by the 100 ms of a bare one. The target is 1.02.

The time to the first batch is from the moment that the dataset is made.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
from transformers import AutoTokenizer

from benchmarks.record import write_result
from raytune_fsdp.base.batch import Cursor
from raytune_fsdp.config import CompletionFormat, DataConfig, DatasetConfig
from raytune_fsdp.data.census import census
from raytune_fsdp.data.stream import Stream
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.demo import TOKENIZER
from raytune_fsdp.launch.ray.tasks.batches import ray_batches
from raytune_fsdp.launch.ray.tasks.stream import build_on_ray, split, stream_dataset
from raytune_fsdp.plan.division import Division

SEQ_LEN, WINDOW, WORDS, SEED = 2048, 1024, 220, 7
UNMEASURED_STEPS = 5
MOST_STEPS = {1: 400, 8: 120}
"""Of throughput, by micro-batch."""
COLUMNS = (
    "datasets", "ranks", "micro_batch", "cached", "step_ms", "rows_s", "tokens_s", "wait_percent", "of_bare", "first_s",
    "built",
)  # fmt: skip


def write_rows(directory: Path, rows: int, files: int) -> list[Path]:
    """Rows of words of the demo's conversations, with lognormal lengths, dealt out to files."""
    rng = np.random.default_rng(SEED)
    words = (Path(TOKENIZER).parent / "conversations.jsonl").read_text().replace('"', " ").split()
    texts: list[list[str]] = [[] for _ in range(files)]
    for number, length in enumerate(np.minimum(rng.lognormal(np.log(WORDS), 0.8, rows), 3 * WORDS).astype(int) + 1):
        texts[number % files].append(json.dumps({"text": " ".join(rng.choice(words, length))}) + "\n")
    directory.mkdir()
    paths = [directory / f"{number}.jsonl" for number in range(files)]
    for path, lines in zip(paths, texts, strict=True):
        path.write_text("".join(lines))
    return paths


def open_windows(files: list[Path], cache: Path) -> Windows:
    datasets = [DatasetConfig(path=str(file), format=CompletionFormat(type="completion")) for file in files]
    data = DataConfig(train=datasets, seq_len=SEQ_LEN, window=WINDOW, long_documents="truncate")
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    return Windows(datasets, data, seed=SEED, tokenizer=tokenizer, vocab_size=len(tokenizer), cache=cache)


@ray.remote(num_cpus=0)
class Rank:
    """Takes its batches, and takes its time for each."""

    def run(
        self, shard: Any, windows: Windows, division: Division, steps: int, rank: int, step_seconds: float
    ) -> dict[str, Any]:
        asked, waited, built = [time.time()], [], 0
        for step in ray_batches(shard, windows, division, range(1, steps + 1), data_rank=rank):
            waited.append(time.time() - asked[-1])
            built += step.windows_built
            if len(waited) == 1:
                first = time.time()
            time.sleep(step_seconds)
            asked.append(time.time())
        seconds = asked[-1] - asked[UNMEASURED_STEPS]
        return {"first": first, "seconds": seconds, "waited": sum(waited[UNMEASURED_STEPS:]), "built": built}


def measure(
    actors: list[Any], windows: Windows, *, micro_batch: int, steps: int, step_seconds: float = 0.0
) -> dict[str, Any]:
    ranks = len(actors)
    batch = ranks * micro_batch
    division = Division(total_samples=None, global_batch=batch, micro_batch=micro_batch, data_ranks=ranks)
    start = time.time()
    dataset = stream_dataset(Stream(windows, seed=SEED), Cursor(), micro_batch=micro_batch, samples=steps * batch)
    shards = split(dataset, ranks)
    found = ray.get(
        [
            actor.run.remote(shard, windows, division, steps, rank, step_seconds)
            for rank, (actor, shard) in enumerate(zip(actors, shards, strict=True))
        ]
    )
    seconds = max(each["seconds"] for each in found)
    rows = (steps - UNMEASURED_STEPS) * batch / seconds
    return {
        "datasets": len(windows.names),
        "ranks": ranks,
        "micro_batch": micro_batch,
        "step_ms": round(step_seconds * 1000),
        "rows_s": round(rows, 1),
        "tokens_s": round(rows * SEQ_LEN),
        "wait_percent": round(100 * max(each["waited"] / each["seconds"] for each in found), 2),
        "of_bare": round(seconds / ((steps - UNMEASURED_STEPS) * step_seconds), 3) if step_seconds else None,
        "first_s": round(max(each["first"] for each in found) - start, 2),
        "built": sum(each["built"] for each in found),
    }


def show(line: dict[str, Any]) -> None:
    print("  ".join(f"{line[name]!s:>{max(8, len(name))}}" for name in COLUMNS), flush=True)


def run(directory: Path, rows: int, datasets: int, steps: int, micro_batches: list[int]) -> dict[str, Any]:
    files = write_rows(directory / "one", rows, 1)
    cached = open_windows(files, directory / "cached")
    start = time.perf_counter()
    counted = census(cached, build=build_on_ray)
    seconds = time.perf_counter() - start
    print(f"census: {counted.windows} windows, {counted.total.rows / seconds:.0f} rows/s of text")
    print("  ".join(f"{name:>8}" for name in COLUMNS))
    lines = []
    actors = [Rank.remote() for _ in range(2)]  # type: ignore[attr-defined]  # what ray makes of a class has no types
    ray.get([actor.__ray_ready__.remote() for actor in actors])

    def add(windows: Windows, *, cached: bool, ranks: int, micro_batch: int, most: int, ms: int = 0) -> None:
        taken = measure(
            actors[:ranks], windows, micro_batch=micro_batch, steps=min(steps, most), step_seconds=ms / 1000
        )
        lines.append({**taken, "cached": cached})
        show(lines[-1])

    measure(actors, cached, micro_batch=8, steps=min(steps, 20))  # processes start
    for micro_batch in micro_batches:
        for ranks in (1, 2):
            add(cached, cached=True, ranks=ranks, micro_batch=micro_batch, most=MOST_STEPS[micro_batch])
    for micro_batch in micro_batches:
        fresh = open_windows(files, directory / f"fresh-{micro_batch}")
        add(fresh, cached=False, ranks=2, micro_batch=micro_batch, most=150, ms=100)
    mixture = open_windows(write_rows(directory / "many", rows, datasets), directory / "mixture")
    census(mixture, build=build_on_ray)
    for windows in (cached, mixture):
        add(windows, cached=True, ranks=2, micro_batch=8, most=150, ms=100)
    return {"census_rows_s": round(counted.total.rows / seconds), "seq_len": SEQ_LEN, "window": WINDOW, "lines": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32768, help="of text (default: 32768)")
    parser.add_argument("--datasets", type=int, default=2000, help="of the mixture (default: 2000)")
    parser.add_argument("--steps", type=int, default=400, help="of a measurement, at most (default: 400)")
    parser.add_argument("--micro-batches", type=int, nargs="+", choices=MOST_STEPS, default=[*MOST_STEPS])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="ray-"))  # short: the names of sockets have a limit
    os.environ["RAY_AUTH_MODE"] = "disabled"  # else Ray writes a token into the home directory
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(
            num_cpus=os.cpu_count(), include_dashboard=False, object_store_memory=1 << 30,
            _temp_dir=str(directory / "ray"), logging_level="ERROR", log_to_driver=False,
        )  # fmt: skip
        values = run(directory, arguments.rows, arguments.datasets, arguments.steps, arguments.micro_batches)
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)
    if arguments.out is not None:
        write_result(arguments.out, values)


if __name__ == "__main__":
    main()
