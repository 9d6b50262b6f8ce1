"""Tokens/s from raw JSON Lines through Ray Data to the step: ours beside bare Ray Train with Hugging Face's Trainer.

    python -m benchmarks.end_to_end [--rounds 1] [--steps 80] [--seq-len 512] [--out benchmarks/results/end_to_end.json]

Both sides are commands of their own that start their own Ray, read the same rows of text (40 MB), tokenize and pack
while they train, and train the same small Llama in fp32 on CPUs, with the same global batch, micro-batch and length of
a sequence, on one worker and on two. `bare` is benchmarks/bare_hf_trainer.py. What counts are tokens that are not
padding:

- tokens_s: over the steps after the first ten
- whole_s: of all steps, by the time of the whole command, from its start to its end
- wait_percent: share of the time of those steps in which rank 0 waited for its batches
- built: windows that were tokenized for those steps (ours)
- load: of the machine, at the end of the command (these commands alone make about 3)

The two do not do the same: ours shuffles all rows, packs whole documents, keeps them apart in the attention, hashes
every sample, and verifies its checkpoint; bare takes the rows as they come, cuts documents where a sequence is full,
and lets them see each other, for which attention needs no mask. On two workers `ours` shards the model; `copies` is
ours with parallel.strategy=replicate, a copy of the model on every rank, which is what Trainer does (DDP).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml

from benchmarks.fresh import REPOSITORY, Command, environment, read_lines, warm_up
from benchmarks.record import write_result
from raytune_fsdp.config import ClusterConfig
from raytune_fsdp.demo import CONVERSATIONS, TOKENIZER
from raytune_fsdp.launch.ray.resources import local_cpus

GLOBAL_BATCH, MICRO_BATCH, UNMEASURED_STEPS = 8, 2, 10
BYTES, WORDS, SEED = 40_000_000, 220, 7
COLUMNS = ("side", "workers", "tokens_s", "whole_s", "step_s", "wait_percent", "command_s", "built", "load")


def write_rows(path: Path, size: int) -> None:
    """Rows of words of the demo's conversations, with lognormal lengths."""
    rng = np.random.default_rng(SEED)
    words = np.array(CONVERSATIONS.read_text().replace('"', " ").replace("\\", " ").split())
    written = 0
    with path.open("w") as file:
        while written < size:
            for length in np.minimum(rng.lognormal(np.log(WORDS), 0.8, 1000), 3 * WORDS).astype(int) + 1:
                written += file.write(json.dumps({"text": " ".join(rng.choice(words, length))}) + "\n")


def config(directory: Path, rows: Path, workers: int, steps: int, strategy: str, seq_len: int) -> dict[str, Any]:
    return {
        "run": {"name": "run", "storage": str(directory), "seed": SEED, "resume": "never"},
        "model": {
            "init": "random",
            "tokenizer": str(TOKENIZER),
            "architecture": {
                "model_type": "llama", "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 384,
                "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
                "max_position_embeddings": seq_len, "tie_word_embeddings": True, "use_cache": False,
            },
        },
        "data": {
            "train": [{"path": str(rows), "format": {"type": "completion"}}],
            "seq_len": seq_len, "window": 128, "long_documents": "split",
        },
        "parallel": {"precision": "fp32", "strategy": strategy},
        "optim": {"lr": 1e-3},
        "train": {"global_batch": GLOBAL_BATCH, "micro_batch": MICRO_BATCH, "max_steps": steps},
        "tracking": {"mlflow": {"enabled": False}},
        "cluster": {"workers": workers, "device": "cpu"},
        "export": {"at_end": False},
    }  # fmt: skip


def of_ours(directory: Path) -> tuple[list[dict[str, Any]], int]:
    """Tokens, seconds and waiting of every step, and windows built in those that are measured."""
    lines = [line for line in read_lines(directory / "run" / "metrics.jsonl") if line["kind"] == "step"]
    steps = [
        {"tokens": line["trajectory"]["tokens"], "seconds": line["step_seconds"], "waited": line["data_seconds"]}
        for line in lines
    ]
    return steps, sum(line["windows_built"] for line in lines[UNMEASURED_STEPS:])


def of_bare(directory: Path, seq_len: int) -> list[dict[str, Any]]:
    """The same; no token is padding. How long the first step took it does not say."""
    lines = read_lines(directory / "marks.jsonl")
    starts = [lines[0]["time"], *(line["time"] for line in lines)]
    return [
        {"tokens": GLOBAL_BATCH * seq_len, "seconds": line["time"] - start, "waited": line["waited"]}
        for line, start in zip(lines, starts, strict=False)
    ]


