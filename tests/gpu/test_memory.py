"""On a GPU: what is moved to the host and back, and copied while the device computes, is what it was."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raytune_fsdp.checkpoint.writing import Staging
from raytune_fsdp.model.layers import set_training_forward
from raytune_fsdp.model.offload_activations import Offload
from raytune_fsdp.record.jsonl import read_events
from raytune_fsdp.step.optim.update import UpdatesAfter
from tests.gpu.test_gpu import losses, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

EXACT = {"run": {"deterministic": True}, "parallel": {"precision": "bf16", "compile": False}}
"""Kernels that add in a fixed order, and no compiler that chooses others."""


WHERE_KEPT: dict[str, dict[str, Any]] = {
    "offloaded": {"activation_offload": True},
    "full": {"activation_checkpointing": "full", "activation_offload": True},
    "selective": {"activation_checkpointing": "selective"},
    "every_n": {"activation_checkpointing": "every_n", "recompute_every": 2},
}


def with_exact(name: str, **parallel: Any) -> dict[str, dict[str, Any]]:
    return {"run": {"name": name, **EXACT["run"]}, "parallel": {**EXACT["parallel"], **parallel}}


def test_what_is_kept_where_changes_no_bit(tmp_path: Path) -> None:
    here = train(tmp_path, "here", **with_exact("here"))
    for name, parallel in WHERE_KEPT.items():
        other = train(tmp_path, name, **with_exact(name, **parallel))
        assert losses(other) == losses(here), name
        if "offload" in "".join(parallel):
            assert other[-1]["memory_bytes"] < here[-1]["memory_bytes"], name


def test_weights_on_the_host_learn_the_same(tmp_path: Path) -> None:
    here = train(tmp_path, "here", parallel={"precision": "fp32"})
    away = train(tmp_path, "away", parallel={"precision": "fp32", "cpu_offload": True})
    assert losses(away) == pytest.approx(losses(here), rel=1e-3)
    assert away[-1]["memory_bytes"] < here[-1]["memory_bytes"]


def test_a_deterministic_run_continues_bit_by_bit(tmp_path: Path) -> None:
    schedule = {"schedule_steps": 20}
    whole = train(tmp_path, "whole", **with_exact("whole"), optim=schedule)
    train(tmp_path, "parted", **with_exact("parted"), optim=schedule, steps=8)
    parted = train(tmp_path, "parted", **with_exact("parted"), optim=schedule)
    assert [line["trajectory"] for line in parted] == [line["trajectory"] for line in whole]


def test_a_copy_holds_what_was_there_when_it_began() -> None:
    """The device is kept busy, so that a copy that did not wait, or an update that did not, would be seen."""

    class AddsOne:
        def step(self, *_: object) -> None:
            for tensor in tensors.values():
                tensor.add_(1)

    tensors = {f"piece {n}": torch.zeros(2**24, device="cuda") for n in range(8)}
    staging, busy = Staging(), torch.randn(4096, 4096, device="cuda")
    guarded = UpdatesAfter(staging.hold_updates, AddsOne())  # type: ignore[arg-type]
    staging.copy(tensors, list(tensors))
    for update in range(1, 6):
        for _ in range(20):
            busy = busy @ busy / 64
        guarded.step(1.0, torch.zeros(()))
        staging.copy(tensors, list(tensors))
        guarded.step(1.0, torch.zeros(()))  # while the copy is on its way
        staging.here()
        assert all(bool((piece == 2 * update - 1).all()) for piece in staging.pieces.values())
    assert staging._block.nbytes <= sum(tensor.nbytes for tensor in tensors.values()) + 64 * len(tensors)


def test_a_profile_says_how_long_the_device_was_idle(tmp_path: Path) -> None:
    train(tmp_path, "profiled", parallel={"precision": "bf16"}, profile={"steps": [4]}, steps=5)
    events = read_events(tmp_path / "runs" / "profiled" / "events.jsonl")
    (profiled,) = [event["fields"] for event in events if event["event"] == "profiled"]
    assert 0 <= profiled["idle"] < 100 and Path(profiled["path"]).stat().st_size > 0


class _Scaled(nn.Module):
    """Keeps its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), device="cuda"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class _Deep(nn.Module):
    _no_split_modules = ("_Scaled",)

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Scaled() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_host_that_is_ahead_does_not_fill_the_device_with_what_is_away() -> None:
    """The device sleeps while the host queues all of a pass. Never run on a GPU."""
    depth, numbers = 32, 2**24
    model = _Deep(depth)
    set_training_forward(model, offload=Offload(torch.device("cuda")))  # type: ignore[arg-type]
    model.train()
    rows = torch.ones(numbers, device="cuda", requires_grad=True)
    for ahead in (False, True):  # the first pass gets the host's pinned memory, which waits
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        if ahead:
            torch.cuda._sleep(2 * 10**9)
        model(rows).sum().backward()
        torch.cuda.synchronize()
    # 32 blocks keep 32 inputs. At a time there are those of three blocks, a result, and gradients of both.
    assert torch.cuda.max_memory_reserved() - before <= 10 * 4 * numbers
    assert all(float(block.weight.grad) == 2 * numbers for block in model.blocks)
