"""Optimizers: the same at every number of ranks, resumed bit by bit, and unmoved by a gradient that is not finite."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raytune_fsdp.config import FinetuneConfig, OptimConfig
from tests.checkpoints import checkpoints, tensors_in, types_in
from tests.models import build
from tests.ranks import resident_ranks
from tests.runs import GPT2, LLAMA, largest_difference, make_config, train_rank

COMMON = {"lr": 0.01, "weight_decay": 0.1}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bf16 moments": ("gpt2", "fp32", {"optimizer": {"type": "adamw", "moments": "bf16"}}),
    "8bit": ("gpt2", "fp32", {"optimizer": {"type": "adamw", "moments": "8bit"}}),
    "8bit of experts": ("mixtral", "fp32", {"optimizer": {"type": "adamw", "moments": "8bit"}}),
    "8bit, rounded": (
        "gpt2", "bf16_pure", {"optimizer": {"type": "adamw", "moments": "8bit"}, "stochastic_rounding": True},
    ),
    "rounded": ("gpt2", "bf16_pure", {"stochastic_rounding": True}),
    "sgd": ("gpt2", "fp32", {"optimizer": {"type": "sgd", "nesterov": True}}),
    "sgd, rounded": ("gpt2", "bf16_pure", {"optimizer": {"type": "sgd"}, "stochastic_rounding": True}),
    "lion": ("gpt2", "fp32", {"optimizer": {"type": "lion"}}),
    "muon": ("gpt2", "fp32", {"optimizer": {"type": "muon"}}),
    "muon of experts": ("mixtral", "fp32", {"optimizer": {"type": "muon"}}),
    "adafactor": ("gpt2", "fp64", {"optimizer": {"type": "adafactor"}}),
    "adafactor of experts": ("mixtral", "fp64", {"optimizer": {"type": "adafactor"}}),
}  # fmt: skip
"""Network, precision, and `optim`."""

TYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16_pure": torch.bfloat16}
STEPS, BAD = 4, 3


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def given(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """A whole gradient, as this rank has it."""
    from torch.distributed.tensor import DTensor

    from raytune_fsdp.step.optim.pieces import Split

    if not isinstance(parameter, DTensor):
        return gradient
    split = Split.of(parameter)
    start, stop = split.rows_of(parameter.shape[0], split.shard)
    return DTensor.from_local(
        gradient[start:stop], parameter.device_mesh, parameter.placements, run_check=False,
        shape=gradient.shape, stride=gradient.stride(),
    )  # fmt: skip


def stepped(case: str, parallel: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Weights and state, whole, after some steps with gradients that every number of ranks has in common."""
    import torch.distributed as dist

    from raytune_fsdp.config import ParallelConfig
    from raytune_fsdp.plan.plan import Layout
    from raytune_fsdp.step.optim.build import build_optimizer
    from raytune_fsdp.step.parallel import make_mesh, shard, sharding_units

    name, precision, optim = CASES[case]
    model = build(name).to(TYPES[precision])
    config = ParallelConfig.model_validate({"precision": precision, **parallel})
    world = dist.get_world_size()
    size = {"replicate": 1, "hybrid_shard": config.shard_size}.get(config.strategy, world)
    layout = Layout(world=world, data_ranks=world, replicas=world // (size or 1), shard_size=size or 1)
    if world > 1:
        shard(model, make_mesh(layout, torch.device("cpu")), config, sharding_units(model, config, ends=False))
    optimizer = build_optimizer(model, OptimConfig.model_validate({**COMMON, **optim}), seed=5)
    optimizer.init_state()

    def now() -> dict[str, torch.Tensor]:
        """This rank's part: to gather all of it takes longer than a step."""
        found = {**dict(model.named_parameters()), **optimizer.state_tensors()}
        parts = {key: tensor.to_local() if hasattr(tensor, "to_local") else tensor for key, tensor in found.items()}
        return {key: tensor.detach().clone() for key, tensor in parts.items()}

    for step in range(1, STEPS + 1):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1
            gradient[0] = math.nan if step == BAD else gradient[0]
            parameter.grad = given(parameter, gradient.to(parameter.dtype))
        before = now() if step == BAD else {}
        optimizer.step(1.0 / step, torch.tensor(float(step == BAD)))
        for key, tensor in now().items() if before else ():
            assert torch.equal(tensor, before[key]), f"{case}: {key} has changed in a step that was to be skipped"
        assert all(parameter.grad is None for parameter in model.parameters())
    found = {key: whole(each) for key, each in (*model.named_parameters(), *optimizer.state_tensors().items())}
    assert all(bool(tensor.isfinite().all()) for tensor in found.values() if tensor.is_floating_point())
    return {key: tensor.view(torch.uint8 if tensor.dtype == torch.bfloat16 else tensor.dtype).numpy()
            for key, tensor in found.items()}  # fmt: skip


def stepped_all(cases: Sequence[str], parallel: Mapping[str, Any]) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    import torch.distributed as dist

    found = {case: stepped(case, parallel) for case in cases}
    return found if dist.get_rank() == 0 else {}


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    found = resident_ranks(stepped_all, 1, list(CASES), {})[0]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        pytest.param(2, {}, marks=pytest.mark.slow),
        (3, {}),
        pytest.param(4, {}, marks=pytest.mark.slow),  # three ranks share unevenly, too; four: the next
        pytest.param(4, {"strategy": "hybrid_shard", "shard_size": 2}, marks=pytest.mark.slow),
        (2, {"strategy": "replicate"}),
    ],
    ids=["2", "3", "4", "hybrid", "replicas"],
)
def test_from_the_same_gradients_every_world_makes_the_same(alone: Any, world: int, parallel: dict[str, Any]) -> None:
    """Bit by bit: weights, codes, scales, momenta. Adafactor's sums over ranks are added in another order."""
    for case, found in resident_ranks(stepped_all, world, list(CASES), parallel)[0].items():
        assert found.keys() == alone[case].keys()
        for key, value in found.items():
            before = alone[case][key]
            assert (value.shape, value.dtype) == (before.shape, before.dtype), f"{case}: {key}"
            if "adafactor" in case:
                np.testing.assert_allclose(value, before, rtol=1e-13, atol=1e-15, err_msg=f"{case}: {key}")
            elif case.startswith("muon") and f"{key}.exp_avg" in found or ".exp_avg" in key and "muon" in case:
                # Torch's kernel of AdamW: the ends of vectors are computed another way.
                np.testing.assert_allclose(value, before, rtol=1e-5, atol=1e-7, err_msg=f"{case}: {key}")
            else:
                assert np.array_equal(value, before), f"{case}: {key} at {world} ranks"


