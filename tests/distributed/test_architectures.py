"""Architectures that are built in their own ways train like all others, at any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models import UNUSUAL, architecture
from tests.runs import largest_difference, make_config, trajectory, write_tokenizer

STEPS, LENGTH = 5, 16
BOUNDS = (1e-5, 1e-4)  # of DESIGN, for fp32: loss, gradient norm
UNPACKED = ("mpt",)
"""It takes no positions."""


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


@pytest.mark.parametrize(
    # Zamba2 shares blocks between layers, and has layers with a state, too.
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in ("zamba", "falcon_h1") else ()) for name in UNUSUAL],
)
def test_it_learns_the_same_on_one_rank_and_on_two(tmp_path: Path, name: str) -> None:
    """On two the second forward of activation checkpointing runs through it, too."""
    write_tokenizer(tmp_path / "tokenizer")
    rows = (
        [3 + i % 20 for i in range(start, start + 5 + start % 11)] for start in range(64)
    )  # counting is learned soon
    (tmp_path / "tokens.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    alone, two = (trajectory(_config(tmp_path, name, world), world) for world in (1, 2))
    assert len(alone) == STEPS
    assert alone[-1]["loss"] < 0.97 * alone[0]["loss"], "nothing is learned"
    for key, bound in zip(("loss", "grad_norm"), BOUNDS, strict=True):
        assert largest_difference(alone, two, key) < bound, key
