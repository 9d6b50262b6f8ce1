"""Layers are compiled once, whatever the method and the precision."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from raytune_fsdp.base.batch import IGNORE, Cursor, MicroBatch, PackedSample
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.data.batches import to_batch
from raytune_fsdp.launch.worker import alone
from raytune_fsdp.model.attention.choose import KernelChoice
from raytune_fsdp.model.compile_layers import COMPILED, EAGER, settings_restored
from raytune_fsdp.model.fill import fill
from raytune_fsdp.model.objective.loss import micro_batch_loss
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.predict.subject import ModelSpec
from raytune_fsdp.predict.trace.trace import assume_kernels
from raytune_fsdp.run.build import Build, Site, build
from tests.runs import LLAMA, make_config

CPU = torch.device("cpu")
DEEP = {**LLAMA, "num_hidden_layers": 18, "tie_word_embeddings": False}
"""More layers than a function may have graphs."""

DOCUMENTS = ((7, 3, 9), (11, 8)), ((2, 3, 3, 4, 7), (18, 1)), ((5, 14), (6, 6, 7))
"""Lengths of the documents of each sample, by micro-batch: no two have as many documents, or as long a one."""


def micro_batch(lengths: tuple[tuple[int, ...], ...]) -> MicroBatch:
    samples = []
    for row in lengths:
        ids = np.arange(3, 3 + sum(row), dtype=np.int32)
        positions = np.concatenate([np.arange(length, dtype=np.int32) for length in row])
        labels = np.where(positions == 0, IGNORE, ids).astype(np.int32)
        samples.append(
            PackedSample(input_ids=ids, labels=labels, position_ids=positions, source_ids=np.zeros_like(ids), id=0)
        )
    return to_batch(samples, index=0, after=Cursor())


def built(config: FinetuneConfig) -> Build:
    """The network of a rank, compiled where the config says so. Its weights are all alike."""
    spec, plan = ModelSpec.of(config), resolve(config, 1)

    def kernels(model: Any) -> dict[str, KernelChoice]:
        blocks = KernelChoice(name=COMPILED if config.parallel.compile is True else EAGER, why="")
        return {**assume_kernels(config, spec.needs, "cpu", model), "blocks": blocks}

    found = build(config, spec.hf_config, spec.needs, Site.of_rank(plan, CPU), kernels)
    fill(found.model, None, "empty", CPU)
    with torch.no_grad():
        for parameter in found.model.parameters():
            parameter.fill_(0 if parameter.dtype == torch.uint8 else 0.02)
    return found


def train(config: FinetuneConfig) -> tuple[int, list[str], str | None]:
    """Forward and backward of every micro-batch: how many graphs, what broke them, and why the compiler gave way."""
    counters.clear()
    with settings_restored():
        found = built(config)
        assert found.compiler is not None
        for lengths in DOCUMENTS:
            micro_batch_loss(found.model.train(), micro_batch(lengths)).total.backward()  # type: ignore[no-untyped-call]
        graphs, failure = found.compiler.news()
    return graphs, list(counters["graph_break"]), failure


METHODS: dict[str, dict[str, Any]] = {
    "full": {"type": "full"},
    "freeze": {"type": "freeze", "trained": ["mlp", "lm_head"]},
    "lora": {"type": "lora", "rank": 4, "dropout": 0.1},
    "dora": {"type": "lora", "rank": 4, "dora": True},
    "ia3": {"type": "ia3"},
    "nf4": {"type": "qlora", "rank": 4, "target_modules": ["q_proj", "down_proj"]},
    "int8": {"type": "qlora", "rank": 4, "quantization": "int8"},
    "nf4-dora": {"type": "qlora", "rank": 4, "dora": True},
}
PRECISIONS: dict[str, dict[str, Any]] = {
    **{name: {"precision": name} for name in ("bf16", "fp32", "fp64", "fp16", "bf16_pure")},
    "fp8": {"precision": "fp8"},
    "fp8-rowwise": {"precision": "fp8", "fp8_scaling": "rowwise"},
    "bf16-selective": {"precision": "bf16", "activation_checkpointing": "selective"},
    "bf16-full": {"precision": "bf16", "activation_checkpointing": "full"},
}
OFTEN = {("full", "fp8"), ("nf4", "bf16")}
"""The cells that every change is tried on."""


def config_of(directory: Path, method: str, precision: str) -> FinetuneConfig:
    parallel = {**PRECISIONS[precision], "compile": True}
    return make_config(directory, DEEP, method=METHODS[method], parallel=parallel)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "precision"),
    [
        pytest.param(method, precision, marks=[] if (method, precision) in OFTEN else pytest.mark.slow)
        for method in METHODS
        for precision in PRECISIONS
        if method in ("full", "freeze") or not precision.startswith("fp8")
    ],
)
def test_all_layers_share_two_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, precision: str
) -> None:
    """One for the lengths of the first documents, and one for any."""
    if precision.startswith("fp8"):
        pytest.importorskip("torchao")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # inductor takes a minute
    with alone(CPU):
        graphs, breaks, failure = train(config_of(tmp_path, method, precision))
    torch._dynamo.reset()
    assert failure is None and not breaks
    assert graphs == 2
