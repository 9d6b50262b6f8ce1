"""Losses of scores are those of a plain loop with transformers' own class, at any world size, packed, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.record.jsonl import read_metrics
from tests.models import save_checkpoint
from tests.ranks import resident_ranks
from tests.runs import GPT2, LLAMA, largest_difference, trajectory
from tests.scores import OBJECTIVES, plain_loop, score_config

SLOW = pytest.mark.slow
PLAIN = {"lr": 3e-3, "max_grad_norm": 0.5, "weight_decay": 0.0, "warmup_ratio": 0.0, "schedule": {"type": "constant"}}
BOUND = 1e-9


def lines_of(config: FinetuneConfig, kind: str = "step") -> list[dict[str, Any]]:
    found = read_metrics(Path(config.run.storage) / config.run.name / "metrics.jsonl")
    return [line for line in found if line["kind"] == kind]


def named(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {**values, "run": {**values.get("run", {}), "name": name}}


@pytest.mark.parametrize(
    ("name", "packing", "worlds"),
    [
        ("reward centred", "best_fit", (1, 3)),
        ("classification weighted", "best_fit", (1, 2, 3)),
        ("regression", "none", (2,)),
        *(pytest.param(name, "best_fit", (1, 2, 3, 5), marks=SLOW) for name in OBJECTIVES),
        *(pytest.param(name, "none", (1, 2, 3), marks=SLOW) for name in OBJECTIVES),
    ],
)
def test_a_plain_loop_and_all_worlds_agree(tmp_path: Path, name: str, packing: str, worlds: tuple[int, ...]) -> None:
    """Of GPT-2, whose head is tied to its embedding until another takes its place."""
    shared: dict[str, Any] = {"data": {"packing": packing}, "optim": PLAIN}
    plain = resident_ranks(
        plain_loop, 1, score_config(tmp_path, OBJECTIVES[name], **named(shared, "plain")).model_dump()
    )
    for world in worlds:
        rows = trajectory(score_config(tmp_path, OBJECTIVES[name], **named(shared, f"w{world}")), world)
        for row, (loss, norm) in zip(rows, plain[0], strict=True):
            assert row["loss"] == pytest.approx(loss, rel=BOUND), (world, row["step"])
            assert row["grad_norm"] == pytest.approx(norm, rel=BOUND), (world, row["step"])
    losses = [loss for loss, _ in plain[0]]
    assert max(losses) - min(losses) > 1e-3, "the comparison means nothing if nothing is learned"


@pytest.mark.parametrize(
    ("architecture", "method"),
    [
        pytest.param(GPT2, {"type": "full"}, id="gpt2-full"),  # tied
        pytest.param(LLAMA, {"type": "lora", "rank": 2, "alpha": 4}, id="llama-lora"),
        pytest.param(LLAMA, {"type": "full"}, marks=SLOW, id="llama-full"),
        pytest.param(GPT2, {"type": "lora", "rank": 2, "alpha": 4}, marks=SLOW, id="gpt2-lora"),
        pytest.param(LLAMA, {"type": "freeze", "trained": ["mlp"]}, marks=SLOW, id="llama-freeze"),
    ],
)
def test_a_base_that_predicts_tokens_gets_a_head_and_goes_on(
    tmp_path: Path, architecture: dict[str, Any], method: dict[str, Any]
) -> None:
    """From stored weights, read by every rank or by one; stopped and resumed, at another world size too."""
    kind = architecture["model_type"]
    save_checkpoint(
        tmp_path / "model", kind, **{key: value for key, value in architecture.items() if key != "model_type"}
    )
    model = {"path": str(tmp_path / "model"), "init": "pretrained", "architecture": None}
    runs = {}
    for name, world, stops, fill in (
        ("whole", 1, (), "sharded"),
        ("rank0", 2, (), "rank0"),
        ("stopped", 2, (2, 4), "auto"),
        ("moved", 2, (3,), "auto"),
    ):
        config = score_config(
            tmp_path,
            OBJECTIVES["classification"],
            model={**model, "fill": fill},
            method=method,
            run={"name": name},
            checkpoint={"every": 1},
        )
        for stop in stops:
            trajectory(config, world, stop)
        runs[name] = trajectory(config, 3 if name == "moved" else world)
    assert runs["stopped"] == runs["rank0"]
    for name in ("rank0", "moved"):
        assert largest_difference(runs["whole"], runs[name], "loss") < 1e-8
        assert largest_difference(runs["whole"], runs[name], "grad_norm") < 1e-6
    assert len(runs["whole"]) == 6