def test_what_is_kept_is_what_was_asked_for(alone: Any) -> None:
    eight, experts, bf16 = alone["8bit"], alone["8bit of experts"], alone["bf16 moments"]
    block = "transformer.h.0.mlp.c_fc."
    assert eight[f"{block}weight.exp_avg"].dtype == np.uint8 and eight[f"{block}weight.exp_avg_scale"].shape == (32, 1)
    assert len(np.unique(eight[f"{block}weight.exp_avg"])) > 100, "the codes are used"
    assert eight[f"{block}bias.exp_avg"].dtype == np.float32
    gates = "model.layers.0.mlp.experts.gate_up_proj"
    assert experts[gates + ".exp_avg_sq"].shape == (5, 128, 32) and experts[gates + ".exp_avg_sq_scale"].shape == (
        5,
        16,
    )
    assert bf16[f"{block}weight.exp_avg"].dtype == np.uint8, "two bytes a number"
    assert bf16[f"{block}weight.exp_avg"].shape == (32, 256)
    muon = alone["muon"]
    assert f"{block}weight.momentum" in muon and "transformer.wte.weight.exp_avg" in muon
    assert float(muon[f"{block}weight.step"]) == STEPS - 1, "the step that was skipped is not counted"


# ---- runs ----

RUNS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "8bit": ({**LLAMA, "intermediate_size": 128}, "fp32", {"optimizer": {"type": "adamw", "moments": "8bit"}}),
    "rounded": (
        LLAMA, "bf16_pure", {"optimizer": {"type": "adamw", "moments": "bf16"}, "stochastic_rounding": True},
    ),
    "adafactor": (GPT2, "fp64", {"optimizer": {"type": "adafactor"}}),
    "sgd": (GPT2, "fp64", {"optimizer": {"type": "sgd"}, "lr": 0.05}),
    "muon": (GPT2, "fp64", {"optimizer": {"type": "muon"}, "groups": [{"match": "wte", "lr_ratio": 0.5}]}),
    "lion": (LLAMA, "fp64", {"optimizer": {"type": "lion"}, "lr": 1e-3}),
}  # fmt: skip
BOUNDS = {
    "8bit": (1e-5, 1e-4),
    "adafactor": (1e-10, 1e-10),
    "sgd": (1e-10, 1e-10),
    "muon": (1e-10, 1e-10),
    "lion": (1e-8, 1e-6),
}
"""Relative, of losses and gradient norms. Where sums over ranks differ in their last bit, a bf16 weight may be
rounded the other way: those runs are held to be near each other only."""


