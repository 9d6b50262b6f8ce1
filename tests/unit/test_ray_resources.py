"""What a run asks of a Ray cluster, worked out on paper: no Ray is started."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config.sections.cluster import ClusterConfig
from raytune_fsdp.launch.ray import private
from raytune_fsdp.launch.ray.resources import (
    Node,
    Request,
    answering,
    check_resources,
    local_cpus,
    request,
    shortage,
    waiting_for,
    way_out,
)
from raytune_fsdp.launch.ray.tasks import calls


def node(cpu: float = 0, gpu: float = 0, kind: str | None = None, free: dict[str, float] | None = None, **rest: float):
    total = {"CPU": cpu, "GPU": gpu, "memory": 64e9, "node:192.0.2.1": 1.0, **rest}
    if kind:
        total[f"accelerator_type:{kind}"] = 1.0
    total = {name: amount for name, amount in total.items() if amount}
    return Node(id="1", name="192.0.2.1", total=total, free=total if free is None else free)


def asked(nodes: list[Node], growing: bool = False, **config: Any) -> Request:
    return request(ClusterConfig(**config), nodes, growing=growing)


LAPTOP = [node(8)]
GPUS = [node(8), node(8, 4, "A100"), node(8, 4, "A100")]
MIXED = [node(4), node(8, 2, "A100"), node(8, 4, "L4")]


@pytest.mark.parametrize(
    "nodes, config, workers, gpu, device",
    [
        (LAPTOP, {}, 1, 0, "cpu"),
        (LAPTOP, {"workers": 3}, 3, 0, "cpu"),
        (LAPTOP, {"device": "cuda"}, 1, 1, "cuda"),
        (GPUS, {}, 8, 1, "cuda"),
        (GPUS, {"device": "cuda"}, 8, 1, "cuda"),
        (GPUS, {"workers": 8}, 8, 1, "cuda"),
        (GPUS, {"workers": 9}, 9, 0, "cpu"),
        (GPUS, {"device": "cpu"}, 1, 0, "cpu"),
        (GPUS, {"device": "cpu", "gpus_per_worker": 1, "workers": 2}, 2, 1, "cpu"),
        (GPUS, {"gpus_per_worker": 0}, 1, 0, "cpu"),
        (GPUS, {"gpus_per_worker": 1, "workers": 9}, 9, 1, "cuda"),
        (MIXED, {}, 6, 1, "cuda"),
        (MIXED, {"accelerator_type": "A100"}, 2, 1, "cuda"),
        (MIXED, {"accelerator_type": "L4"}, 4, 1, "cuda"),
        (MIXED, {"accelerator_type": "L4", "workers": 5}, 5, 1, "cuda"),
        (MIXED, {"accelerator_type": "H100"}, 1, 1, "cuda"),
        (MIXED, {"accelerator_type": "L4", "device": "cpu"}, 1, 0, "cpu"),
    ],
)
def test_auto_counts_the_gpus(nodes: list[Node], config: dict[str, Any], workers: int, gpu: int, device: str) -> None:
    found = asked(nodes, **config)
    assert (found.workers, found.per_worker.get("GPU", 0), found.device) == (workers, gpu, device)
    assert found.accelerator_type == config.get("accelerator_type")


def test_what_each_worker_reserves() -> None:
    own = {"fast_storage": 0.5, "memory": 8e9}
    found = asked(GPUS, cpus_per_worker=2, resources_per_worker=own, placement="spread")
    assert found.per_worker == {"CPU": 2, "GPU": 1, "fast_storage": 0.5, "memory": 8e9}
    assert found.placement == "spread"


@pytest.mark.parametrize(
    "config, nodes, growing, message",
    [
        (
            {"resources_per_worker": {"CPU": 4}},
            LAPTOP,
            False,
            "resources_per_worker.CPU=4: set cluster.cpus_per_worker",
        ),
        ({"resources_per_worker": {"GPU": 1}}, GPUS, False, "resources_per_worker.GPU=1: set cluster.gpus_per_worker"),
        ({"resources_per_worker": {"TPU": 1}}, GPUS, False, "resources_per_worker.TPU=1: workers run on CPUs or GPUs"),
        ({"device": "cuda", "gpus_per_worker": 0}, GPUS, False, "cluster.gpus_per_worker=0 with cluster.device=cuda"),
        ({}, LAPTOP, True, "cluster.device=auto: this cluster has 0 GPUs for 1 worker and may grow"),
        ({"workers": 9}, GPUS, True, "cluster.device=auto: this cluster has 8 GPUs for 9 workers and may grow"),
        ({"device": "cuda"}, LAPTOP, True, "cluster.workers=auto means one for each GPU of the cluster"),
    ],
)
def test_what_cannot_be_meant(config: dict[str, Any], nodes: list[Node], growing: bool, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        asked(nodes, growing, **config)
    assert message in str(error.value)


@pytest.mark.parametrize("config", [{"device": "cpu"}, {"workers": 2, "device": "cuda"}, {"gpus_per_worker": 0}])
def test_a_cluster_that_grows_needs_only_what_cannot_be_told(config: dict[str, Any]) -> None:
    check_resources(asked(LAPTOP, True, **config), LAPTOP, growing=True)


@pytest.mark.parametrize(
    "nodes, config",
    [
        ([node(2)], {}),
        (LAPTOP, {"workers": 7}),
        (LAPTOP, {"workers": 3, "cpus_per_worker": 2, "placement": "strict_pack"}),
        (GPUS, {}),
        (GPUS, {"workers": 4, "placement": "strict_pack"}),
        (GPUS, {"workers": 2, "placement": "strict_spread"}),
        (GPUS, {"workers": 3, "placement": "strict_spread", "device": "cpu"}),
        (GPUS, {"workers": 8, "cpus_per_worker": 2}),  # the data has the CPUs of the node without GPUs
        (MIXED, {"accelerator_type": "L4", "workers": 4, "placement": "strict_pack"}),
        ([node(4, licence=1.0)], {"workers": 3, "resources_per_worker": {"licence": 0.3}}),
        ([node(20, shares=1.0)], {"workers": 10, "resources_per_worker": {"shares": 0.1}}),
        ([node(2000, 1500, "A100")], {"workers": 1000, "accelerator_type": "A100"}),
        ([node(8, free={"memory": 1.0})], {"workers": 7}),  # what is taken now may be free later
    ],
)
def test_what_a_cluster_can_give(nodes: list[Node], config: dict[str, Any]) -> None:
    check_resources(asked(nodes, **config), nodes, growing=False)


TWO_GPU_NODES = "the cluster has 1 node with 8 CPU, 0 GPU and 2 nodes with 8 CPU, 4 GPU (A100)"
REFUSED = [
    (
        GPUS,
        {"workers": 9, "device": "cuda"},
        f"cluster.workers=9: 9 workers with 1 CPU + 1 GPU each, but there is room for 8: {TWO_GPU_NODES}; lower "
        "cluster.workers, or add nodes",
    ),
    (
        GPUS,
        {"cpus_per_worker": 4},
        f"cluster.workers=8: 8 workers with 4 CPU + 1 GPU each, but there is room for 4: {TWO_GPU_NODES}; lower "
        "cluster.workers or cluster.cpus_per_worker, add CPUs (`ray start --num-cpus`), or add nodes",
    ),
    (
        GPUS,
        {"workers": 5, "placement": "strict_pack"},
        "cluster.placement=strict_pack with cluster.workers=5: 5 workers with 1 CPU + 1 GPU each, all on one node, but "
        f"no node has room for more than 4: {TWO_GPU_NODES}; set cluster.placement=pack, or lower cluster.workers",
    ),
    (
        GPUS,
        {"workers": 3, "placement": "strict_spread"},
        "cluster.placement=strict_spread with cluster.workers=3: 3 workers with 1 CPU + 1 GPU each, each on a node of "
        f"its own, but only 2 of the nodes fit one: {TWO_GPU_NODES}; set cluster.placement=spread, or lower "
        "cluster.workers",
    ),
    (
        GPUS,
        {"workers": 9, "device": "cuda", "placement": "strict_pack"},  # not: set cluster.placement=pack
        "there is room for 8",
    ),
    (
        LAPTOP,
        {"workers": 8},
        "cluster.workers=8: 8 workers with 1 CPU each: of 8 CPUs none is left to prepare the data, which needs 1: the "
        "cluster has 1 node with 8 CPU, 0 GPU; lower cluster.workers, add CPUs (`ray start --num-cpus`), or add nodes",
    ),
    ([node(1)], {}, "cluster.workers=1: 1 worker with 1 CPU: of 1 CPUs none is left"),
    ([node(4, 4)], {}, "cluster.workers=4: 4 workers with 1 CPU + 1 GPU each: of 4 CPUs none is left"),
    (
        LAPTOP,
        {"cpus_per_worker": 16},
        "cluster.cpus_per_worker=16: each worker needs 16 CPU, but no node has as much: the cluster has 1 node with 8 "
        "CPU, 0 GPU; lower it, or add such nodes",
    ),
    (
        LAPTOP,
        {"device": "cuda"},
        "cluster.device=cuda: each worker needs a GPU, but no node has one: the cluster has 1 node with 8 CPU, 0 GPU; "
        "set cluster.device=cpu, or add such nodes",
    ),
    (
        LAPTOP,
        {"device": "cpu", "gpus_per_worker": 1},
        "cluster.gpus_per_worker=1: each worker needs a GPU, but no node has one",
    ),
    (
        [node(8), node(2, 4)],
        {"workers": 1, "cpus_per_worker": 4, "device": "cuda"},
        "cluster.cpus_per_worker=4: each worker needs 4 CPU + 1 GPU, but no node has all of it at once",
    ),
    (
        [node(8, fast_storage=1.0)],
        {"resources_per_worker": {"fast-storage": 1}},
        "cluster.resources_per_worker.fast-storage=1: each worker needs 1 fast-storage, but no node has as much; "
        "nearest: fast_storage: the cluster has 1 node with 8 CPU, 0 GPU, 0 fast-storage; lower it, or add such nodes",
    ),
    (
        [node(8, fast_storage=2.0)],
        {"workers": 4, "resources_per_worker": {"fast_storage": 1}},
        "there is room for 2: the cluster has 1 node with 8 CPU, 0 GPU, 2 fast_storage; lower cluster.workers or "
        "cluster.resources_per_worker.fast_storage, or add nodes",
    ),
    (
        LAPTOP,
        {"resources_per_worker": {"memory": 65e9}},
        "cluster.resources_per_worker.memory=6.5e+10: each worker needs 65 GB memory, but no node has as much: the "
        "cluster has 1 node with 8 CPU, 0 GPU, 64 GB memory",
    ),
    ([node(8, licence=1.0)], {"workers": 4, "resources_per_worker": {"licence": 0.3}}, "there is room for 3"),
    (
        MIXED,
        {"accelerator_type": "A100", "workers": 3},
        "cluster.workers=3: 3 workers with 1 CPU + 1 GPU each on nodes with A100, but there is room for 2: the cluster "
        "has 1 node with 4 CPU, 0 GPU and 1 node with 8 CPU, 2 GPU (A100) and 1 node with 8 CPU, 4 GPU (L4)",
    ),
    (
        GPUS,
        {"accelerator_type": "a100"},
        f"cluster.accelerator_type=a100: no node has it; nearest: A100; {TWO_GPU_NODES}; name one that it "
        "has, or leave the field out",
    ),
    (GPUS, {"accelerator_type": "H100"}, "cluster.accelerator_type=H100: no node has it; nearest: A100;"),
    (LAPTOP, {"accelerator_type": "H100", "workers": 2}, "cluster.accelerator_type=H100: no node has it; the cluster"),
    ([node(8, kind="L4")], {"accelerator_type": "L4"}, "each worker needs a GPU, but no node with L4 has one"),
]


@pytest.mark.parametrize("nodes, config, message", REFUSED, ids=lambda value: None)
def test_what_a_cluster_can_never_give(nodes: list[Node], config: dict[str, Any], message: str) -> None:
    found = asked(nodes, **config)
    with pytest.raises(ConfigError) as error:
        check_resources(found, nodes, growing=False)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("nodes, config, message", REFUSED, ids=lambda value: None)
def test_nodes_that_are_added_could_cure_it(nodes: list[Node], config: dict[str, Any], message: str) -> None:
    found = asked(nodes, **config)
    if config.get("accelerator_type") == "a100":
        with pytest.raises(ConfigError, match="Ray knows no accelerator of this name .*; nearest: A100;"):
            check_resources(found, nodes, growing=True)
    else:
        check_resources(found, nodes, growing=True)


def test_a_node_that_grows_may_have_an_accelerator_of_its_own_name() -> None:
    nodes = [node(8, 1, "Own")]
    check_resources(asked(nodes, accelerator_type="Own"), nodes, growing=True)
    with pytest.raises(ConfigError, match="nearest: Own"):
        check_resources(asked(nodes, accelerator_type="Owns"), nodes, growing=True)


@pytest.mark.parametrize(
    "nodes, config, line",
    [
        (
            [node(8), node(8, 4, "A100", free={"CPU": 3.0, "GPU": 2.0}), node(8, 4, "A100")],
            {"workers": 4},
            "waiting for 4 workers with 1 CPU + 1 GPU each; free now: 1 node with 3 of 8 CPU, 2 of 4 GPU and 1 node "
            "with 8 of 8 CPU, 4 of 4 GPU",
        ),
        (
            MIXED,
            {"accelerator_type": "L4"},
            "waiting for 4 workers with 1 CPU + 1 GPU each on nodes with L4; free now: 1 node with 8 of 8 CPU, 4 "
            "of 4 GPU",
        ),
        # Ray leaves out what is used up.
        ([node(4, free={"memory": 1.0})], {}, "waiting for 1 worker with 1 CPU; free now: 1 node with 0 of 4 CPU"),
        (
            [node(4, free={}), node(4, free={})],
            {},
            "waiting for 1 worker with 1 CPU; free now: 2 nodes with ? of 4 CPU",
        ),
        (
            LAPTOP,
            {"workers": 2, "device": "cuda", "accelerator_type": "L4"},
            "waiting for 2 workers with 1 CPU + 1 GPU each on nodes with L4; "
            "free now: nothing, as no node fits one yet",
        ),
    ],
)
def test_the_line_while_waiting(nodes: list[Node], config: dict[str, Any], line: str) -> None:
    assert shortage(asked(nodes, **config), nodes) == line


def test_the_line_says_what_is_really_waited_for() -> None:
    """Not what is free, where that is not what is missing."""
    found = asked([node(4)], workers=2, device="cpu")
    two = "waiting for 2 workers with 1 CPU each"
    assert waiting_for(found, [node(4)], None) == f"{two}: Ray Train is starting"
    assert waiting_for(found, [node(4)], "CREATED") == "starting 2 workers"
    assert waiting_for(found, [node(4)], "PENDING") == f"{two}: as much is free, and Ray is about to reserve it"
    taken = [node(4, free={"CPU": 1.0})]
    assert waiting_for(found, taken, "PENDING") == shortage(found, taken)
    apart = asked([node(4), node(4)], workers=2, device="cpu", placement="strict_spread")
    half = [node(4), node(4, free={"CPU": 0.0})]
    assert waiting_for(apart, half, "PENDING") == shortage(apart, half)
    assert waiting_for(apart, [node(4), node(4)], "PENDING").endswith("Ray is about to reserve it")


def test_nodes_are_to_be_added_only_where_resources_are_missing() -> None:
    found = asked([node(4)], workers=2, device="cpu")
    taken = [node(4, free={"CPU": 1.0})]
    assert "add nodes" in way_out(waiting_for(found, taken, "PENDING")) and "add nodes" in way_out(shortage(found, []))
    for there, group in (([node(4)], None), ([node(4)], "CREATED"), (taken, "CREATED"), ([node(4)], "PENDING")):
        said = way_out(waiting_for(found, there, group))
        assert "processes start slowly" in said and "add nodes" not in said


@pytest.mark.parametrize(
    "cores, workers, each, cpus",
    [(2, 1, 1, 3), (2, 2, 1, 4), (2, 4, 1, 6), (16, 2, 1, 16), (16, 2, 4, 16), (16, 4, 4, 18), (1, 1, 1, 3)],
)
def test_a_ray_for_this_run_alone_has_cpus_for_the_data(
    monkeypatch: pytest.MonkeyPatch, cores: int, workers: int, each: int, cpus: int
) -> None:
    monkeypatch.setattr(private, "cpus_of_machine", lambda: cores)
    config = ClusterConfig(workers=workers, cpus_per_worker=each)
    assert local_cpus(config, workers) == cpus
    check_resources(asked([node(cpus)], workers=workers, cpus_per_worker=each), [node(cpus)], growing=False)


def test_a_ray_for_this_run_alone_fits_a_worker_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "cpus_of_machine", lambda: 4)
    monkeypatch.setattr(private, "gpus_of_machine", lambda: 4)
    assert local_cpus(ClusterConfig(), 1) == 4 + 2
    assert local_cpus(ClusterConfig(device="cpu"), 1) == 4
    assert local_cpus(ClusterConfig(workers=1), 1) == 4


def test_a_node_that_takes_no_connection_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = Node(id="a", name="a", total={}, free={}, address=server.getsockname())
        gone = Node(id="b", name="b", total={}, free={}, address=("127.0.0.1", 1))
        assert answering([gone, here]) == [here]
    assert answering([here]) == []


@pytest.mark.parametrize(("runs", "waited"), [(True, [60.0] * 3), (False, [60.0, 1.0, 1.0])])
def test_work_that_takes_long_is_not_taken_for_a_cluster_without_a_cpu(
    runs: bool, waited: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A task that has a CPU ends as soon as the lock of the cache, for which this process waited, is free."""
    asked: list[float] = []
    ended: list[int] = []

    def wait(tasks: list[int], timeout: float, **_: bool) -> tuple[list[int], list[int]]:
        if timeout < 1:
            return (tasks, []) if runs else ([], tasks)
        asked.append(timeout)
        return [], tasks

    fake = SimpleNamespace(
        wait=wait, cancel=lambda task, force: ended.append(task), cluster_resources=lambda: {"CPU": 4},
        available_resources=lambda: {"CPU": 1},
    )  # fmt: skip
    monkeypatch.setattr(calls, "ray", fake)
    found = calls.in_order(lambda number: number, lambda number: 10 * number, [(1,), (2,), (3,)], lambda: 2)
    assert list(found) == [10, 20, 30] and asked == waited
    assert ended == ([] if runs else [1, 2, 3])
    assert [each.getMessage()[:18] for each in caplog.records] == ([] if runs else ["no CPU became free"] * 3)
