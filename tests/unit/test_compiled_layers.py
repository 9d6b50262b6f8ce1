"""Layers are compiled once, whatever the method and the precision, and the next attempt finds what was compiled."""

from __future__ import annotations

import os
from dataclasses import dataclass
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
from raytune_fsdp.model.pieces.pieces import local_piece
from raytune_fsdp.model.precision.quantized import QuantizedLayer, quantize
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.predict.subject import ModelSpec
from raytune_fsdp.predict.trace.trace import assume_kernels
from raytune_fsdp.run.build import Build, Site, build
from tests.ranks import run_ranks
from tests.runs import LLAMA, make_config

CPU = torch.device("cpu")
DEEP = {**LLAMA, "num_hidden_layers": 10, "tie_word_embeddings": False}
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
    """The network of a rank, with weights drawn at random, compiled where the config says so."""
    spec, plan = ModelSpec.of(config), resolve(config, 1)

    def kernels(model: Any) -> dict[str, KernelChoice]:
        blocks = KernelChoice(name=COMPILED if config.parallel.compile is True else EAGER, why="")
        return {**assume_kernels(config, spec.needs, "cpu", model), "blocks": blocks}

    found = build(config, spec.hf_config, spec.needs, Site.of_rank(plan, CPU), kernels)
    fill(found.model, None, "empty", CPU)
    draw = torch.Generator().manual_seed(0)
    for module in found.model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            piece = local_piece(parameter)
            if isinstance(module, QuantizedLayer) and name == "packed":
                rows = torch.randn(len(piece), module.numbers, generator=draw) / 4
                piece.copy_(quantize(rows, module.kind))
            else:
                mean = 1.0 if piece.ndim < 2 else 0.0
                piece.copy_(torch.randn(piece.shape, generator=draw) / 8 + mean)
    return found


@dataclass(frozen=True)
class Trained:
    graphs: int
    breaks: list[str]
    failure: str | None
    """Why the compiler gave way."""
    gradients: dict[str, torch.Tensor]


def train(config: FinetuneConfig) -> Trained:
    """Forward and backward of every micro-batch."""
    counters.clear()
    torch.manual_seed(0)
    with settings_restored():
        found = built(config)
        for lengths in DOCUMENTS:
            micro_batch_loss(found.model.train(), micro_batch(lengths)).total.backward()  # type: ignore[no-untyped-call]
        graphs, failure = found.compiler.news() if found.compiler is not None else (0, None)
    gradients = {name: local_piece(p.grad).double() for name, p in found.model.named_parameters() if p.grad is not None}
    return Trained(graphs, list(counters["graph_break"]), failure, gradients)


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
"""The cells that are tried with the compiler itself, too; the second one on every change."""


def config_of(directory: Path, method: str, precision: str, *, compiled: bool = True) -> FinetuneConfig:
    parallel = {**PRECISIONS[precision], "compile": compiled}
    return make_config(directory, DEEP, method=METHODS[method], parallel=parallel)


@pytest.mark.parametrize(
    ("method", "precision"),
    [
        pytest.param(method, precision, marks=[] if (method, precision) == ("nf4", "bf16") else pytest.mark.slow)
        for method in METHODS
        for precision in PRECISIONS
        if method in ("full", "freeze") or not precision.startswith("fp8")
    ],
)
def test_all_layers_share_one_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, precision: str
) -> None:
    """It is for documents of any lengths, from the first ones on, and computes what the layers do."""
    if precision.startswith("fp8"):
        pytest.importorskip("torchao")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # inductor takes a minute
    with alone(CPU):
        found = train(config_of(tmp_path, method, precision))
        eager = train(config_of(tmp_path, method, precision, compiled=False))
    torch._dynamo.reset()
    assert found.failure is None and not found.breaks
    assert (found.graphs, eager.graphs) == (1, 0)
    assert found.gradients.keys() == eager.gradients.keys()
    for name, right in eager.gradients.items():
        apart = (found.gradients[name] - right).norm() / right.norm()
        assert apart < 1e-6, name  # each operation is run as it is


# --- Compiled code ----------------------------------------------------------------------------------------------------


def started(values: dict[str, Any], place: str) -> tuple[int, list[str], str | None]:
    """What comes of it in a process of its own: graphs, breaks, and whether the compiler gave way."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = place
    found = train(FinetuneConfig.model_validate(values))
    return found.graphs, found.breaks, found.failure


@pytest.mark.slow
@pytest.mark.parametrize(("method", "precision"), sorted(OFTEN))
def test_a_second_start_compiles_nothing(tmp_path: Path, method: str, precision: str) -> None:
    """With the compiler itself, in new processes: the second one finds everything, and writes no program."""
    pytest.importorskip("torchao")
    config, place = config_of(tmp_path, method, precision), tmp_path / "compiled"
    written = []
    for _ in range(2):
        assert run_ranks(started, 1, config.model_dump(), str(place), seconds=1200) == [(1, [], None)]
        written.append({path for path in place.rglob("*") if path.suffix in (".so", ".cpp", ".py")})
    assert written[0] and written[1] == written[0]
