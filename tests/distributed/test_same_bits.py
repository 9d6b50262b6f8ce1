"""With `run.exact` a run has the same bits at any number of ranks: weights, the optimizer's state, losses, norms."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.record.jsonl import read_trajectory
from tests.checkpoints import checkpoints, tensors_in
from tests.models import save_checkpoint
from tests.ranks import resident_ranks
from tests.runs import GPT2, LLAMA, make_config, train_rank

MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 48, "num_local_experts": 5,
    "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WIDER = {**LLAMA, "intermediate_size": 128}
OPTIM = {"lr": 3e-3, "max_grad_norm": 0.5}
CASES: dict[str, tuple[Mapping[str, Any], str, dict[str, Any]]] = {
    "gpt2": (GPT2, "fp64", {}),
    "fp32": (LLAMA, "fp32", {}),
    "bf16": (LLAMA, "bf16", {}),
    "fp16": (LLAMA, "fp16", {}),
    "tied": ({**LLAMA, "tie_word_embeddings": True}, "bf16", {}),
    "odd": ({**LLAMA, "hidden_size": 40, "intermediate_size": 67}, "fp32", {}),
    "experts": (MIXTRAL, "bf16", {"train": {"router_aux_loss_coef": 0.01}}),
    "lora": (LLAMA, "fp32", {"method": {"type": "lora", "rank": 4, "dropout": 0.1}}),
    "8-bit": (WIDER, "bf16", {"optim": {**OPTIM, "optimizer": {"type": "adamw", "moments": "8bit"}}}),
    "muon": (LLAMA, "fp32", {"optim": {**OPTIM, "optimizer": {"type": "muon"}}}),
    "plain loss": (LLAMA, "bf16", {"model": {"loss": "plain"}}),
    "kept": (LLAMA, "bf16", {"parallel": {"strategy": "shard_grad_op", "activation_checkpointing": "full"}}),
}  # fmt: skip
TRAIN = {"global_batch": 10, "micro_batch": 2, "max_steps": 20}


def config_of(directory: Path, case: str, name: str, **sections: Any) -> FinetuneConfig:
    architecture, precision, more = CASES[case]
    parallel = {"precision": precision, **more.get("parallel", {})}
    chosen = {**more, "parallel": parallel, "train": {**TRAIN, **more.get("train", {})}, **sections}
    run = {"name": name, "exact": True, **chosen.pop("run", {})}
    if "method" in chosen:
        base = directory / "base"
        if not base.exists():
            save_checkpoint(base, "llama")
        chosen["model"] = {"path": str(base), "init": "pretrained", "architecture": None}
    return make_config(directory, architecture, run=run, **chosen)


def train_each(values: Sequence[Mapping[str, Any]], stops: Sequence[int | None]) -> None:
    for each, stop in zip(values, stops, strict=True):
        train_rank(each, stop)


def train(configs: Sequence[FinetuneConfig], world: int, stop: int | None = None) -> None:
    """Train several runs, one after the other, in one group of processes."""
    resident_ranks(train_each, world, [each.model_dump() for each in configs], [stop] * len(configs), seconds=600)


def bits(config: FinetuneConfig) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """The hash of every tensor of the last checkpoint, and what is on record of every step."""
    place = Path(config.run.storage) / config.run.name
    tensors = tensors_in(checkpoints(place)[-1])
    hashes = {
        name: hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }
    return hashes, read_trajectory(place / "metrics.jsonl")


@pytest.mark.timeout(900)
def test_one_rank_three_and_a_run_that_is_resized(tmp_path: Path) -> None:
    """Five micro-batches a step: with three ranks, each step has a filler."""
    alone = {case: config_of(tmp_path, case, f"{case}-1".replace(" ", "-")) for case in CASES}
    three = {case: config_of(tmp_path, case, f"{case}-3".replace(" ", "-")) for case in CASES}
    train([*alone.values()], 1)
    train([*three.values()], 3)
    for case in CASES:
        assert bits(alone[case]) == bits(three[case]), case
