"""What a plan advises: only what is valid and helps, each piece with what it rests on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.load import load_config
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.predict.advise.advice import Advice, advice
from raytune_fsdp.predict.advise.alternatives import (
    _candidates,
    allowed_micro_batch,
    as_flags,
    change_in_words,
    moving_less,
    shared,
    step_down,
)
from raytune_fsdp.predict.advise.changes import with_changes
from raytune_fsdp.predict.devices import find_device, link_speed
from raytune_fsdp.predict.page.text import as_page
from raytune_fsdp.predict.planned import planned
from raytune_fsdp.predict.prediction import Cluster, Prediction, predict
from raytune_fsdp.predict.stopping import Stopping, Writing
from raytune_fsdp.predict.subject import ModelSpec
from tests.unit.test_planner_memory import EXPERTS, LLAMA, config_of

WIDE = {**LLAMA, "hidden_size": 256, "intermediate_size": 2048, "vocab_size": 4096}
FEW = {**WIDE, "num_hidden_layers": 2}


def look(
    config: FinetuneConfig, world: int, gpu: str = "A100-80GB", speed: str = "400Gbps"
) -> tuple[ModelSpec, Prediction]:
    subject, cluster = ModelSpec.of(config), Cluster(device=find_device(gpu), per_node=8, between=link_speed(speed))
    return subject, predict(subject, config, world, cluster)


def ids(found: list[Advice]) -> list[str]:
    assert all(each.text and each.source for each in found)
    return [each.id for each in found]


@pytest.mark.slow
def test_the_next_step_down_is_one_that_frees() -> None:
    config = config_of(WIDE, train={"micro_batch": 4, "global_batch": 16})
    names = []
    for _ in range(4):
        subject, found = look(config, 2)
        down = step_down(subject, config, found)
        assert down is not None and down.prediction.needed < found.needed
        names.append(change_in_words(down.changes))
        values = config.model_dump(exclude_unset=True)
        for path, value in down.changes.items():
            section, _, name = path.partition(".")
            values[section] = {**values.get(section, {}), name: value} if name else value
        config = FinetuneConfig.model_validate(values)
    # What learns the same first.
    assert names == ["recompute=selective", "recompute=full", "micro_batch=2", "micro_batch=1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "method", "mesh"),
    [(1, {}, {}), (4, {}, {"tensor": 2}), (1, {"type": "lora", "rank": 2}, {}), (4, {"type": "lora", "rank": 2}, {})],
)
def test_a_checkpoint_is_as_large_on_any_mesh(world: int, method: dict[str, Any], mesh: dict[str, int]) -> None:
    """Also where a weight has fewer rows than there are ranks."""
    _, found = look(config_of(LLAMA, method=method or {"type": "full"}, parallel={"mesh": mesh}), world)
    assert found.checkpoint == pytest.approx(12 * found.parameters.trainable, rel=0.01)


@pytest.mark.parametrize(
    "sections",
    [{"run": {"exact": True}}, {"parallel": {"mesh": {"tensor": 2}}}, {"parallel": {"reduce": "hierarchical"}}],
)
def test_what_does_not_go_with_a_config_is_no_alternative(sections: dict[str, Any]) -> None:
    config = config_of(LLAMA, **sections)
    cluster = Cluster(device=find_device("A100-80GB"), per_node=8, between=link_speed("400Gbps"))
    assert [*_candidates(config, 2, cluster)]


@pytest.mark.slow
def test_there_is_a_last_step_down() -> None:
    config = config_of(FEW, parallel={"activation_checkpointing": "full"}, train={"micro_batch": 1})
    subject, found = look(config, 2)
    assert step_down(subject, config, found) is None


@pytest.mark.slow
def test_ways_to_move_less_are_valid_and_faster() -> None:
    config = config_of(WIDE, train={"micro_batch": 1, "global_batch": 64})
    subject, found = look(config, 16, speed="1Gbps")
    assert found.seconds.bound == "communication"
    faster = moving_less(subject, config, found)
    ways = {change_in_words(each.changes) for each in faster}
    assert {"micro_batch=2", "defer_gradient_sync=True", "strategy=hybrid_shard shard_size=8"} <= ways
    times = [each.prediction.seconds.step for each in faster]
    assert times == sorted(times) and times[-1] < found.seconds.step
    said = advice(config, found, faster)
    assert ids(said) == ["communication-bound", "no-infiniband"]
    assert all(change_in_words(each.changes) in said[0].text for each in faster)
    # An exact run stays one.
    exact = config_of(WIDE, train={"micro_batch": 1, "global_batch": 64}, run={"exact": True})
    subject, found = look(exact, 16, speed="1Gbps")
    (one,) = moving_less(subject, exact, found)
    assert one.changes == {"parallel.reduce": "hierarchical"}
    assert "passed from machine to machine, and the bits are the same" in advice(exact, found, [one])[1].text
    # With a batch that gives each rank one block, and shards inside of machines, nothing is left to say.
    least = config_of(WIDE, parallel={"strategy": "hybrid_shard", "shard_size": 8}, train={"micro_batch": 1})
    subject, found = look(least, 16, speed="1Gbps")
    assert moving_less(subject, least, found) == []
    assert "nothing that learns the same and fits is faster" in advice(least, found, [])[0].text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "speed", "world", "expected"),
    [
        ("L40S", "400Gbps", 8, "no-nvlink"),
        ("A100-80GB", "100Gbps", 16, "no-infiniband"),
        ("A100-80GB", "400Gbps", 64, "large-cluster"),
        ("V100-32GB", "400Gbps", 2, "no-bf16"),
    ],
)
def test_what_hardware_lacks_is_said(gpu: str, speed: str, world: int, expected: str) -> None:
    config = config_of(WIDE, train={"micro_batch": 1, "global_batch": 64})
    _, found = look(config, world, gpu, speed)
    assert expected in ids(advice(config, found))
    _, fine = look(config, 16, "H100", "3200Gbps")
    assert expected not in ids(advice(config, fine))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lr", "tokens", "billions", "high"),
    # Ten times 2e-5 for 262,144 tokens, and half of that for a quarter of them.
    [(1.9e-4, 262_144, 7, False), (2.1e-4, 262_144, 7, True), (1.1e-4, 65_536, 7, True), (3e-5, 262_144, 180, True)],
)
def test_a_rate_is_high_for_the_batch_and_the_size(lr: float, tokens: int, billions: int, high: bool) -> None:
    model: dict[str, Any] = {"init": "pretrained", "path": "some/model", "architecture": None, "tokenizer": None}
    config = config_of(LLAMA)
    asked = config_of(LLAMA, model=model, optim={"lr": lr})
    _, found = look(config, 1)
    parameters = replace(found.parameters, total=billions * 10**9)
    found = replace(found, tokens=tokens, parameters=parameters)
    assert ("lr-high" in ids(advice(asked, found))) is high
    assert "lr-high" not in ids(advice(config_of(LLAMA, optim={"lr": 1.0}), found))  # a network from nothing


@pytest.mark.slow
def test_a_notice_that_is_too_short_for_a_save_is_said() -> None:
    config = config_of(FEW)
    _, small = look(config, 2)
    large = replace(small, checkpoint=12 * 68_976_648_192)

    def said(cloud: str, found: Prediction, speed: float | None) -> list[str]:
        stopping = None if speed is None else Stopping.of(found, Writing(speed, measured=True))
        notes = advice(with_changes(config, {"cluster.spot_notice": cloud}), found, None, stopping)
        return [each.text for each in notes if each.id == "notice"]

    (unknown,) = said("aws", large, None)
    assert "is not known (--storage 1.2GB/s). Where storage writes less than 6.9 GB/s" in unknown
    (slow,) = said("aws", large, 1.2e9)
    assert "comes 120 s before the end, and a save takes 690 s at 1.2 GB/s" in slow
    assert not said("aws", large, 7e9) and said("azure", large, 7e9)
    assert not said("none", large, 1.0)
    assert not said("aws", small, None), "any storage saves that in time"


@pytest.mark.slow
def test_experts_sleep() -> None:
    _, found = look(config_of(EXPERTS), 2)
    # Two of eight experts, of three matrices of 64 x 32 in each of eight layers.
    assert found.parameters.total - found.active == 8 * 6 * 3 * 64 * 32
    _, dense = look(config_of(LLAMA), 2)
    assert dense.active == dense.parameters.total


def test_the_batch_says_how_many_samples_a_rank_can_have() -> None:
    config = config_of(LLAMA, train={"global_batch": 48, "micro_batch": 1})
    assert [allowed_micro_batch(config, world) for world in (1, 2, 5, 16, 48)] == [48, 24, 8, 3, 1]


LONG = {"data": {"seq_len": 256}, "train": {"micro_batch": 1, "global_batch": 8}}


def needed(config: FinetuneConfig, world: int, **changes: Any) -> int:
    return look(with_changes(config, changes), world)[1].needed


def too_long(config: FinetuneConfig, world: int, memory: int) -> tuple[ModelSpec, Prediction]:
    """On devices of so much memory."""
    subject, found = look(config, world)
    cluster = replace(found.cluster, device=replace(found.cluster.device, memory=memory))
    return subject, replace(found, cluster=cluster)


@pytest.mark.slow
@pytest.mark.parametrize("members", [2, 4])
def test_the_fewest_ranks_that_have_to_share_samples(members: int) -> None:
    config = config_of(LLAMA, **LONG, parallel={"activation_checkpointing": "full"})
    changes = {"parallel.mesh.sequence": members}
    subject, found = too_long(config, 8, needed(config, 8, **changes))
    assert not found.fits
    way = shared(subject, config, found)
    assert way is not None and way.prediction.fits and dict(way.changes) == changes
    assert as_flags(way.changes) == f"--parallel.mesh.sequence {members}"
    assert way.prediction.tokens == found.tokens and way.prediction.plan.layout.sequence == members
    stated = with_changes(config, {"parallel.mesh.shard": 8})
    way = shared(subject, stated, found)
    assert way is not None and dict(way.changes) == {**changes, "parallel.mesh.shard": 8 // members}
    # As a mesh that is there already is no help, neither is one of which some ranks would have more heads than others.
    already = with_changes(config, changes)
    subject, found = too_long(already, 8, needed(already, 8) - 1)
    way = shared(subject, already, found)
    assert way is None or dict(way.changes).get("parallel.mesh.sequence") in (None, 4)


@pytest.mark.slow
def test_what_is_computed_again_beside_ranks_that_share_samples() -> None:
    config = config_of(LLAMA, **LONG)
    both = {"parallel.mesh.sequence": 4, "parallel.activation_checkpointing": "full"}
    subject, found = too_long(config, 4, needed(config, 4, **both))
    way = shared(subject, config, found)
    assert way is not None and dict(way.changes) == both and way.prediction.fits
    subject, found = too_long(config, 4, needed(config, 4, **both) - 1)
    way = shared(subject, config, found)
    assert way is None or "parallel.mesh.tensor" in way.changes
    peak = found.memory.peak
    subject, found = too_long(config, 4, found.needed - peak["activations"] - peak["gathered"] - 1)
    assert shared(subject, config, found) is None, "what is too much no mesh divides"


@pytest.mark.slow
def test_the_fewest_ranks_that_have_to_share_layers() -> None:
    """What is too much are gathered weights, which ranks that share samples have all of."""
    sections = {**LONG, "data": {"seq_len": 32}, "parallel": {"activation_checkpointing": "full"}}
    config = config_of(LLAMA, **sections)
    changes = {"parallel.mesh.tensor": 2}
    subject, found = too_long(config, 8, needed(config, 8, **changes))
    way = shared(subject, config, found)
    assert way is not None and way.prediction.fits and dict(way.changes) == changes
    assert as_flags(way.changes) == "--parallel.mesh.tensor 2"
    assert way.prediction.tokens == found.tokens and way.prediction.plan.layout.tensor == 2


@pytest.mark.slow
def test_the_page_says_how_ranks_share_what_is_too_long_for_one() -> None:
    """An 8B at 131,072 tokens: the recipe's mesh is the smallest that fits."""
    recipe = load_config("llama3-8b-131072-8gpus", ["--train.max_steps", "10", "--train.epochs", "null"])
    config = with_changes(recipe, {"parallel.mesh.sequence": 1})
    cluster = Cluster(device=find_device("A100-80GB"))
    found = planned(config, resolve(config, 8), cluster)
    assert not found.prediction.fits and found.shared is not None
    assert found.shared.changes == {"parallel.mesh.sequence": recipe.parallel.mesh.sequence}
    assert f"--parallel.mesh.sequence {recipe.parallel.mesh.sequence}" in as_page(found)
