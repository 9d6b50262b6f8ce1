"""On a GPU: an exact run has the same bits again, and its parts do not depend on how many rows a rank has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raytune_fsdp.config import OptimConfig
from raytune_fsdp.record.jsonl import read_events
from raytune_fsdp.record.names import SAVED
from raytune_fsdp.step.in_order import _row_sums
from raytune_fsdp.step.optim.adafactor import _means
from raytune_fsdp.step.optim.adamw import AdamW
from raytune_fsdp.step.optim.groups import Group
from raytune_fsdp.step.optim.update import Trained
from tests.gpu.test_gpu import DEVICE, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def digests(directory: Path, name: str) -> dict[int, str]:
    events = read_events(directory / "runs" / name / "events.jsonl")
    return {each["fields"]["step"]: each["fields"]["digest"] for each in events if each["event"] == SAVED}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_exact_run_again_and_in_parts(tmp_path: Path, precision: str) -> None:
    sections: dict[str, Any] = {
        "parallel": {"precision": precision},
        "optim": {"schedule_steps": 20},
        # Else a save that is due while another one is written comes later, each time after another step.
        "checkpoint": {"every": 8, "asynchronous": False},
    }

    def run(name: str, steps: int = 20) -> list[Any]:
        lines = train(tmp_path, name, steps=steps, run={"name": name, "exact": True}, **sections)
        return [line["trajectory"] for line in lines]

    whole = run("whole")
    assert run("again") == whole and digests(tmp_path, "again") == digests(tmp_path, "whole")
    run("parted", steps=8)
    assert run("parted") == whole and digests(tmp_path, "parted").items() <= digests(tmp_path, "whole").items()


@pytest.mark.parametrize("columns", [1, 7, 40, 4096, 10_000])
def test_a_row_s_sum_of_squares_does_not_depend_on_the_other_rows(columns: int) -> None:
    rows, parts = torch.randn(300, columns, device=DEVICE), -(-columns // 4096)
    every = len(rows) * parts
    together = _row_sums(rows, parts, every)
    for first, last in ((0, 1), (1, 4), (4, 150), (150, 300)):
        alone = _row_sums(rows[first:last].contiguous(), parts, every)
        assert torch.equal(alone, together[first * parts : last * parts])


@pytest.mark.parametrize("shape", [(300, 7), (300, 4096), (64, 40_000), (8, 256, 512)])
def test_adafactor_s_means_do_not_depend_on_the_other_rows(shape: tuple[int, ...]) -> None:
    rows = torch.randn(shape, device=DEVICE).square()
    for axis in {-1, 1 - len(shape)} - {0}:
        together, most = _means(rows, axis, len(rows)), len(rows)
        for first, last in ((0, 1), (1, 4), (4, most)):
            assert torch.equal(_means(rows[first:last].contiguous(), axis, most), together[first:last])


def test_adamw_rounds_alike_wherever_a_piece_ends() -> None:
    numbers, gradient = torch.randn(100_003, device=DEVICE), torch.randn(100_003, device=DEVICE)
    no_overflow = torch.zeros((), device=DEVICE)

    def updated(first: int, last: int) -> torch.Tensor:
        weight = nn.Parameter(numbers[first:last].clone())
        groups = [Group(names=("w",), weight_decay=0.1)]
        weights = Trained({"w": weight}, groups, lr=1e-3, seed=0, stochastic_rounding=False)
        optimizer = AdamW(weights, OptimConfig(lr=1e-3), exact=True)
        for times in (1.0, 0.5):
            weight.grad = gradient[first:last] * times
            optimizer.step(1.0, no_overflow)
        return weight.detach()

    whole = updated(0, len(numbers))
    for cut in (1, 63, 64, 50_001, 100_002):
        assert torch.equal(torch.cat([updated(0, cut), updated(cut, len(numbers))]), whole), cut
