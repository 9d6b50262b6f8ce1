"""Training speed on one GPU: tokens a second, MFU and memory, eager and compiled, through the real path.

    python -m benchmarks.gpu.train_step --out DIRECTORY [--size 1b] [--micro 2] [--steps 20] [--checkpointing]
    python -m benchmarks.gpu.train_step --out DIRECTORY --device cpu --size tiny      to see that it works

A random Llama of that size trains in bf16 (fp32 master weights, fused AdamW) on documents of random tokens, lengths
log-normal around 600, packed into samples of 4096. Metrics are fetched every five steps, as a run on a cluster would do
it; the first five steps do not count. MFU is what `raytune_fsdp.step.flops` describes: 6 operations a token and
weight, input embedding left out, plus the attention inside documents, over the device's dense bf16 peak. Beside it, as
6N, the count of 6 for every weight and none for attention, which many tables show. Needs neither Ray nor MLflow.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from benchmarks.gpu.kernels import PROFILED_STEPS, StepKernels
from benchmarks.record import write_result
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.demo import TOKENIZER
from raytune_fsdp.launch.worker import choose_device, join
from raytune_fsdp.model.compile_layers import COMPILED, EAGER
from raytune_fsdp.model.precision.quantized import QuantizedLayer
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record import names
from raytune_fsdp.record.jsonl import read_events, read_metrics
from raytune_fsdp.record.tracker import Status
from raytune_fsdp.run.assemble import assemble
from raytune_fsdp.run.loop import RankRun, train
from raytune_fsdp.step.flops import peak_flops
from raytune_fsdp.step.precision import numerics
from tests.runs import prepare_on_rank0

WARMUP_STEPS, LOG_EVERY = 5, 5
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 2048, "seq_len": 128},
    "tiny-3b": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4,
                "num_key_value_heads": 2, "vocab_size": 2048, "seq_len": 128},
    "tiny-8b": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "vocab_size": 2048, "tie_word_embeddings": False, "seq_len": 256},
    # The shapes of Llama 3.2 1B and 3B, and of Llama 3.1 8B.
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256, "seq_len": 4096},
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "seq_len": 4096},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False, "seq_len": 8192},
}  # fmt: skip


class EnoughError(Exception):
    """Leaves the loop before its last step, which would write a checkpoint that nobody needs."""


def architecture_of(size: str) -> dict[str, Any]:
    """As in a Hugging Face config.json."""
    shapes = {key: value for key, value in SIZES[size].items() if key != "seq_len"}
    positions = SIZES[size]["seq_len"]
    return {"model_type": "llama", "tie_word_embeddings": True, "max_position_embeddings": positions, **shapes}


def numbers_in(size: str) -> int:
    """Weights of such a Llama."""
    of = architecture_of(size)
    width, inner, heads = of["hidden_size"], of["intermediate_size"], of["num_attention_heads"]
    head = of.get("head_dim", width // heads)
    layer = 2 * width * head * (heads + of["num_key_value_heads"]) + 3 * width * inner + 2 * width
    tables = 1 if of["tie_word_embeddings"] else 2
    return int(of["num_hidden_layers"] * layer + tables * of["vocab_size"] * width + width)


def document_lengths(rng: np.random.Generator, tokens: int, *, typical: float, longest: int) -> Iterator[int]:
    """Log-normal, until they are as many tokens or more."""
    while tokens > 0:
        length = int(np.clip(rng.lognormal(np.log(typical), 1.0), 8, longest))
        yield length
        tokens -= length


def write_rows(path: Path, *, vocabulary: int, seq_len: int, samples: int) -> None:
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for length in document_lengths(rng, samples * seq_len, typical=0.15 * seq_len, longest=seq_len):
            file.write(json.dumps({"input_ids": rng.integers(3, vocabulary, length).tolist()}) + "\n")


def make_config(
    directory: Path,
    size: str,
    *,
    micro: int,
    steps: int,
    compiled: bool,
    recompute: str = "none",
    seq_len: int | None = None,
    **sections: Mapping[str, Any],
) -> FinetuneConfig:
    """A run of so many steps after the warmup; `sections` are merged over it."""
    architecture, rows = architecture_of(size), directory / "rows.jsonl"
    seq_len = seq_len or int(SIZES[size]["seq_len"])
    if directory.exists() and not rows.exists():
        write_rows(rows, vocabulary=architecture["vocab_size"], seq_len=seq_len, samples=32 * micro)
    values: dict[str, dict[str, Any]] = {
        "run": {"name": COMPILED if compiled else EAGER, "storage": str(directory)},
        "model": {"init": "random", "architecture": architecture, "tokenizer": str(TOKENIZER)},
        "data": {"train": [{"path": str(rows), "format": {"type": "tokens", "labels": None}}], "seq_len": seq_len},
        "parallel": {"precision": "bf16", "compile": compiled, "activation_checkpointing": recompute},
        "train": {
            "global_batch": micro,
            "micro_batch": micro,
            "max_steps": WARMUP_STEPS + steps + 1,
            "log_every": LOG_EVERY,
        },
        "tracking": {"console": False, "mlflow": {"enabled": False}},
        "export": {"at_end": False},
    }
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes}
    return FinetuneConfig.model_validate(values)


def run_steps(config: FinetuneConfig, device: torch.device, enough: Callable[[int], bool]) -> RankRun:
    """Train through the real path. `enough` is asked before every step, the first of which is 1, and ends the run."""
    prepared, standing = prepare_on_rank0(config)
    numbers = itertools.count(1)

    def stop() -> None:
        if enough(next(numbers)):
            raise EnoughError

    with numerics(config.parallel, device, deterministic=config.run.repeats_bits):
        parts = assemble(config, prepared, standing, device)
        status: Status = "failed"
        try:
            with suppress(EnoughError):
                train(parts, stop)
            status = "finished"
        finally:
            parts.saves.leave()
            parts.tracker.finish(status)
    return parts


def measure(
    config: FinetuneConfig,
    device: torch.device,
    keep: Callable[[Mapping[str, Any]], object] = lambda _: None,
    *,
    profiled: bool = False,
) -> dict[str, Any]:
    """Train, and sum up the steps after the first ones.

    `keep` gets the speed so far. `profiled`: a few more steps follow, which are recorded.
    """
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    last = config.train.max_steps
    assert last is not None
    # The last step of the config is never taken.
    config = config.model_copy(
        update={"train": config.train.model_copy(update={"max_steps": last + profiled * PROFILED_STEPS})}
    )
    early_graphs, record, profile = 0, StepKernels(device) if profiled else None, None

    def enough(step: int) -> bool:
        nonlocal early_graphs, profile
        if step == 4:
            early_graphs = counters["stats"]["unique_graphs"]
        if step > WARMUP_STEPS + LOG_EVERY and step % LOG_EVERY == 1:
            keep(_speed(config, last))
        if record is not None and step == last:
            record.start()
        if record is not None and step == last + PROFILED_STEPS:
            profile = record.stop()
        return step == config.train.max_steps

    parts = run_steps(config, device, enough)
    found = _speed(config, last)
    weights = sum(p.numel() for p in parts.model.parameters())
    packed = [layer for layer in parts.model.modules() if isinstance(layer, QuantizedLayer)]
    weights += sum(layer.packed.shape[0] * (layer.numbers - layer.packed.shape[1]) for layer in packed)
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    events = [event["fields"] for event in read_events(RunDir.of(config).events) if event["event"] == names.COMPILED]
    return {
        **found,
        "parameters": weights,
        "mfu_6n": 6 * weights * found["tokens_per_second"] / peak if peak else None,
        "attention": parts.model.config._attn_implementation,
        "blocks": (parts.compilers["blocks"].failure or COMPILED) if "blocks" in parts.compilers else EAGER,
        # An event counts the graphs since the last fetch of metrics, so it cannot tell step 3 from step 5.
        "graphs_after_step_3": counters["stats"]["unique_graphs"] - early_graphs,
        "compiled_events": [[fields["step"], fields["graphs"]] for fields in events],
        **({} if profile is None else {"profile": profile}),
    }


def _speed(config: FinetuneConfig, last: int) -> dict[str, Any]:
    """What the record says of the steps that count, before step `last`."""
    lines = [line for line in read_metrics(RunDir.of(config).metrics) if line["kind"] == "step"]
    lines = [line for line in lines if WARMUP_STEPS < line["trajectory"]["step"] < last]
    return {
        "tokens_per_second": median(line["tokens_per_second"] for line in lines),
        "step_seconds": median(line["step_seconds"] for line in lines),
        "data_seconds": median(line["data_seconds"] for line in lines),
        "mfu": None if lines[0].get("mfu") is None else median(line["mfu"] for line in lines),
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
    parser.add_argument("--modes", nargs="+", choices=[EAGER, COMPILED], default=[EAGER, COMPILED])
    arguments = parser.parse_args()
    device = choose_device(arguments.device, 1)
    join(device, alone=True)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    recompute = "full" if arguments.checkpointing else "none"
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        for mode in arguments.modes:
            config = make_config(
                Path(directory), arguments.size, micro=arguments.micro, steps=arguments.steps,
                compiled=mode == COMPILED, recompute=recompute,
            )  # fmt: skip
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
