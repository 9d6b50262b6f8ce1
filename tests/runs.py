"""Tiny real runs for tests: a config, and the path from it to a trajectory on several ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raytune_fsdp.base.batch import StopReason
from raytune_fsdp.base.errors import Interrupted
from raytune_fsdp.config import FinetuneConfig
from tests.ranks import resident_ranks, run_ranks

if TYPE_CHECKING:
    from raytune_fsdp.run.resume_point import ResumePoint, RunInputs

GPT2 = {
    "model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 48,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 48, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def write_tokens(path: Path, rows: int = 120, vocabulary: int = 64, longest: int = 40, seed: int = 0) -> Path:
    """Documents of random tokens and lengths, some of whose tokens are not trained on."""
    rng = np.random.default_rng(seed)
    path.parent.mkdir(exist_ok=True)
    with open(path, "w") as file:
        for _ in range(rows):
            ids = rng.integers(3, vocabulary, int(rng.integers(4, longest + 1))).tolist()
            masked = int(rng.integers(0, len(ids) // 2))
            file.write(json.dumps({"input_ids": ids, "labels": [-100] * masked + ids[masked:]}) + "\n")
    return path


def write_tokenizer(directory: Path, vocabulary: int = 64) -> Path:
    """A tokenizer of single words, only there because a model has one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w2").save_pretrained(directory)
    return directory


def make_config(
    directory: Path, architecture: Mapping[str, Any] = GPT2, **sections: Mapping[str, Any]
) -> FinetuneConfig:
    """A run of 50 steps over five blocks of two samples; `sections` are merged over it."""
    data, tokenizer = directory / "tokens.jsonl", directory / "tokenizer"
    if not data.exists():
        write_tokens(data)
        write_tokenizer(tokenizer)
    values: dict[str, dict[str, Any]] = {
        "run": {"name": "run", "storage": str(directory / "runs"), "seed": 3},
        "model": {"init": "random", "architecture": dict(architecture), "tokenizer": str(tokenizer)},
        "data": {
            "train": [{"path": str(data), "format": {"type": "tokens"}}],
            "seq_len": 48,
            "window": 32,
        },
        "parallel": {"precision": "fp64"},
        "optim": {"lr": 3e-3, "max_grad_norm": 0.5, "weight_decay": 0.1, "warmup_ratio": 0.1},
        "train": {"global_batch": 10, "micro_batch": 2, "max_steps": 50},
        "tracking": {"console": False, "mlflow": {"enabled": False}},
        "cluster": {"launch": "local", "device": "cpu"},
        "export": {"at_end": False},
    }
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes}
    return FinetuneConfig.model_validate(values)


def trajectory(config: FinetuneConfig, world: int, stop_after: int | None = None) -> list[dict[str, Any]]:
    """Train (or continue) on `world` ranks and read what the run directory says of every step."""
    from raytune_fsdp.record.jsonl import read_trajectory

    ranks = run_ranks if config.parallel.compile is True else resident_ranks  # what is compiled stays
    ranks(train_rank, world, config.model_dump(), stop_after)
    return read_trajectory(Path(config.run.storage) / config.run.name / "metrics.jsonl")


def train_rank(values: Mapping[str, Any], stop_after: int | None = None) -> bool:
    """One rank of a run; True if it was interrupted after step `stop_after`."""
    import torch

    from raytune_fsdp.launch.worker import work

    config = FinetuneConfig.model_validate(values)
    prepared, standing = prepare_on_rank0(config)
    calls = iter(range(standing.state.step + 1, 10**9))

    def stop() -> StopReason | None:
        return StopReason.SIGNAL if next(calls) == stop_after else None

    try:
        work(config, prepared, standing, torch.device("cpu"), stop)
    except Interrupted:
        return True
    return False


def prepare_on_rank0(config: FinetuneConfig) -> tuple[RunInputs, ResumePoint]:
    """Prepare on rank 0, and share the result with every rank; all verify the checkpoint together. Collective."""
    import torch.distributed as dist

    from raytune_fsdp.base.collectives import on_rank0
    from raytune_fsdp.run.prepare import prepare
    from raytune_fsdp.run.resume_point import agree

    prepared, standing = on_rank0(lambda: prepare(config, dist.get_world_size()), what="prepare the run")
    return prepared, agree(config, prepared, lambda: standing)


def largest_difference(left: list[dict[str, Any]], right: list[dict[str, Any]], key: str) -> float:
    """Relative, over all steps; both must have the same steps and the same samples in them."""
    assert [row["step"] for row in left] == [row["step"] for row in right]
    assert [row["samples"] for row in left] == [row["samples"] for row in right]
    return max(abs(a[key] - b[key]) / abs(a[key]) for a, b in zip(left, right, strict=True))
