"""Bytes of training: what the pages say, what is counted with, and what the tensors of a step take."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from raytune_fsdp.config import OptimConfig, ParallelConfig
from raytune_fsdp.config.sections.optimizers import state_bytes
from raytune_fsdp.model.network import MASTER_DTYPE
from raytune_fsdp.model.precision.quantized import QuantizedLayer
from raytune_fsdp.plan.plan import Layout
from raytune_fsdp.step.parallel import for_one_rank, memory_of
from tests.models import build
from tests.ranks import run_ranks

HARDWARE = Path(__file__).parents[2] / "docs" / "start" / "hardware.md"

ROWS: dict[str, dict[str, Any]] = {
    "`adamw` (default)": {"type": "adamw"},
    "`adamw` with `moments: fp32`": {"type": "adamw", "moments": "fp32"},
    "`adamw` with `moments: bf16`": {"type": "adamw", "moments": "bf16"},
    "`adamw` with `moments: 8bit`": {"type": "adamw", "moments": "8bit"},
    "`lion`": {"type": "lion"},
    "`muon`, matrices in the blocks; the rest as `adamw`": {"type": "muon"},
    "`sgd`": {"type": "sgd"},
    "`sgd` with `momentum: 0`": {"type": "sgd", "momentum": 0},
    "`adafactor`, and a little for each row and column": {"type": "adafactor"},
}
"""The first column of the table in docs/start/hardware.md."""

PRECISIONS = (("bf16", "fp16", "fp32"), ("bf16_pure",))
"""The other two columns."""

MATRIX, EMBEDDING = "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"


def table() -> dict[str, list[tuple[float, ...]]]:
    """Weight, gradient, state and sum, by optimizer and column."""
    found = {}
    for line in HARDWARE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        sums = [re.fullmatch(r"([\d.]+) \+ ([\d.]+) \+ ([\d.]+) = ([\d.]+)", cell) for cell in cells[1:]]
        if len(cells) == 3 and all(sums):
            found[cells[0]] = [tuple(map(float, each.groups())) for each in sums if each]
    return found


def test_the_page_says_what_is_counted_with() -> None:
    assert table().keys() == ROWS.keys()
    for name, columns in table().items():
        chosen = OptimConfig.model_validate({"optimizer": ROWS[name]}).optimizer
        for precisions, column in zip(PRECISIONS, columns, strict=True):
            for precision in precisions:
                own = MASTER_DTYPE[precision].itemsize
                state = round(state_bytes(chosen, own), 2)
                assert column == (own, own, state, round(2 * own + state, 2)), (name, precision)


def _taken(cases: list[tuple[str, str]]) -> list[dict[str, tuple[int, int, int]]]:
    """Bytes of weight, gradient and state of each tensor, in the first step of a rank."""
    from raytune_fsdp.model.objective.loss import micro_batch_loss
    from raytune_fsdp.model.pieces.pieces import local_piece
    from raytune_fsdp.model.proof import documents
    from raytune_fsdp.step.optim.build import build_optimizer
    from raytune_fsdp.step.parallel import make_mesh, shard, sharding_units

    found = []
    cpu = torch.device("cpu")
    for name, precision in cases:
        model = build("llama", hidden_size=256, intermediate_size=512, head_dim=64).to(MASTER_DTYPE[precision])
        parallel = ParallelConfig.model_validate({"precision": precision})
        mesh = make_mesh(Layout(world=1, data_ranks=1, replicas=1, shard_size=1), cpu)
        shard(model, mesh, parallel, sharding_units(model, parallel, ends=True))
        optimizer = build_optimizer(model, OptimConfig.model_validate({"optimizer": ROWS[name]}))
        micro_batch_loss(model.train(), documents(model, cpu)).total.backward()
        taken = {}
        for key, p in model.named_parameters():
            assert p.grad is not None
            taken[key] = (local_piece(p).nbytes, local_piece(p.grad).nbytes)
        optimizer.step(1.0, torch.tensor(0.0))
        state = {key: local_piece(tensor).nbytes for key, tensor in optimizer.state_tensors().items()}
        found.append(
            {
                key: (*two, sum(n for name, n in state.items() if name.startswith(f"{key}.") and name != f"{key}.step"))
                for key, two in taken.items()
            }
        )
    return found


def test_a_step_takes_what_is_counted_with() -> None:
    """Of a matrix in a block exactly; 8 bits leave small weights, muon the embedding, and adafactor keeps means."""
    cases = [(name, precision) for name in ROWS for precision in ("bf16", "fp32", "bf16_pure")]
    sizes = {name: p.numel() for name, p in build("llama", hidden_size=256, intermediate_size=512).named_parameters()}
    for (name, precision), taken in zip(cases, run_ranks(_taken, 1, cases)[0], strict=True):
        own = MASTER_DTYPE[precision].itemsize
        chosen = OptimConfig.model_validate({"optimizer": ROWS[name]}).optimizer
        weight, gradient, state = (nbytes / sizes[MATRIX] for nbytes in taken[MATRIX])
        assert (weight, gradient) == (own, own), (name, precision)
        if chosen.type == "adafactor":
            assert state == 4 * (256 + 512) / (256 * 512)
        else:
            assert state == state_bytes(chosen, own), (name, precision)
        rest = taken[EMBEDDING][2] / sizes[EMBEDDING]
        if chosen.type == "muon":
            assert rest == 2 * own, "AdamW's"
        elif chosen.type != "adafactor":
            assert rest == state, (name, precision)
        if name == "`adamw` with `moments: 8bit`":
            assert taken["model.norm.weight"][2] == 8 * 256


# ---- one rank that keeps what it has gathered ----


def _kept(model: nn.Module, state: float, precision: str = "bf16") -> bool:
    layout = Layout(world=1, data_ranks=1, replicas=1, shard_size=1)
    asked = ParallelConfig.model_validate({"precision": precision})
    return for_one_rank(asked, layout, model, memory_of(torch.device("cpu")), state=state).strategy == "shard_grad_op"


def _borders(state: float) -> Iterator[tuple[int, bool]]:
    """Numbers of trained weights that just fit into 70 % of the memory, and that just do not."""
    most = 0.7 * psutil.virtual_memory().total / (4 + 4 + 2 + state)
    yield int(most * 0.999), True
    yield int(most * 1.001), False


@pytest.mark.parametrize("name", ROWS)
def test_one_rank_keeps_what_it_has_gathered_if_it_fits(name: str) -> None:
    state = state_bytes(OptimConfig.model_validate({"optimizer": ROWS[name]}).optimizer, 4)
    for numbers, fits in _borders(state):
        model = nn.ParameterList([torch.empty(numbers, device="meta")])
        assert _kept(model, state) is fits
        assert not _kept(model, state, "bf16_pure"), "nothing is cast"


def test_frozen_weights_count_as_they_are_stored() -> None:
    """Once: one rank's are left as they are. In 4 bits that is a quarter of what 16 bits take."""
    total = psutil.virtual_memory().total
    numbers = int(0.7 * total / 2)
    for share, fits in ((0.999, True), (1.001, False)):
        whole = torch.empty(int(numbers * share), dtype=torch.bfloat16, device="meta")
        frozen = nn.ParameterList([nn.Parameter(whole, requires_grad=False)])
        assert _kept(frozen, 8) is fits
    rows = numbers // 4096 * 3
    with torch.device("meta"):
        layer = QuantizedLayer(nn.Linear(4096, rows, bias=False), "nf4")
    assert _kept(layer, 8), "three times as many numbers in 4 bits"