def summary(steps: list[dict[str, Any]], command_seconds: float) -> dict[str, Any]:
    measured = steps[UNMEASURED_STEPS:]
    tokens, seconds, waited = (sum(each[name] for each in measured) for name in ("tokens", "seconds", "waited"))
    return {
        "tokens_s": round(tokens / seconds),
        "whole_s": round(sum(each["tokens"] for each in steps) / command_seconds),
        "step_s": round(median(each["seconds"] for each in measured), 3),
        "wait_percent": round(100 * waited / seconds, 2),
        "command_s": round(command_seconds, 1),
    }


def run_once(side: str, workers: int, steps: int, rows: Path, seq_len: int) -> dict[str, Any]:
    directory = Path(tempfile.mkdtemp(prefix="ray-"))  # short: the names of Ray's sockets have a limit
    try:
        file = directory / "config.yaml"
        strategy = "replicate" if side == "copies" else "full_shard"
        file.write_text(yaml.safe_dump(config(directory, rows, workers, steps, strategy, seq_len)))
        cpus = local_cpus(ClusterConfig(workers=workers, device="cpu"), workers)
        env = {**environment(directory / "ray"), "BENCHMARK_CPUS": str(cpus)}
        if side != "bare":
            arguments = [str(REPOSITORY / "jobs" / "finetune.py"), "--config", str(file)]
        else:
            env["RAY_AUTH_MODE"] = "disabled"  # else Ray writes a token into the home directory
            # Not the file: next to it is a kernels.py, which transformers would take for the library of that name.
            arguments = ["-m", "benchmarks.bare_hf_trainer", str(file), str(directory / "marks.jsonl")]
        with Command(arguments, directory / f"{side}-{workers}.log", env) as command:
            seconds = command.finish(400)
        taken, built = of_ours(directory) if side != "bare" else (of_bare(directory, seq_len), None)
        assert len(taken) == steps, f"{side}: {len(taken)} steps"
        return {"side": side, "workers": workers, **summary(taken, seconds), "built": built, "load": _load()}
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _load() -> float:
    return round(os.getloadavg()[0], 1)


def show(line: dict[str, Any]) -> None:
    print("  ".join(f"{line[name]!s:>{max(8, len(name))}}" for name in COLUMNS), flush=True)


def show_ratios(lines: list[dict[str, Any]], name: str) -> dict[str, float]:
    """Ours by bare, of the medians of the rounds."""
    ratios = {}
    for workers in sorted({line["workers"] for line in lines}):
        rates = {
            side: median(line[name] for line in lines if (line["side"], line["workers"]) == (side, workers))
            for side in ("ours", "copies", "bare")
            if any((line["side"], line["workers"]) == (side, workers) for line in lines)
        }
        for side in rates.keys() - {"bare"}:
            ratios[f"{side}, {workers}"] = round(rates[side] / rates["bare"], 3)
            print(f"{name}, {workers} worker(s): {side} / bare {rates[side] / rates['bare']:.2f}")
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seq-len", type=int, default=512, help="of a packed sample")
    parser.add_argument("--workers", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    parser.add_argument("--bytes", type=int, default=BYTES, help="of text")
    parser.add_argument("--warm", action="store_true", help="what both sides import is in the file cache already")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="ray-"))
    try:
        rows = directory / "rows.jsonl"
        write_rows(rows, options.bytes)
        if not options.warm:
            warm_up()
        print("  ".join(f"{name:>8}" for name in COLUMNS))
        lines = []
        for number in range(options.rounds):
            for workers in options.workers:
                sides = ("ours", "bare") if workers == 1 else ("ours", "copies", "bare")
                for side in sides if (number + workers) % 2 else sides[::-1]:
                    lines.append(run_once(side, workers, options.steps, rows, options.seq_len))
                    show(lines[-1])
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    ratios = {name: show_ratios(lines, name) for name in ("tokens_s", "whole_s")}
    if options.out is not None:
        write_result(
            options.out,
            {"seq_len": options.seq_len, "steps": options.steps, "global_batch": GLOBAL_BATCH,
             "micro_batch": MICRO_BATCH, "bytes": options.bytes, "lines": lines, "ratios": ratios},
        )  # fmt: skip


if __name__ == "__main__":
    main()
