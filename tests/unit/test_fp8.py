"""Which layers multiply in 8 bits, what is refused, and what a plan says of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config import ParallelConfig
from raytune_fsdp.model.layers import layers_of, set_training_forward
from raytune_fsdp.model.objective.loss import micro_batch_loss
from raytune_fsdp.model.precision import fp8
from raytune_fsdp.model.precision.fp8 import (
    check_fp8,
    compute_in_fp8,
    layers_in_fp8,
    left_in_bf16,
    narrow,
    scales_of,
    widen_fp8,
)
from raytune_fsdp.model.proof import documents
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.predict.devices import find_device
from raytune_fsdp.predict.links import move, network_of
from raytune_fsdp.predict.prediction import Cluster, Prediction, predict
from raytune_fsdp.predict.subject import ModelSpec
from raytune_fsdp.step.precision import check_precision
from raytune_fsdp.step.traffic import Traffic
from tests.models import build
from tests.runs import LLAMA, make_config
from tests.unit.test_planner_memory import LLAMA as PLANNED
from tests.unit.test_planner_memory import config_of

CPU = torch.device("cpu")
WIDE = {**PLANNED, "hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 512, "head_dim": 64}


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"precision": "fp8", "fp8_gather": True, "fp8_scaling": "rowwise"}, "fp8_scaling=rowwise.*fp8_scaling=tensor"),
        ({"fp8_scaling": "rowwise"}, "fp8_scaling=rowwise with parallel.precision=bf16.*leave fp8_scaling out"),
        ({"fp8_gather": True}, "fp8_gather=true with parallel.precision=bf16"),
        ({"precision": "fp8", "mesh": {"sequence": 2}}, "mesh.sequence=2 with parallel.precision=fp8.*precision=bf16"),
        ({"precision": "fp16", "reduce_dtype": "bf16"}, "reduce_dtype=bf16 with parallel.precision=fp16"),
        ({"precision": "fp32", "reduce_dtype": "bf16"}, "reduce_dtype=bf16 with parallel.precision=fp32"),
        ({"precision": "fp64", "reduce_dtype": "fp32"}, "reduce_dtype=fp32 with parallel.precision=fp64"),
        ({"strategy": "replicate", "reduce": "hierarchical"}, "reduce=hierarchical with parallel.strategy=replicate"),
    ],
)
def test_what_has_no_meaning_is_refused(parallel: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ParallelConfig.model_validate(parallel)


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_adapters_are_refused(tmp_path: Path, method: str) -> None:
    with pytest.raises(ValidationError, match=f"method.type={method} with parallel.precision=fp8.*precision=bf16"):
        make_config(tmp_path, LLAMA, parallel={"precision": "fp8"}, method={"type": method})


def test_layers_whose_sides_do_not_suit_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    network = build("llama", intermediate_size=72)
    names = {id(module): name for name, module in network.named_modules()}
    chosen = {names[id(layer)].rpartition(".")[2] for layer in layers_in_fp8(network)}
    assert chosen == {"q_proj", "k_proj", "v_proj", "o_proj"}
    left = left_in_bf16(network)
    assert {name.rpartition(".")[2] for name in left} == {"gate_proj", "up_proj", "down_proj"}
    assert left["model.layers.0.mlp.up_proj"] == "a side of 72 x 32 is not a multiple of 16"
    monkeypatch.setattr(fp8, "_check_torchao", lambda: None)
    with pytest.raises(ConfigError, match=r"no layer of a GPT2LMHeadModel .*it is not an nn.Linear\); set parallel"):
        check_fp8(build("gpt2"))
    frozen = build("llama").requires_grad_(False)
    with pytest.raises(ConfigError, match="it is frozen"):
        check_fp8(frozen)


def test_without_torchao_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"fp8 needs torchao, which is not installed: pip install .*precision=bf16"):
        check_fp8(build("llama"))


@pytest.mark.parametrize(("capability", "works"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_gpus_without_fp8_are_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], works: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    if works:
        check_precision("fp8", torch.device("cuda", 0))
        return
    with pytest.raises(ConfigError, match="precision=fp8: A100 has no fp8 .*set parallel.precision=bf16"):
        check_precision("fp8", torch.device("cuda", 0))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_what_was_widened_is_narrowed_to_the_same_bits(dtype: torch.dtype) -> None:
    """Of all numbers of 16 bits between the smallest and the largest, whatever the largest is."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]
    for most in (1e-6, 0.0173, 0.5, 1.0, 3.1415, 250.0, 1e4):
        numbers = every[every.abs() <= most]
        scale = scales_of(numbers.abs().max(), dtype)
        sent = narrow(numbers, scale, dtype)
        got = torch.empty_like(numbers)
        widen_fp8(sent, scale, got)
        assert torch.equal(got.float(), (sent.float() / scale).bfloat16().float())
        assert torch.equal(scales_of(got.abs().max(), dtype), scale)
        assert torch.equal(narrow(got, scale, dtype).float(), sent.float())


