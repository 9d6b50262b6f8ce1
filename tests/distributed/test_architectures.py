"""Architectures that are built in their own ways train like all others, at any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.record.jsonl import read_trajectory
from tests.models import UNUSUAL, architecture
from tests.ranks import resident_ranks
from tests.runs import largest_difference, make_config, train_rank, write_tokenizer

STEPS, LENGTH = 8, 16
BOUNDS = (1e-5, 1e-4)  # of DESIGN, for fp32: loss, gradient norm
UNPACKED = ("mpt",)
"""It takes no positions."""

Trajectories = Mapping[str, list[dict[str, Any]]]


def _train_all(configs: Sequence[Mapping[str, Any]]) -> None:
    for values in configs:
        assert train_rank(values) is False


def _config(directory: Path, name: str, world: int) -> Any:
    sizes = architecture(name, vocab_size=64)
    if name == "gemma4_text":
        sizes["vocab_size_per_layer_input"] = 64
    return make_config(
        directory,
        sizes,
        run={"name": f"{name}-{world}"},
        data={
            "train": [{"path": str(directory / "tokens.jsonl"), "format": {"type": "tokens", "labels": None}}],
            "seq_len": LENGTH,
            "window": 32,
            "packing": "none" if name in UNPACKED else "best_fit",
        },
        parallel={"precision": "fp32", "activation_checkpointing": "full" if world == 2 else "none"},
        optim={"lr": 1e-2, "warmup_ratio": 0.0},
        train={"global_batch": 4, "micro_batch": 2, "max_steps": STEPS},
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, Trajectories]:
    """Each of them on one rank and on two; there the second forward of activation checkpointing runs through it too."""
    directory = tmp_path_factory.mktemp("architectures")
    write_tokenizer(directory / "tokenizer")
    rows = (
        [3 + i % 20 for i in range(start, start + 5 + start % 11)] for start in range(64)
    )  # counting is learned soon
    (directory / "tokens.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    found = {}
    for world in (1, 2):
        configs = [_config(directory, name, world) for name in UNUSUAL]
        resident_ranks(_train_all, world, [config.model_dump() for config in configs])
        found[world] = {
            name: read_trajectory(directory / "runs" / config.run.name / "metrics.jsonl")
            for name, config in zip(UNUSUAL, configs, strict=True)
        }
    return found


@pytest.mark.parametrize("name", UNUSUAL)
def test_it_learns_the_same_on_one_rank_and_on_two(trained: Mapping[int, Trajectories], name: str) -> None:
    alone, two = trained[1][name], trained[2][name]
    assert len(alone) == STEPS
    assert alone[-1]["loss"] < 0.97 * alone[0]["loss"], "nothing is learned"
    for key, bound in zip(("loss", "grad_norm"), BOUNDS, strict=True):
        assert largest_difference(alone, two, key) < bound, key
