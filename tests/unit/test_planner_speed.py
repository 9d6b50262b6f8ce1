"""How long a step is said to take: over which links, beside which copies, and that a plan leaves nothing behind."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from raytune_fsdp.base.errors import ModelError
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.predict.devices import find_device
from raytune_fsdp.predict.links import move, network_of
from raytune_fsdp.predict.prediction import Cluster, Prediction, predict
from raytune_fsdp.predict.subject import ModelSpec
from raytune_fsdp.step.traffic import Traffic
from tests.unit.test_planner_memory import LLAMA, config_of

WEIGHTS = Traffic(gathered=2e9, scattered=1e9, all_reduced=0.0, bytes_gathered=2, bytes_reduced=4)
COPIES = replace(WEIGHTS, all_reduced=0.5e9)


@pytest.mark.parametrize(
    ("gpu", "world", "gbps", "traffic", "moved"),
    [
        # NVLink is faster than 50 GB/s between machines: each byte goes into each of them once.
        ("A100-80GB", 16, 400, WEIGHTS, (8 / 50, 8, 8)),
        # PCIe is slower than 400 GB/s: the same bytes pass each card.
        ("L40S", 16, 3200, WEIGHTS, (8 / 31.5, 8, 8)),
        ("L40S", 8, 3200, WEIGHTS, (8 / 31.5, 8, 0)),
        # Shards inside of machines, and eight rings of replicas between two.
        ("A100-80GB", 16, 400, COPIES, (8 / 300 + 8 * 2 / 50, 8, 16)),
        # As many rings through cards whose own link is the slowest.
        ("L40S", 16, 8000, COPIES, (8 / 31.5 + 2 / 31.5, 8, 16)),
    ],
)
def test_the_slowest_link_of_a_ring_decides(
    gpu: str, world: int, gbps: int, traffic: Traffic, moved: tuple[float, float, float]
) -> None:
    parallel = {"strategy": "hybrid_shard", "shard_size": 8} if traffic is COPIES else {}
    layout = resolve(config_of(LLAMA, parallel=parallel, train={"micro_batch": 1}), world).layout
    found = move(layout, network_of(find_device(gpu), 8, gbps * 1e9 / 8), traffic, 0)
    seconds, inside, between = moved
    assert found.seconds == pytest.approx(seconds / 0.8)
    assert (found.inside / 1e9, found.between / 1e9) == pytest.approx((inside, between))


def planned(world: int = 2, architecture: dict[str, Any] = LLAMA, **sections: Any) -> Prediction:
    config = config_of(architecture, **sections)
    return predict(ModelSpec.of(config), config, world, Cluster(device=find_device("A100-80GB"), between=50e9))


@pytest.mark.slow
def test_copies_to_the_host_take_their_time() -> None:
    here = planned().seconds
    wide = {**LLAMA, "intermediate_size": 4096}  # tensors of less than a MiB stay
    away = planned(2, wide, parallel={"activation_offload": True, "activation_checkpointing": "none"})
    assert here.offloading == 0
    passes = away.plan.division.full_rounds
    assert away.memory.sent > 0
    # There and back, over PCIe 4 at 80 %.
    assert away.seconds.offloading == pytest.approx(2 * passes * away.memory.sent / (0.8 * 31.5e9))
    weights = planned(parallel={"cpu_offload": True})
    stay, passes = weights.memory.start["weights"], weights.plan.division.full_rounds
    assert weights.seconds.offloading == pytest.approx(3 * passes * stay / (0.8 * 31.5e9), rel=0.01)
    assert weights.seconds.update > here.update  # a host's memory is slower


@pytest.mark.slow
def test_preferences_take_the_head_twice_and_kto_the_network() -> None:
    def step(objective: str, format: str) -> float:
        rows = [{"path": "rows.jsonl", "format": {"type": format}}]
        found = planned(2, data={"train": rows, "seq_len": 64}, train={"objective": {"type": objective}})
        assert found.seconds.inside == pytest.approx(
            usual.seconds.inside * (1.25 if objective == "kto" else 1), rel=0.01
        )
        return found.seconds.compute / usual.seconds.compute

    usual = planned()
    assert 1.0 < step("simpo", "preference") == step("dpo", "preference") < 1.1
    assert 1.2 < step("kto", "binary") < 1.4


@pytest.mark.slow
def test_a_teacher_takes_little_more_of_the_head() -> None:
    """A pass more over its logits at another temperature, in the memory of a chunk; on parts of the tokens, too."""
    wide = {**LLAMA, "vocab_size": 4096}

    def found(temperature: float, **mesh: int) -> Prediction:
        return planned(
            2, wide, train={"objective": {"type": "distill", "cross_entropy": 0.5}}, parallel={"mesh": mesh},
            teacher={"model": "./teacher", "temperature": temperature},
        )  # fmt: skip

    usual, learning, hot = planned(2, wide), found(1.0), found(2.0)
    assert 1.0 < learning.seconds.compute / usual.seconds.compute < hot.seconds.compute / usual.seconds.compute < 1.2
    assert usual.memory.total <= learning.memory.total < hot.memory.total
    assert found(1.0, sequence=2).memory.total < learning.memory.total


@pytest.mark.slow
def test_a_step_is_inside_of_its_interval() -> None:
    for found in (
        planned(),
        planned(16, train={"micro_batch": 1}),
        planned(1),
        planned(parallel={"cpu_offload": True}),
    ):
        low, high = found.interval
        assert low <= found.seconds.step <= high and low < high


def test_a_plan_draws_no_random_numbers() -> None:
    random.seed(3)
    torch.manual_seed(3)
    before, drawn = random.getstate(), torch.get_rng_state()
    planned(2, {**LLAMA, "num_hidden_layers": 2})
    assert random.getstate() == before and bool((torch.get_rng_state() == drawn).all())
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_flex_attention_is_planned_as_a_kernel_like_it() -> None:
    assert planned(model={"attention": "flex_attention"}).memory == planned().memory


def test_a_network_that_cannot_be_traced_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise NotImplementedError("aten::odd has no meta kernel\n and a stack")

    monkeypatch.setattr("raytune_fsdp.predict.prediction.trace", fails)
    with pytest.raises(ModelError, match=r"cannot be planned without its data \(.*aten::odd.*--dry-run"):
        planned()


def test_a_network_without_layers_is_refused_in_one_line() -> None:
    with pytest.raises(ModelError, match="train one that has at least one layer"):
        planned(architecture={**LLAMA, "num_hidden_layers": 0})
