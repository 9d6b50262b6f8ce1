"""What real steps send is what step/traffic.py says, to the number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.collectives import KINDS, Collectives
from raytune_fsdp.base.measured import ParameterCount
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.sections.method import QloraMethod
from raytune_fsdp.model.precision.quantized import quantize_layers
from raytune_fsdp.plan.division import Division
from raytune_fsdp.plan.plan import Layout
from raytune_fsdp.predict.links import Network, move
from raytune_fsdp.step.traffic import Collectives as Spread
from raytune_fsdp.step.traffic import UnitSize, step_traffic
from tests.models import save_checkpoint
from tests.ranks import resident_ranks, run_ranks
from tests.runs import make_config

SLOW = pytest.mark.slow
LORA = {"type": "lora", "rank": 4, "alpha": 8}
QLORA = {**LORA, "type": "qlora"}


def moved(
    configs: Sequence[Mapping[str, Any]], steps: int = 2
) -> list[tuple[list[dict[str, Any]], dict[str, float], ParameterCount]]:
    """Of each run: what this rank's first steps received, what is predicted of each, and how many weights there are."""
    return [_moved(FinetuneConfig.model_validate(values), steps) for values in configs]


def _moved(
    config: FinetuneConfig, steps: int, per_node: int | None = None
) -> tuple[list[dict[str, Any]], dict[str, float], ParameterCount]:
    from raytune_fsdp.model.network import build_network
    from raytune_fsdp.run.assemble import assemble
    from raytune_fsdp.step.parallel import sharding_units, traffic_of
    from raytune_fsdp.step.train_step import train_step
    from tests.runs import prepare_on_rank0

    prepared, standing = prepare_on_rank0(config)
    plan = standing.plan
    model = build_network(prepared.hf_config, config)
    if isinstance(config.method, QloraMethod):
        quantize_layers(model, config.method.quantization)
    said = traffic_of(
        model, sharding_units(model, config.parallel, ends=prepared.needs.ends), config.parallel, plan.layout,
        micro_batches=plan.division.full_rounds, per_node=per_node, exact=config.run.exact,
        hops=None if per_node is None else plan.division.hops(per_node),
    )  # fmt: skip
    parts = assemble(config, prepared, standing, torch.device("cpu"))
    found = []
    for _, batches in zip(range(steps), parts.batches, strict=False):
        with Collectives() as seen:
            train_step(
                parts.model, parts.optimizer, parts.scale, batches,
                plan=plan, parallel=parts.parallel, optim=config.optim, lr_factor=1.0, seed=3,
                sums=parts.sums,
            )  # fmt: skip
        found.append({"numbers": dict(seen.numbers), "bytes": dict(seen.bytes)})
    predicted = {kind: getattr(said, kind) for kind in (*KINDS, "numbers", "bytes")}
    return found, predicted, prepared.parameters


def check(found: Mapping[str, Any], predicted: Mapping[str, float], *, numbers: bool = True) -> None:
    """`numbers`: not where several types are gathered in one, as bytes."""
    for kind in KINDS if numbers else ():
        assert found["numbers"].get(kind, 0) == pytest.approx(predicted[kind], rel=1e-12), kind
    assert sum(found["bytes"].get(kind, 0) for kind in KINDS) == pytest.approx(predicted["bytes"], rel=1e-12)


def config_of(directory: Path, blocks: int, name: str = "run", **sections: Any) -> FinetuneConfig:
    model = sections.pop("model", "llama")
    train = {"global_batch": 2 * blocks, "micro_batch": 2, "max_steps": 4}
    base, changes = directory / "base", sections.pop("changes", {})
    if not base.exists():
        save_checkpoint(base, model, **changes)
    config = make_config(directory)
    chosen = {"path": str(base), "tokenizer": config.model.tokenizer, "init": "pretrained", "architecture": None}
    run = {"name": name, **sections.pop("run", {})}
    return make_config(directory, model=chosen, train=train, run=run, **sections)


