"""Figures that others gave for memory, traffic and speed, beside what the planner says of the same.

    python -m benchmarks.known_figures [--out benchmarks/results/known_figures.json]

Nothing is measured here: it is arithmetic on both sides, theirs by their formulas, ours from traces of the code of a
run on tensors without data.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.record import write_result
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.load import load_config
from raytune_fsdp.predict.advise.alternatives import with_micro_batch
from raytune_fsdp.predict.devices import find_device
from raytune_fsdp.predict.host import host_needs
from raytune_fsdp.predict.prediction import Cluster, Prediction, predict
from raytune_fsdp.predict.subject import ModelSpec
from raytune_fsdp.step.flops import mfu

A100 = Cluster(device=find_device("A100-80GB"), between=50e9)
_GB = 1e9


def config_of(architecture: dict[str, Any], world: int, **parallel: Any) -> FinetuneConfig:
    return FinetuneConfig.model_validate({
        "run": {"name": "known"},
        "model": {"init": "random", "tokenizer": "none", "architecture": architecture},
        "data": {"train": [{"path": "rows.jsonl"}], "seq_len": 2048},
        "train": {"max_steps": 500, "global_batch": world, "micro_batch": 1},
        "parallel": parallel,
    })  # fmt: skip


def of_article() -> dict[str, Any]:
    """Llama 2 70B on A100: fits 16 and not 4; its 45.51 % of MFU are 2.84 % of each GPU."""
    config = load_config("llama2-70b-full-16xa100")
    subject = ModelSpec.of(config)
    found = {world: predict(subject, config, world, A100) for world in (4, 16)}
    paying = with_micro_batch(config, 16, 3)
    return {
        "fits": {str(world): each.fits for world, each in found.items()},
        "gib": {str(world): each.needed / 2**30 for world, each in found.items()},
        "their mfu of one of 16 GPUs": mfu(
            6 * 70e9 * 2048 * 16 * 500, seconds=13.5 * 3600, devices=16, peak_flops=312e12
        ),
        "our mfu": found[16].mfu,
        "bound": found[16].seconds.bound,
        "our hours": found[16].hours,
        "tokens/s/GPU with 3 samples at a time": predict(subject, paying, 16, A100).tokens_per_second,
    }


def of_traffic() -> dict[str, Any]:
    """ZeRO-3 moves 1.5 times what DDP does, in numbers."""
    architecture = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
                    "num_attention_heads": 16, "vocab_size": 4096, "max_position_embeddings": 2048}  # fmt: skip
    found: dict[str, Any] = {}
    for strategy in ("full_shard", "replicate"):
        config = config_of(architecture, 8, strategy=strategy)
        found[strategy] = traffic = predict(ModelSpec.of(config), config, 8, A100).traffic
        assert traffic is not None
    return {
        "numbers, full_shard to replicate": found["full_shard"].numbers / found["replicate"].numbers,
        "bytes, full_shard to replicate": found["full_shard"].bytes / found["replicate"].bytes,
    }


def of_40b() -> dict[str, Any]:
    """40B on 2 nodes: 48 bits a weight and node, by the survey; and what a node's memory needs."""
    config = load_config("falcon-180b-lora", ["--model.path", "tiiuae/falcon-40b", "--method", "{type: full}"])
    config = with_micro_batch(config, 16, 1)
    found = predict(ModelSpec.of(config), config, 16, A100)
    host = host_needs(config, found)
    return {
        "their GB a step and node": 48 * 40e9 / 2 / 8 / _GB,
        "our GB a step and node": found.seconds.between / _GB,
        "weights, billion": found.parameters.total / _GB,
        "GB of a node, every rank with a copy in 32 bits": host.naive / _GB,
        "and its 16-bit files in memory, too": (host.naive + 8 * 2 * found.parameters.total) / _GB,
        "our GB of a node while loading": host.loading / _GB,
    }


def states(found: Prediction) -> dict[str, float]:
    parts = {name: found.memory.peak.get(name, 0) / _GB for name in ("weights", "gradients", "optimizer", "gathered")}
    return {**parts, "all of these": sum(parts.values())}


def of_zero() -> dict[str, Any]:
    """7.5B on 64 GPUs: figure 1 of the paper, with Adam's K=12."""
    psi, gpus = 7.5e9, 64
    theirs = {
        "replicate": 16 * psi, "zero-1": 4 * psi + 12 * psi / gpus, "zero-2": 2 * psi + 14 * psi / gpus,
        "zero-3": 16 * psi / gpus,
    }  # fmt: skip
    # 7.5 billion weights, as the paper's largest of width 8192 and few layers is not one of transformers.
    architecture = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 32,
                    "num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 2048}  # fmt: skip
    ours = {}
    for strategy in ("replicate", "shard_grad_op", "full_shard"):
        config = config_of(architecture, gpus, strategy=strategy, activation_checkpointing="full")
        found = predict(ModelSpec.of(config), config, gpus, A100)
        ours[strategy] = {"weights, billion": found.parameters.total / _GB, **states(found)}
    return {"theirs, GB": {name: size / _GB for name, size in theirs.items()}, "ours, GB": ours}


def of_deepspeed() -> dict[str, Any]:
    """As large as T5-3B, on 8 GPUs: the formulas of DeepSpeed's estimators for ZeRO-2 and ZeRO-3, without offload."""
    architecture = {"model_type": "llama", "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 34,
                    "num_attention_heads": 20, "vocab_size": 32128, "max_position_embeddings": 2048}  # fmt: skip
    found = {}
    for strategy in ("shard_grad_op", "full_shard"):
        config = config_of(architecture, 8, strategy=strategy, activation_checkpointing="full")
        found[strategy] = predict(ModelSpec.of(config), config, 8, A100)
    total, largest = found["full_shard"].parameters.total, found["full_shard"].largest // 4
    theirs = {"shard_grad_op": 4 * total + 16 * total / 8, "full_shard": 4 * largest + 18 * total / 8}
    return {
        "weights, billion": total / _GB,
        "theirs, GB": {name: size / _GB for name, size in theirs.items()},
        "ours, GB": {name: states(each) for name, each in found.items()},
    }


def of_180b() -> dict[str, Any]:
    config = load_config("falcon-180b-lora")
    found = predict(ModelSpec.of(config), config, 8, A100)
    return {"fits 8": found.fits, "gib": found.needed / 2**30}


FIGURES = {each.__name__: each for each in (of_article, of_traffic, of_40b, of_zero, of_deepspeed, of_180b)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=[*FIGURES])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = {}
    for name in arguments.only:
        found[name] = figures = FIGURES[name]()
        print(name)
        for what, value in figures.items():
            print(f"    {what}: {_shown(value)}", flush=True)
    if arguments.out:
        write_result(arguments.out, {"what": "figures of others and the planner's", **found})


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(each)}" for name, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
