"""With weights and gradients in bf16 a run is the same at every number of ranks, to less than their digits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.config import FinetuneConfig
from tests.checkpoints import checkpoints
from tests.forgeries import with_hashes
from tests.models import architecture
from tests.runs import LLAMA, largest_difference, make_config, trajectory

SIZES = {"vocab_size": 64, "max_position_embeddings": 48}
QWEN3_NEXT = {
    **LLAMA, "model_type": "qwen3_next", "head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
STEPS = 8
SLOW = pytest.mark.slow
BOUNDS = (1e-5, 1e-4)
"""Of loss and gradient norm: what fp32 has. Added in bf16, five gradients are 1e-4 and 1e-3 apart after these steps."""


def config(directory: Path, network: dict[str, Any], name: str, **parallel: Any) -> FinetuneConfig:
    optim = {"lr": 0.02, "max_grad_norm": 0.5, "weight_decay": 0.1, "warmup_ratio": 0.1}
    return make_config(
        directory, network, run={"name": name}, optim={**optim, "optimizer": {"type": "muon"}},
        parallel={"precision": "bf16_pure", **parallel}, data={"packing": "none"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "world", "parallel"),
    [
        ("llama", 2, {}),
        pytest.param("llama", 3, {"strategy": "shard_grad_op"}, marks=SLOW),
        pytest.param("llama", 2, {"strategy": "replicate"}, marks=SLOW),
        pytest.param("llama", 2, {"defer_gradient_sync": True}, marks=SLOW),
        pytest.param("qwen3_next", 2, {}, marks=SLOW),
        pytest.param("mixtral", 2, {}, marks=SLOW),
    ],
)
def test_gradients_of_micro_batches_in_bf16_are_one_sum_at_every_number_of_ranks(
    tmp_path: Path, kind: str, world: int, parallel: dict[str, Any]
) -> None:
    network = {"llama": LLAMA, "qwen3_next": QWEN3_NEXT, "mixtral": architecture("mixtral", **SIZES)}[kind]
    alone = trajectory(config(tmp_path, network, "alone"), 1, STEPS)
    several = trajectory(config(tmp_path, network, "several", **parallel), world, STEPS)
    for key, bound in zip(("loss", "grad_norm"), BOUNDS, strict=True):
        assert largest_difference(alone, several, key) < bound


def test_a_run_that_began_with_sums_in_bf16_goes_on_with_them(tmp_path: Path) -> None:
    """Checkpoints of older versions do not say how gradients are added. Those of today do, also behind such a one."""
    chosen = config(tmp_path, LLAMA, "older")
    trajectory(chosen, 1, 2)
    (last,) = checkpoints(tmp_path / "runs" / "older")
    state = json.loads((Path(last.path) / "state.json").read_text())
    assert state["kernels"].pop("gradients") == "fp32"
    (Path(last.path) / "state.json").write_text(json.dumps(state))
    with_hashes(Path(last.path))
    for stop in (4, 6):
        trajectory(chosen, 1, stop)
    events = [json.loads(line) for line in (tmp_path / "runs" / "older" / "events.jsonl").open()]
    used = [event["fields"]["gradients"] for event in events if event["event"] == "kernels"]
    assert used == ["fp32", "bf16", "bf16"]
    older, today = trajectory(chosen, 1, 8), trajectory(config(tmp_path, LLAMA, "today"), 1, 8)
    assert older[:2] == today[:2] and older[2]["loss"] == today[2]["loss"]
    assert older[2]["grad_norm"] != today[2]["grad_norm"], "as many gradients as a step has are rounded four times"