def _computed(scaling: str | None, recompute: str = "none") -> dict[str, torch.Tensor]:
    """The loss of documents and its gradients."""
    model = build("llama").bfloat16()
    if scaling is not None:
        compute_in_fp8(model, scaling, emulated=True)  # type: ignore[arg-type]
    set_training_forward(model, recompute=recompute)
    loss = micro_batch_loss(model.train(), documents(model, CPU)).total
    loss.backward()  # type: ignore[no-untyped-call]
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_training_is_near_bf16_and_recomputing_changes_nothing(scaling: str) -> None:
    pytest.importorskip("torchao")
    bf16, plain = _computed(None), _computed(scaling)
    assert bf16.keys() == plain.keys()
    assert plain["loss"] != bf16["loss"]
    assert abs(plain["loss"] / bf16["loss"] - 1) < 2e-3
    name = "model.layers.0.mlp.up_proj.weight"
    apart = (plain[name] - bf16[name]).norm() / bf16[name].norm()
    assert 0.005 < apart < 0.15, apart
    for recompute in ("full", "selective"):
        again = _computed(scaling, recompute)
        assert all(torch.equal(again[key], plain[key]) for key in plain), recompute


def test_evaluations_multiply_in_16_bits() -> None:
    """They measure what is exported; and no document changes how another one's numbers are rounded."""
    pytest.importorskip("torchao")
    model = build("llama").bfloat16().eval()
    block = documents(model, CPU)
    with torch.no_grad():
        before = micro_batch_loss(model, block).total
        names = [name for name, _ in model.named_parameters()]
        compute_in_fp8(model, "tensorwise", emulated=True)
        assert torch.equal(micro_batch_loss(model, block).total, before)
        assert not torch.equal(micro_batch_loss(model.train(), block).total, before)
    assert [name for name, _ in model.named_parameters()] == names
    assert len(layers_in_fp8(model)) == 7 * len(layers_of(model))


def _planned(world: int = 8, gpu: str = "H100", between: float = 50e9, **parallel: Any) -> Prediction:
    config = config_of(WIDE, parallel=parallel, train={"micro_batch": 1, "global_batch": 2 * world})
    cluster = Cluster(device=find_device(gpu), per_node=8, between=between)
    return predict(ModelSpec.of(config), config, resolve(config, world), cluster)


@pytest.mark.slow
def test_a_plan_knows_what_travels_and_what_is_not_known() -> None:
    pytest.importorskip("torchao")
    bf16, narrowed = _planned(precision="bf16"), _planned(precision="fp8")
    wide = _planned(precision="fp8", fp8_gather=False)
    assert bf16.traffic is not None and narrowed.traffic is not None and wide.traffic is not None
    assert narrowed.traffic.bytes_of_weights < 0.55 * bf16.traffic.bytes_of_weights
    assert wide.traffic == bf16.traffic
    assert narrowed.traffic.bytes_of_gradients == bf16.traffic.bytes_of_gradients
    assert narrowed.seconds.moving < bf16.seconds.moving
    assert narrowed.memory.start == bf16.memory.start
    assert "in 8 bits 2 times that, by data sheets, not measured" in narrowed.rates
    assert "8 bits" not in bf16.rates


@pytest.mark.slow
def test_a_plan_knows_two_levels() -> None:
    """Half the bytes between nodes, and no others; on one node nothing."""
    flat = _planned(16, precision="bf16")
    two = _planned(16, precision="bf16", reduce="hierarchical")
    half = _planned(16, precision="bf16", reduce="hierarchical", reduce_dtype="bf16")
    for found in (flat, two, half):
        assert found.traffic is not None
    weights, gradients = flat.traffic.bytes_of_weights, flat.traffic.bytes_scattered  # type: ignore[union-attr]
    assert flat.seconds.between == pytest.approx(weights + gradients)
    # Of the (N-1)/N of 16 ranks on 2 nodes, (G-1)/G times 16/15.
    assert two.seconds.between == pytest.approx(weights + gradients * (1 / 2) / (15 / 16))
    assert half.seconds.between == pytest.approx(weights + gradients * (1 / 2) / (15 / 16) / 2)
    one = _planned(8, precision="bf16", reduce="hierarchical")
    assert one.traffic is not None and one.traffic.crossing == 0


def test_what_crosses_takes_its_time() -> None:
    traffic = Traffic(gathered=2e9, scattered=15e8, crossing=1e8, all_reduced=0.0, bytes_gathered=2, bytes_reduced=4)
    layout = resolve(config_of(PLANNED, train={"micro_batch": 1}), 16).layout
    network = network_of(find_device("A100-80GB"), 8, 50e9)
    found = move(layout, network, traffic, 0)
    assert (found.inside, found.between) == pytest.approx((4e9 + 56e8, 4e9 + 32e8))
    assert found.seconds == pytest.approx((4 / 50 + 5.6 / 300 + 3.2 / 50) / 0.8)
    rounded = move(layout, network, replace(traffic, bytes_crossing=2), 0)
    assert rounded.between == pytest.approx(4e9 + 16e8)


@pytest.mark.parametrize(
    ("name", "has"),
    [("A100-80GB", False), ("A10G", False), ("RTX-3090", False), ("RTX-A6000", False), ("MI250X", False), ("T4", False),
     ("L4", True), ("L40S", True), ("RTX-4090", True), ("RTX-6000-Ada", True), ("H100", True), ("H20", True),
     ("B200", True), ("GB200", True), ("GH200-96GB", True), ("MI300X", True)],
)  # fmt: skip
def test_devices_with_fp8(name: str, has: bool) -> None:
    assert find_device(name).fp8 is has
