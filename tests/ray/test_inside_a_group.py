"""A run whose driver is in a placement group that captures what it starts, as in a trial of Ray Tune."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from typing import Any

import pytest
import ray
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raytune_fsdp.config import EvalConfig
from raytune_fsdp.launch.ray import private
from raytune_fsdp.launch.ray.board import Board, Joined, Line
from raytune_fsdp.launch.ray.nodes.node_watch import NodeWatches
from raytune_fsdp.launch.ray.placement_groups import free_for_tasks, group_around
from raytune_fsdp.launch.ray.resources import nodes
from raytune_fsdp.launch.ray.tasks.evaluations import Evaluations
from tests.ray.test_private import until
from tests.ray.test_resources import cluster_of, run_alone

_REPORT_SECONDS = 2.0  # until the head knows what is free: nodes report once a second


def seen(node_ids: list[str], ranks: list[int]) -> dict[str, Any]:
    """What a driver in a group with a second bundle of one CPU sees, and what of it is in the group."""
    group = group_around()
    assert group is not None
    place = f"bundle_group_{group.id.hex()}"

    def taken() -> float:
        """The processes of the group, as Ray counts them: each has a thousandth of the bundles' two thousands."""
        time.sleep(_REPORT_SECONDS)
        return round(2000 - sum(each.get(place, 0) for each in private.free_by_node().values()), 4)

    found: dict[str, Any] = {"alone": taken()}
    board = Board()
    board.tell(Line("heard"))
    found["heard"] = [notice.text for notice in board.read(20) if isinstance(notice, Line)]
    watches = NodeWatches("none", board)
    joined = {
        rank: Joined(rank, socket.gethostname(), node, pid)
        for rank, (node, pid) in enumerate(zip(node_ids, ranks, strict=True))
    }
    with tempfile.TemporaryDirectory() as logs:
        found["stacks of ranks"] = sorted(watches.stacks(joined, logs))
    found["with ours"] = taken()
    watches.end()
    board.close(1)
    time.sleep(_REPORT_SECONDS)  # a task that waits for an answer of Ray's has given its CPU back meanwhile
    found["free"] = [each.get("CPU", 0) for each in free_for_tasks(nodes())]
    found["off"] = [Evaluations.off(EvalConfig(task_cpus=each)) for each in (1, 2)]
    return found


class Rank:
    """A process on a node, as a rank is one."""

    def pid(self) -> int:
        return os.getpid()


def inside(node_ids: list[str]) -> dict[str, Any]:
    """`seen` by a task in the first of two bundles, which are on the first of these nodes."""
    ranks = [
        ray.remote(num_cpus=0, label_selector={"ray.io/node-id": node}, scheduling_strategy="DEFAULT")(Rank).remote()
        for node in node_ids
    ]
    pids = ray.get([rank.pid.remote() for rank in ranks])
    group = placement_group([{"CPU": 1}, {"CPU": 1}], strategy="STRICT_PACK")
    ray.get(group.ready())
    within = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
    until(lambda: private.free_in_bundles(group) == [{"CPU": 1, "bundle": 1000}] * 2)  # ready()'s own task is gone
    found: dict[str, Any] = ray.get(
        ray.remote(num_cpus=1, scheduling_strategy=within)(seen).remote(node_ids, pids), timeout=120
    )
    remove_placement_group(group)
    for rank in ranks:
        ray.kill(rank)
    return found


def as_it_should_be(found: dict[str, Any], ranks: list[int]) -> None:
    assert found["heard"] == ["heard"]
    assert found["stacks of ranks"] == ranks
    assert found["with ours"] == found["alone"] == 0.001, "what reserves nothing is in the group"
    assert found["free"] == [0, 1]
    assert found["off"][0] is None
    assert found["off"][1].startswith("eval.where=task: evaluations are off, as this process is in a placement group")
    assert "eval.task_cpus=2" in found["off"][1]


@pytest.mark.slow
def test_what_reserves_nothing_leaves_the_group(cluster: None) -> None:
    (node,) = nodes()
    as_it_should_be(inside([node.id]), [0])


def on_two_nodes() -> dict[str, Any]:
    with cluster_of(num_cpus=2) as cluster:
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        head = cluster.head_node.node_id
        return inside([head, *(node.id for node in nodes() if node.id != head)])


@pytest.mark.slow
def test_ranks_on_nodes_that_the_group_has_no_part_of_are_watched() -> None:
    as_it_should_be(run_alone(on_two_nodes), [0, 1])