def run_of(directory: Path, kind: str, name: str, steps: int) -> FinetuneConfig:
    architecture, precision, optim = RUNS[kind]
    return make_config(
        directory, architecture, run={"name": f"{kind}-{name}"}, parallel={"precision": precision}, optim=optim,
        train={"max_steps": steps}, checkpoint={"every": steps, "asynchronous": False},
    )  # fmt: skip


def train_all(many: Sequence[Mapping[str, Any]], stop_after: int | None = None) -> None:
    for values in many:
        train_rank(values, stop_after)


def run_dir(config: FinetuneConfig) -> Path:
    return Path(config.run.storage) / config.run.name


def lines(config: FinetuneConfig) -> list[dict[str, Any]]:
    from raytune_fsdp.record.jsonl import read_trajectory

    return read_trajectory(run_dir(config) / "metrics.jsonl")


@pytest.mark.parametrize(
    ("kinds", "steps"),
    [
        pytest.param(("8bit", "rounded", "adafactor"), 4, id="8bit-rounded-adafactor"),
        # Lion has learned something after six.
        pytest.param(("muon", "sgd", "lion"), 6, id="muon-sgd-lion", marks=pytest.mark.slow),
    ],
)
def test_runs_agree_and_continue(tmp_path: Path, kinds: tuple[str, ...], steps: int) -> None:
    """At one rank; begun at three and continued at one; at two, and at two with a stop in between."""
    configs = {
        name: {kind: run_of(tmp_path, kind, name, steps) for kind in kinds}
        for name in ("alone", "fewer", "two", "stop")
    }
    values = {name: [each.model_dump() for each in found.values()] for name, found in configs.items()}
    resident_ranks(train_all, 1, values["alone"])
    resident_ranks(train_all, 3, values["fewer"], steps - 2)
    resident_ranks(train_all, 1, values["fewer"])
    resident_ranks(train_all, 2, values["two"])
    resident_ranks(train_all, 2, values["stop"], steps // 2)
    resident_ranks(train_all, 2, values["stop"])
    for kind in kinds:
        rows = {name: lines(configs[name][kind]) for name in configs}
        assert rows["stop"] == rows["two"], f"{kind}: a run that was stopped goes on as if it had not been"
        for name in ("fewer", "two"):
            for key, bound in zip(("loss", "grad_norm"), BOUNDS.get(kind, (1e-3, 1e-2)), strict=True):
                assert largest_difference(rows["alone"], rows[name], key) < bound, (kind, name, key)
        ends = [_hash(configs[name][kind]) for name in ("two", "stop")]
        assert ends[0] == ends[1], f"{kind}: weights and state"
        assert rows["alone"][-1]["loss"] < rows["alone"][0]["loss"], kind
    if "8bit" in kinds:
        saved = checkpoints(run_dir(configs["fewer"]["8bit"]))[-1]
        kept = types_in(saved, "optim.model.layers.0.mlp.up_proj.weight.exp")
        assert sorted(kept.values(), key=str) == [torch.float32] * 2 + [torch.uint8] * 2, "it goes on quantized"


def _hash(config: FinetuneConfig) -> str:
    found = tensors_in(checkpoints(run_dir(config))[-1])
    digest = hashlib.sha256()
    for name in sorted(found):
        digest.update(name.encode() + found[name].flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
