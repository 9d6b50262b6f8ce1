"""Layers that multiply in 8 bits, and weights that travel so: real runs, which any other can go on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raytune_fsdp.base.errors import ResumeError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.record.jsonl import read_evaluations
from tests.checkpoints import checkpoints, tensors_in
from tests.ranks import resident_ranks
from tests.runs import LLAMA, largest_difference, make_config, prepare_on_rank0, train_rank, trajectory

pytest.importorskip("torchao")

STEPS = 4


def config_of(directory: Path, name: str, steps: int = STEPS, **parallel: Any) -> FinetuneConfig:
    data = {"eval": [{"name": "same", "path": str(directory / "tokens.jsonl"), "format": {"type": "tokens"}}]}
    make_config(directory, LLAMA)  # writes the tokens
    return make_config(
        directory, LLAMA, run={"name": name}, data=data,
        train={"global_batch": 6, "micro_batch": 2, "max_steps": steps},
        parallel={"precision": "fp8", **parallel},
    )  # fmt: skip


def evaluated(directory: Path, name: str) -> Any:
    return read_evaluations(directory / "runs" / name / "metrics.jsonl", STEPS)[STEPS]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_how_weights_travel_changes_nothing(tmp_path: Path, world: int) -> None:
    """To the bit, also where ranks have unequal numbers of rows, evaluations included; and both differ from bf16."""
    kinds: dict[str, dict[str, Any]] = {
        "narrow": {"fp8_gather": True},
        "wide": {"fp8_gather": False},
        "bf16": {"precision": "bf16"},
    }
    found = [trajectory(config_of(tmp_path, name, **parallel), world) for name, parallel in kinds.items()]
    assert found[0] == found[1]
    assert evaluated(tmp_path, "narrow") == evaluated(tmp_path, "wide")
    assert found[0] != found[2]
    assert largest_difference(found[0], found[2], "loss") < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_worlds_are_as_far_apart_as_in_bf16(tmp_path: Path, scaling: str) -> None:
    """A scale is that of a whole weight, or of a block's tokens, on any number of ranks: what differs is in which order
    gradients are summed."""
    one, three = (trajectory(config_of(tmp_path, f"run{world}", fp8_scaling=scaling), world) for world in (1, 3))
    assert largest_difference(one, three, "loss") < 1e-3
    assert largest_difference(one, three, "grad_norm") < 1e-2


def test_a_run_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    straight = trajectory(config_of(tmp_path, "straight", reduce_dtype="bf16", cpu_offload=True), 2)
    config = config_of(tmp_path, "stopped", reduce_dtype="bf16", cpu_offload=True)
    assert resident_ranks(train_rank, 2, config.model_dump(), 3) == [True, True]
    assert trajectory(config, 2) == straight
    other = config_of(tmp_path, "stopped", steps=STEPS + 1, fp8_scaling="rowwise")
    with pytest.raises(AssertionError, match=r"parallel\.fp8_scaling"):
        resident_ranks(prepare_on_rank0_again, 1, other.model_dump())


def prepare_on_rank0_again(values: dict[str, Any]) -> None:
    with pytest.raises(ResumeError) as refused:
        prepare_on_rank0(FinetuneConfig.model_validate(values))
    raise AssertionError(str(refused.value))


@pytest.mark.parametrize(("first", "then"), [("bf16", "fp8"), pytest.param("fp8", "bf16", marks=pytest.mark.slow)])
def test_checkpoints_are_those_of_bf16(tmp_path: Path, first: str, then: str) -> None:
    """The same tensors of the same types, with which a run in the other precision begins."""
    base = config_of(tmp_path, "first", steps=1, precision=first)
    resident_ranks(train_rank, 2, base.model_dump())
    parent = checkpoints(tmp_path / "runs" / "first")[-1]
    model = {"init": "pretrained", "architecture": None, "path": parent.path}
    values = config_of(tmp_path, "then", steps=1, precision=then).model_dump()
    values["model"] |= model
    values["optim"] |= {"lr": 1e-12, "weight_decay": 0.0}
    resident_ranks(train_rank, 3, values)
    before, after = tensors_in(parent), tensors_in(checkpoints(tmp_path / "runs" / "then")[-1])
    assert {name: (t.shape, t.dtype) for name, t in before.items()} == {
        name: (t.shape, t.dtype) for name, t in after.items()
    }
    weights = [name for name in before if name.startswith("model.")]
    assert weights
    for name in weights:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-11)