CASES = [
    (3, 2, "llama", {"parallel": {"precision": "bf16"}}),
    (4, 2, "llama", {"parallel": {"precision": "bf16", "strategy": "hybrid_shard", "shard_size": 2}}),
    # What travels of adapters is counted below, too.
    pytest.param(3, 2, "llama", {"parallel": {"precision": "fp32"}, "method": LORA}, marks=SLOW),
    (3, 2, "llama", {"parallel": {"precision": "fp8"}}),
    (3, 2, "llama", {"parallel": {"precision": "bf16", "reduce_dtype": "bf16"}}),
    (3, 2, "llama", {"parallel": {"precision": "bf16"}, "run": {"exact": True}}),
]
MORE = [
    (world, 2, model, {"parallel": {"precision": precision, **parallel}, "method": method})
    for world, precision, parallel in (
        (2, "bf16", {"strategy": "shard_grad_op"}),
        (3, "fp32", {"strategy": "replicate"}),
        (3, "bf16", {"defer_gradient_sync": True}),
        (3, "fp32", {"strategy": "shard_grad_op", "defer_gradient_sync": True}),
        (4, "bf16", {"strategy": "hybrid_shard", "shard_size": 2, "defer_gradient_sync": True}),
        (4, "bf16_pure", {"wrap": 2}),
        (2, "fp16", {"activation_checkpointing": "full"}),
    )
    for model in ("gpt2", "llama")
    for method in ({"type": "full"}, LORA, {"type": "freeze", "trained": [r"(layers|h)\.1\."]})
]
MORE.append((3, 2, "llama", {"parallel": {"precision": "bf16"}, "method": QLORA}))
MORE.append((3, 2, "llama", {"parallel": {"precision": "fp32"}, "method": LORA, "run": {"exact": True}}))
MORE += [
    (world, 2, "llama", {"parallel": {"precision": "fp8", **parallel}, "method": method})
    for world, parallel, method in (
        (2, {"strategy": "shard_grad_op", "reduce_dtype": "bf16"}, {"type": "full"}),
        (4, {"strategy": "hybrid_shard", "shard_size": 2, "wrap": 2}, {"type": "full"}),
        (3, {"fp8_gather": False, "activation_checkpointing": "full"}, {"type": "full"}),
        (2, {"fp8_scaling": "rowwise"}, {"type": "full"}),
        (2, {"activation_checkpointing": "selective"}, {"type": "freeze", "trained": [r"layers\.1\."]}),
    )
]
"""Vocabularies of 131 rows, which no number of ranks divides."""


@pytest.mark.parametrize(
    ("world", "rounds", "model", "sections"), [*CASES, *(pytest.param(*each, marks=SLOW) for each in MORE)]
)
def test_steps_send_what_is_predicted(
    tmp_path: Path, world: int, rounds: int, model: str, sections: Mapping[str, Any]
) -> None:
    """Every rank, in its first step and in another: the forward passes of the check at the start leave nothing."""
    if sections.get("method") in (LORA, QLORA):
        pytest.importorskip("peft")
    narrow = sections["parallel"]["precision"] == "fp8"
    if narrow:
        pytest.importorskip("torchao")
    config = config_of(tmp_path, rounds * world, model=model, **sections)
    for ((found, predicted, _),) in resident_ranks(moved, world, [config.model_dump()]):
        for step in found:
            check(step, predicted, numbers=sections.get("method") != QLORA and not narrow)


@pytest.mark.slow
@pytest.mark.parametrize(("blocks", "hops"), [(8, 2), (7, 2.5)])
def test_sums_that_are_passed_from_node_to_node(tmp_path: Path, blocks: int, hops: float) -> None:
    """On average over ranks and four steps: the first node of a step gets the owners' rows, the others get the sum."""
    sections = {"parallel": {"precision": "bf16", "reduce": "hierarchical"}, "run": {"exact": True}}
    config = config_of(tmp_path, blocks, **sections)
    division = Division(global_batch=2 * blocks, micro_batch=2, total_samples=None, data_ranks=4)
    assert division.hops(2) == hops
    ranks = run_ranks(moved_by_nodes, 4, [config.model_dump()], 2)
    predicted = ranks[0][0][1]
    for kind in ("numbers", "bytes"):
        found = [sum(step[kind].get(each, 0) for each in KINDS) for ((steps, _, _),) in ranks for step in steps]
        assert sum(found) / len(found) == pytest.approx(predicted[kind], rel=1e-12)


@pytest.mark.parametrize(("nodes", "direct", "passed_on"), [(2, 2.13, 1.07), (4, 3.10, 1.16), (16, 3.78, 1.06)])
def test_between_nodes_of_eight(nodes: int, direct: float, passed_on: float) -> None:
    """What leaves a node in an exact run of many micro-batches, in units of what a ring in fp32 sends."""
    ranks, weights, passes = 8 * nodes, 1e9, 1000
    layout = Layout(world=ranks, data_ranks=ranks, replicas=1, shard_size=ranks)
    network = Network(per_node=8, inside=1e11, between=1e10, to_host=1e10, host_memory=1e10)

    def sent(reduced: int, exact: bool, nodes: int) -> float:
        how = Spread(
            shard_size=ranks, replicas=1, micro_batches=passes, bytes_gathered=2, bytes_reduced=reduced, exact=exact,
            nodes=nodes,
        )  # fmt: skip
        return move(layout, network, step_traffic([UnitSize(weights=0, trained=weights)], how), 0).between

    ring = sent(4, False, 1)
    assert ring == pytest.approx(passes * weights * 4 * (ranks - 1) / ranks)
    assert sent(2, True, 1) / ring == pytest.approx(direct, abs=0.01)
    assert sent(2, True, nodes) / ring == pytest.approx(passed_on, abs=0.01)


