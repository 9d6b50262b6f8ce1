"""Ranks that share each sample learn what one rank alone learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runs import GPT2, LLAMA, largest_difference, make_config, trajectory

FOUR = {**GPT2, "n_head": 4}
DROPPING = {**FOUR, "resid_pdrop": 0.1, "embd_pdrop": 0.1}


@pytest.mark.parametrize(
    ("architecture", "world", "parallel", "bounds"),
    [
        (FOUR, 2, {"precision": "fp64"}, (1e-10, 1e-10)),
        (DROPPING, 4, {"precision": "fp64"}, (1e-10, 1e-10)),
        (LLAMA, 4, {"precision": "fp32", "activation_checkpointing": "full"}, (1e-5, 1e-4)),
    ],
)
def test_ranks_that_share_samples_learn_what_one_learns(
    tmp_path: Path, architecture: dict[str, Any], world: int, parallel: dict[str, Any], bounds: tuple[float, float]
) -> None:
    steps: dict[str, Any] = {"max_steps": 30}
    base = {"global_batch": 10, "micro_batch": 2, **steps}
    alone = trajectory(make_config(tmp_path, architecture, parallel=parallel, train=base, run={"name": "alone"}), 1)
    mesh = {"sequence": 4 if world == 4 and architecture is not LLAMA else 2}
    shared = trajectory(
        make_config(tmp_path, architecture, parallel={**parallel, "mesh": mesh}, train=base, run={"name": "shared"}),
        world,
    )
    assert largest_difference(alone, shared, "loss") <= bounds[0]
    assert largest_difference(alone, shared, "grad_norm") <= bounds[1]
