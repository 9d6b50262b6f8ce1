"""Gradients that are summed inside of nodes first: the sums are what they were, and what crosses between nodes is what
step/traffic.py says."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raytune_fsdp.config import ParallelConfig
from raytune_fsdp.plan.plan import Layout
from raytune_fsdp.step.reduce_by_node import ranks_of_a_node
from raytune_fsdp.step.traffic import Traffic
from tests.models import build
from tests.ranks import resident_ranks

CPU = torch.device("cpu")
BOTH = {"strategy": "hybrid_shard", "shard_size": 4}
SLOW = pytest.mark.slow


class Reductions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes that this rank receives of gradients that are scattered: from its own node, and from others."""

    def __init__(self, per_node: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._per_node = per_node
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "reduce_scatter" in func.__name__:
            group = next(leaf for leaf in tree_leaves(args) if "ProcessGroup" in str(leaf))
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
            nodes = {rank // self._per_node for rank in ranks}
            summed = max((x for x in tree_leaves(args) if isinstance(x, torch.Tensor)), key=torch.Tensor.numel)
            where = "inside" if len(nodes) == 1 else "between" if len(nodes) == len(ranks) else "flat"
            self.bytes[where] += summed.nbytes * (len(ranks) - 1) / len(ranks)  # type: ignore[assignment]
        return func(*args, **(kwargs or {}))


def gradients(parallel: dict[str, Any], per_node: int | None) -> tuple[dict[str, Any], dict[str, float], Traffic]:
    """What one block a rank makes of them, what that moved, and what it should have moved."""
    from raytune_fsdp.model.fill import fill
    from raytune_fsdp.model.network import MASTER_DTYPE
    from raytune_fsdp.model.objective.loss import micro_batch_loss
    from raytune_fsdp.model.pieces.pieces import local_piece
    from raytune_fsdp.model.proof import documents
    from raytune_fsdp.step.parallel import make_mesh, shard, sharding_units, traffic_of

    world, config = dist.get_world_size(), ParallelConfig.model_validate(parallel)
    shards = config.shard_size or world
    layout = Layout(world=world, data_ranks=world, replicas=world // shards, shard_size=shards)
    model = build("llama").to(MASTER_DTYPE[config.precision])
    units = sharding_units(model, config, ends=True)
    said = traffic_of(model, units, config, layout, micro_batches=1, per_node=per_node)
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.to("meta")
    shard(model, make_mesh(layout, CPU), config, units, per_node=per_node)
    fill(model, None, "empty", CPU)
    for name, parameter in model.named_parameters():
        mine = local_piece(parameter)
        rows = -(-values[name].shape[0] // shards)
        first = dist.get_rank() % shards * rows
        with torch.no_grad():
            mine.copy_(values[name][first : first + mine.shape[0]])
    torch.manual_seed(dist.get_rank())
    block = documents(model, CPU)
    with Reductions(per_node or world) as seen:
        (micro_batch_loss(model.train(), block).total * (1 + dist.get_rank())).backward()
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found[name] = parameter.grad.full_tensor().numpy()  # type: ignore[attr-defined]
    return found, dict(seen.bytes), said


@pytest.mark.parametrize(
    ("world", "per_node", "parallel"),
    [
        (4, 2, {}),
        pytest.param(6, 3, {}, marks=SLOW),
        pytest.param(6, 2, {}, marks=SLOW),
        pytest.param(8, 2, BOTH, marks=SLOW),
    ],
)
def test_in_two_levels(world: int, per_node: int, parallel: dict[str, Any]) -> None:
    flat = {**parallel, "precision": "fp64"}
    expected, straight, _ = resident_ranks(gradients, world, flat, None)[0]
    for found, moved, said in resident_ranks(gradients, world, {**flat, "reduce": "hierarchical"}, per_node):
        for name, gradient in expected.items():
            assert abs(found[name] - gradient).max() <= 1e-13 * abs(gradient).max(), name
        assert moved.keys() == {"inside", "between"}
        assert moved["between"] == pytest.approx(said.crossing * 8, rel=1e-12)
        assert sum(moved.values()) == pytest.approx(said.bytes_scattered, rel=1e-12)
        assert sum(moved.values()) == pytest.approx(sum(straight.values()), rel=1e-12)


@pytest.mark.slow
def test_bf16_between_nodes_alone_rounds_less() -> None:
    """Of eight ranks on two nodes: gradients are in bf16 already, so a sum is rounded seven times on its way through
    all ranks, and three times where only sums of nodes are."""
    plain, _, _ = resident_ranks(gradients, 8, {}, None)[0]
    rounded, everywhere, said = resident_ranks(gradients, 8, {"reduce_dtype": "bf16"}, None)[0]
    assert sum(everywhere.values()) == pytest.approx(said.bytes_scattered, rel=1e-12)
    between, moved, said = resident_ranks(gradients, 8, {"reduce_dtype": "bf16", "reduce": "hierarchical"}, 4)[0]
    assert moved["between"] == pytest.approx(said.crossing * 2, rel=1e-12)
    assert sum(moved.values()) == pytest.approx(said.bytes_scattered, rel=1e-12)

    def error(found: dict[str, Any]) -> float:
        """Of all gradients together, relative to those of fp32 sums."""
        squares = sum(float(((found[name] - plain[name]) ** 2).sum()) for name in plain)
        return (squares / sum(float((each**2).sum()) for each in plain.values())) ** 0.5

    assert 0 < error(between) < 0.8 * error(rounded) < 0.8 * 2**-8, (error(between), error(rounded))


@pytest.mark.parametrize(
    ("nodes", "shards", "expected"),
    [
        ("aabb", 4, 2), ("aaabbb", 6, 3), ("aabbccdd", 4, 2),
        ("aaaa", 4, None),  # there is one node
        ("abcd", 4, None),  # one rank on each
        ("aaab", 4, None), ("abab", 4, None),
        ("aabb", 2, None),  # a node has the whole model, as hybrid_shard means it
        ("aaabbb", 2, None),
    ],
)  # fmt: skip
def test_ranks_of_a_node(nodes: str, shards: int, expected: int | None) -> None:
    assert ranks_of_a_node(nodes, shards) == expected