def moved_by_nodes(configs: Sequence[Mapping[str, Any]], per_node: int) -> Any:
    from raytune_fsdp.step import reduce_by_node

    reduce_by_node.this_node = lambda: str(dist.get_rank() // per_node)  # type: ignore[assignment, return-value]
    return [_moved(FinetuneConfig.model_validate(values), 4, per_node) for values in configs]


@pytest.mark.slow
def test_in_units_of_all_weights(tmp_path: Path) -> None:
    """On two ranks: all weights three times for `full_shard`, twice for the others; and in `bf16`, whose gradients are
    summed in fp32, no more bytes than `replicate`."""
    kinds: dict[str, dict[str, Any]] = {
        "full_shard": {"precision": "fp32"},
        "shard_grad_op": {"precision": "fp32", "strategy": "shard_grad_op"},
        "replicate": {"precision": "fp32", "strategy": "replicate"},
        "full_shard in bf16": {"precision": "bf16"},
        "replicate in bf16": {"precision": "bf16", "strategy": "replicate"},
    }
    configs = [
        config_of(tmp_path, 2, name=name.replace(" ", "-"), changes={"num_hidden_layers": 24}, parallel=parallel)
        for name, parallel in kinds.items()
    ]
    results = resident_ranks(moved, 2, [config.model_dump() for config in configs])[0]
    numbers, sent = {}, {}
    for name, ((step, *_), predicted, parameters) in zip(kinds, results, strict=True):
        check(step, predicted)
        across = parameters.total * (2 - 1) / 2
        numbers[name] = sum(step["numbers"].get(kind, 0) for kind in KINDS) / across
        sent[name] = sum(step["bytes"].get(kind, 0) for kind in KINDS) / across
    last = (131 + 1) * 32 / parameters.total  # norm and head, which stay for backward, 2 % of this network
    for strategy, times in (("full_shard", 3 - last), ("shard_grad_op", 2), ("replicate", 2)):
        assert numbers[strategy] == pytest.approx(times, rel=2e-3), strategy  # 131 rows on two ranks
    assert sent["full_shard"] / sent["replicate"] == pytest.approx(1.5, rel=0.01)
    assert sent["full_shard in bf16"] / sent["replicate in bf16"] == pytest.approx(1.0, rel=0.01)


@pytest.mark.slow
def test_weights_in_8_bits_are_half_the_bytes(tmp_path: Path) -> None:
    """The whole of a network of 24 blocks, with its embedding and head in 16 bits, at most 0.55 of bf16's bytes; and of
    each the formula of step/traffic.py."""
    pytest.importorskip("torchao")
    configs = [
        config_of(tmp_path, 2, name=precision, changes={"num_hidden_layers": 24}, parallel={"precision": precision})
        for precision in ("bf16", "fp8")
    ]
    gathered = []
    for (step, *_), predicted, _ in resident_ranks(moved, 2, [config.model_dump() for config in configs])[0]:
        check(step, predicted, numbers=False)
        gathered.append(step["bytes"]["gathered"])
    layers = 24 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64)  # each gathered twice: queries and output, keys and values
    assert gathered[0] - gathered[1] == 2 * layers / 2
    assert gathered[1] <= 0.55 * gathered[0], gathered[1] / gathered[0]


def test_of_adapters_only_their_own_gradients_travel(tmp_path: Path) -> None:
    """And the frozen embedding is gathered for forward alone: no gradient comes to it."""
    pytest.importorskip("peft")
    config = config_of(tmp_path, 2, parallel={"precision": "fp32"}, method=LORA)
    (((step, *_), _, parameters),) = resident_ranks(moved, 2, [config.model_dump()])[0]
    assert step["numbers"]["scattered"] == parameters.trainable / 2  # (N-1)/N
    embedding, last = 132 * 32, 132 * 32 + 32  # a row more, for an even number of them
    everything = parameters.total + 2 * 32
    assert step["numbers"]["gathered"] == (2 * everything - embedding - last) / 2
