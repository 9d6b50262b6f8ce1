"""Recorded steps, and what is said when a GPU runs out of memory."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raytune_fsdp.base.errors import OccupiedError, TrainingError
from raytune_fsdp.config import FinetuneConfig, OptimConfig
from raytune_fsdp.run.measure.out_of_memory import cheapest_change, consumers, explain, explain_building
from raytune_fsdp.step.optim.build import build_optimizer
from raytune_fsdp.step.profiling import StepProfiler, shares_of
from tests.runs import make_config

CPU = torch.device("cpu")


def test_the_shares_of_a_step() -> None:
    kernels = [("gemm", 0.0, 4.0), ("ncclAllGather", 2.0, 6.0), ("gemm", 7.0, 8.0), ("ncclReduce", 9.0, 10.0)]
    shares = shares_of(kernels)
    assert shares["idle"] == pytest.approx(20.0), "from 6 to 7 and from 8 to 9, of 10"
    assert shares["exposed_communication"] == pytest.approx(30.0), "from 4 to 6, and from 9 to 10"
    assert shares_of([]) == {}


def test_a_recorded_step_leaves_a_trace_and_a_table(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    profiler = StepProfiler([2], tmp_path / "profile", CPU, rank=1)
    for step in (1, 2, 3):
        with profiler.of(step):
            torch.ones(8, 8) @ torch.ones(8, 8)
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == [
        "step-2-rank-1.json.gz",
        "step-2-rank-1.txt",
    ]
    trace = json.loads(gzip.decompress((tmp_path / "profile" / "step-2-rank-1.json.gz").read_bytes()))
    assert any(event.get("name") == "aten::mm" for event in trace["traceEvents"])
    table = (tmp_path / "profile" / "step-2-rank-1.txt").read_text()
    assert table.startswith("step 2, rank 1\n") and "aten::mm" in table
    assert profiler.news() == [{"step": 2, "path": str(tmp_path / "profile" / "step-2-rank-1.txt")}]
    assert profiler.news() == []


def test_a_profile_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profile").write_text("in the way")
    profiler = StepProfiler([1], tmp_path / "profile", CPU, rank=0)
    with profiler.of(1):
        pass
    assert profiler.news() == []
    assert "could not be written" in caplog.text


@pytest.mark.parametrize(
    ("sections", "states", "words"),
    [
        ({}, 10, "parallel.activation_checkpointing=selective"),
        ({"parallel": {"activation_checkpointing": "selective"}}, 10, "parallel.activation_checkpointing=full"),
        ({"parallel": {"activation_checkpointing": "full"}}, 10, "parallel.activation_offload=true"),
        ({"model": {"loss": "plain"}}, 10, "model.loss=auto"),
        ({"parallel": {"strategy": "replicate"}}, 1000, "parallel.strategy=full_shard"),
        ({}, 1000, "more ranks"),
        ({"parallel": {"activation_checkpointing": "full", "activation_offload": True}}, 10, "a smaller"),
    ],
)
def test_the_cheapest_change(tmp_path: Path, sections: dict[str, Any], states: int, words: str) -> None:
    config = make_config(tmp_path, **sections)
    used = {"weights": states, "gradients": 0, "moments": states, "activations and gathered weights": 100}
    assert words in cheapest_change(config, config.parallel, used)


def test_running_out_of_memory_names_what_took_it(tmp_path: Path) -> None:
    model = nn.Linear(1 << 10, 1 << 10, bias=False)
    optimizer = build_optimizer(model, OptimConfig())
    model(torch.ones(1, 1 << 10)).sum().backward()
    gradients = consumers(model, optimizer, CPU, peak=1 << 30)
    optimizer.step(1.0, torch.zeros(()))
    optimizer.init_state()
    used = consumers(model, optimizer, CPU, peak=1 << 30)
    assert gradients["gradients"] == used["weights"] == 4 << 20
    assert 8 << 20 <= used["moments"] <= (8 << 20) + 64
    assert sum(used.values()) == 1 << 30
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    config: FinetuneConfig = make_config(tmp_path)
    said = explain(error, config, config.parallel, model, optimizer, CPU, rank=3, directory=tmp_path)
    assert isinstance(said, TrainingError)
    assert str(said).startswith("rank 3 ran out of memory on cpu: ")
    assert "Largest: moments" in str(said) and "Cheapest change: " in str(said)


@pytest.mark.parametrize(("free", "kind"), [(30, OccupiedError), (69, TrainingError)])
def test_memory_that_other_processes_hold_is_not_the_run_s_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, kind: type[TrainingError]
) -> None:
    """Of 80 GiB the run has 10, and 1 is CUDA's. A rank of the last attempt that takes long to end holds the rest."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 << 30)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 70.00 GiB.")
    said = explain_building(error, make_config(tmp_path), torch.device("cuda", 0), rank=3)
    assert type(said) is kind
    assert ("other processes hold 40.0 GiB" in str(said)) == (kind is OccupiedError)
