"""The loss without logits where its head is sharded: the same losses and gradients as from the logits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.record.jsonl import read_metrics
from tests.distributed.test_blocks import UNTIED, train_all
from tests.ranks import resident_ranks, run_ranks
from tests.runs import largest_difference, make_config, write_tokens

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "world", [pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW), 3, pytest.param(4, marks=SLOW)]
)
def test_plain_and_chunked_agree(tmp_path: Path, world: int) -> None:
    datasets = {
        name: write_tokens(tmp_path / f"{name}.jsonl", rows=60, seed=n) for n, name in enumerate(("one", "two"))
    }
    configs = [
        make_config(
            tmp_path,
            UNTIED,
            run={"name": loss},
            model={"loss": loss},
            data={
                "train": [{"name": n, "path": str(p), "format": {"type": "tokens"}} for n, p in datasets.items()],
                "seq_len": 48,
                "window": 32,
            },
            parallel={"precision": "fp32"},
            train={"global_batch": 8, "micro_batch": 2, "max_steps": 2},
        )
        for loss in ("plain", "chunked")
    ]
    found = run_ranks(train_all, world, [config.model_dump() for config in configs])
    for _, (plain, chunked) in found:
        for right, gradient in zip(plain, chunked, strict=True):
            assert abs(gradient - right).max(initial=0) <= 1e-6 * abs(right).max(initial=1e-30)
    plain_lines, lines = (
        [line for line in read_metrics(tmp_path / "runs" / loss / "metrics.jsonl") if line["kind"] == "step"]
        for loss in ("plain", "chunked")
    )
    trajectories = [[line["trajectory"] for line in each] for each in (plain_lines, lines)]
    assert largest_difference(*trajectories, "loss") < 1e-6
    for line, right in zip(lines, plain_lines, strict=True):
        assert line["accuracy"] == right["accuracy"]
        assert [entry[0] for entry in line["datasets"]] == list(datasets)
        total = sum(loss * targets for _, loss, _, targets in line["datasets"])
        assert total == pytest.approx(line["trajectory"]["loss"] * line["trajectory"]["target_tokens"], rel=1e-6)


def gathered_when(values: Mapping[str, Any]) -> list[dict[str, bool]]:
    """Which weights are gathered after a forward pass, after its backward pass, and after an evaluation."""
    import torch
    from torch.distributed.tensor import DTensor

    from raytune_fsdp.config import FinetuneConfig
    from raytune_fsdp.model.objective.loss import micro_batch_loss
    from raytune_fsdp.run.assemble import assemble
    from raytune_fsdp.step.parallel import evaluating
    from tests.runs import prepare_on_rank0

    config = FinetuneConfig.model_validate(values)
    parts = assemble(config, *prepare_on_rank0(config), torch.device("cpu"))
    found: list[dict[str, bool]] = []

    def note() -> None:
        found.append({name: not isinstance(p, DTensor) for name, p in parts.model.named_parameters()})

    block = next(iter(parts.batches)).micro_batches[0]
    loss = micro_batch_loss(parts.model, block).total
    note()
    loss.backward()  # type: ignore[no-untyped-call]
    note()
    with evaluating(parts.model):
        micro_batch_loss(parts.model, block)
    note()
    parts.saves.leave()
    parts.tracker.finish("interrupted")
    return found


def test_the_head_stays_gathered_until_backward_alone(tmp_path: Path) -> None:
    """Backward begins with it. After an evaluation it must not stay: the next step has other weights."""
    config = make_config(tmp_path, UNTIED, parallel={"precision": "fp32"})
    for forward, backward, evaluation in resident_ranks(gathered_when, 2, config.model_dump()):
        assert {name for name, gathered in forward.items() if gathered} == {"model.norm.weight", "lm_head.weight"}
        assert not any(backward.values()) and not any(evaluation.values())
