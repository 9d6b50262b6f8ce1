"""What Ray itself says to what we ask of it: on the Ray of these tests, and on clusters of several nodes.

Clusters of nodes, and autoscalers, are started by processes of their own: this one is connected to a Ray already.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import ray

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config.sections.cluster import ClusterConfig
from raytune_fsdp.launch.ray.resources import check_resources, may_grow, nodes, request, scaling_config, shortage
from tests.ray.conftest import CPUS

ROOT = Path(__file__).parents[2]

# Workers, and what else is asked; on a head with 2 CPUs and two nodes with 2 CPUs and 2 GPUs, an A100 and an L4.
REQUESTS: list[dict[str, Any]] = [
    {"workers": 4},
    {"workers": 2, "placement": "pack"},
    {"workers": 2, "placement": "spread"},
    {"workers": 2, "placement": "strict_pack"},
    {"workers": 2, "placement": "strict_spread"},
    {"workers": 3, "device": "cpu", "placement": "strict_spread"},
    {"workers": 2, "accelerator_type": "A100"},
    {"workers": 2, "accelerator_type": "L4", "device": "cpu"},
    {"workers": 2, "cpus_per_worker": 2, "device": "cuda"},
    {"workers": 2, "device": "cpu", "resources_per_worker": {"licence": 0.5}},
    # never
    {"workers": 5, "device": "cuda"},
    {"workers": 3, "device": "cuda", "placement": "strict_pack"},
    {"workers": 3, "device": "cuda", "placement": "strict_spread"},
    {"workers": 4, "device": "cpu", "placement": "strict_spread"},
    {"workers": 3, "accelerator_type": "A100"},
    {"workers": 1, "accelerator_type": "H100"},
    {"workers": 1, "cpus_per_worker": 3},
    {"workers": 3, "cpus_per_worker": 2, "device": "cuda"},
    {"workers": 2, "device": "cpu", "resources_per_worker": {"licence": 0.6}},
    {"workers": 1, "device": "cpu", "resources_per_worker": {"unheard_of": 1}},
]
FEASIBLE = 10


def run_alone(work: Callable[[], Any]) -> Any:
    """What a function returns, as JSON has it, in a process that is not connected to Ray yet."""
    code = f"import json; from {work.__module__} import {work.__name__} as f; print('\\n' + json.dumps(f()))"
    temporary = tempfile.mkdtemp(prefix="ray-")  # also where a cluster notes itself as the one of this machine
    os.mkdir(os.path.join(temporary, "ray"))
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"RAY_TMPDIR": temporary, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    try:
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=240
            )
            if "node timed out during startup" not in done.stderr:  # Ray gives it 30 seconds, on a busy machine too
                break
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def cluster_of(**head: Any) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **head})
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def place() -> dict[str, Any]:
    """Ask Ray for each of the requests, as Ray Train would."""
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    def ask(asked: Any) -> Any:
        scaling = scaling_config(asked)
        bundle = scaling._resources_per_worker_not_none
        return placement_group([bundle] * scaling.num_workers, strategy=scaling.placement_strategy)

    def refusal(asked: Any) -> str | None:
        try:
            check_resources(asked, found, growing=False)
        except ConfigError as error:
            return str(error)
        return None

    with cluster_of(num_cpus=2) as cluster:
        os.environ["RAY_NODE_TYPE_NAME"] = "gpu-group"  # as KubeRay does, also where nothing adds nodes
        cluster.add_node(num_cpus=2, num_gpus=2, resources={"accelerator_type:A100": 1, "licence": 1})
        cluster.add_node(num_cpus=2, num_gpus=2, resources={"accelerator_type:L4": 1})
        found = nodes()
        types = {
            node.id: next((name.split(":")[1] for name in node.total if name.startswith("accelerator_type:")), "head")
            for node in found
        }
        requests = [request(ClusterConfig(**each), found) for each in REQUESTS]
        # Nothing is placed yet, so what is not placed now never will be.
        never = [ask(asked) for asked in requests[FEASIBLE:]]
        time.sleep(3)
        states = [placement_group_table(group)["state"] for group in never]
        for group in never:
            remove_placement_group(group)
        placed, seen = [], None
        for asked in requests[:FEASIBLE]:
            group = ask(asked)
            states.insert(len(placed), "CREATED" if group.wait(60) else "PENDING")
            placed.append([types.get(node, "") for node in placement_group_table(group)["bundles_to_node_id"].values()])
            if seen is None:
                seen = while_held(asked, found)
            remove_placement_group(group)
            wait_until_free()
        return {
            "states": states,
            "refusals": [refusal(asked) for asked in requests],
            "placed": placed,
            "auto": request(ClusterConfig(), found).workers,
            "seen": seen,
            "grows": may_grow(),
        }


def wait_until_free() -> None:
    """Nodes report to the head now and then; until then Ray takes what was released for taken."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(
        node.free.get(name, 0) < node.total.get(name, 0) for node in nodes() for name in ("CPU", "GPU", "licence")
    ):
        time.sleep(0.1)


def while_held(asked: Any, before: Any) -> Any:
    """Once the resources of the first request are reserved: what is free, and whether that looks like less in all."""
    deadline = time.monotonic() + 20
    while "0 of 2 GPU" not in shortage(asked, nodes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    same = [each.total for each in nodes()] == [each.total for each in before]
    return shortage(asked, nodes()), same


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    result: dict[str, Any] = run_alone(place)
    return result


@pytest.mark.slow
def test_we_refuse_what_ray_would_wait_for_for_ever(answers: dict[str, Any]) -> None:
    assert answers["states"] == ["CREATED"] * FEASIBLE + ["PENDING"] * (len(REQUESTS) - FEASIBLE)
    refused = [refusal is not None for refusal in answers["refusals"]]
    assert refused == [state != "CREATED" for state in answers["states"]], answers["refusals"]


@pytest.mark.slow
def test_ray_places_workers_as_we_ask(answers: dict[str, Any]) -> None:
    whole, pack, spread, strict_pack, strict_spread, all_nodes, a100, l4, two_cpus, licences = answers["placed"]
    assert Counter(whole) == {"A100": 2, "L4": 2}
    assert len(set(pack)) == len(set(strict_pack)) == 1
    assert set(spread) == set(strict_spread) == set(two_cpus) == {"A100", "L4"}
    assert set(all_nodes) == {"head", "A100", "L4"}
    assert a100 == ["A100", "A100"]
    assert l4 == ["L4", "L4"]
    assert licences == ["A100"] * 2
    assert answers["auto"] == 4


@pytest.mark.slow
def test_what_is_reserved_is_not_free(answers: dict[str, Any]) -> None:
    line, same_in_all = answers["seen"]
    assert line == ("waiting for 4 workers with 1 CPU + 1 GPU each; free now: 2 nodes with 0 of 2 CPU, 0 of 2 GPU")
    assert same_in_all


@pytest.mark.slow
def test_nodes_of_a_group_alone_add_no_nodes(answers: dict[str, Any]) -> None:
    assert answers["grows"] is False


def test_on_the_ray_of_these_tests(cluster: None) -> None:
    import ray.train
    from ray.experimental.internal_kv import _internal_kv_get

    [only] = nodes()
    assert only.total["CPU"] == CPUS
    assert only.free["CPU"] <= CPUS
    deadline = time.monotonic() + 20
    while _internal_kv_get("__autoscaling_status") is None and time.monotonic() < deadline:
        time.sleep(0.2)  # Ray's monitor reports on clusters that cannot grow, too
    assert not may_grow()
    asked = request(ClusterConfig(workers=CPUS - 1, device="cpu", placement="spread"), [only])
    check_resources(asked, [only], growing=False)
    with pytest.raises(ConfigError, match=f"of {CPUS} CPUs none is left to prepare the data"):
        check_resources(request(ClusterConfig(workers=CPUS, device="cpu"), [only]), [only], growing=False)
    scaling = scaling_config(asked)
    assert isinstance(scaling, ray.train.ScalingConfig)
    assert (scaling.num_workers, scaling.use_gpu, scaling.placement_strategy) == (CPUS - 1, False, "SPREAD")
    assert scaling.total_resources == {"CPU": CPUS - 1}


def test_ray_train_asks_for_what_we_counted() -> None:
    config = ClusterConfig(workers=2, device="cuda", accelerator_type="A100", resources_per_worker={"memory": 1e9})
    scaling = scaling_config(request(config, []))
    assert scaling.use_gpu
    assert scaling._resources_per_worker_not_none == {"CPU": 1, "GPU": 1, "memory": 1e9, "accelerator_type:A100": 0.001}


def grow() -> dict[str, bool]:
    """What `may_grow` says of clusters that an autoscaler looks after, or seems to."""
    from ray._raylet import GCS_AUTOSCALER_CLUSTER_CONFIG_KEY, GCS_AUTOSCALER_STATE_NAMESPACE
    from ray.core.generated.autoscaler_pb2 import AutoscalingState, ClusterConfig, NodeGroupConfig
    from ray.experimental.internal_kv import _internal_kv_put

    def second_version_reports() -> None:
        state = AutoscalingState(last_seen_cluster_resource_state_version=1, autoscaler_state_version=1)
        ray._private.worker.global_worker.gcs_client.report_autoscaling_state(state.SerializeToString())

    def declare(at_most: int) -> None:
        group = NodeGroupConfig(name="gpu", resources={"GPU": 8}, min_count=1, max_count=at_most)
        _internal_kv_put(
            GCS_AUTOSCALER_CLUSTER_CONFIG_KEY,
            ClusterConfig(node_group_configs=[group]).SerializeToString(),
            namespace=GCS_AUTOSCALER_STATE_NAMESPACE,
        )

    found = {}
    with cluster_of(num_cpus=1, no_monitor=True) as cluster:
        second_version_reports()
        found["second version, nodes of no group"] = may_grow()
        declare(1)
        found["declared, as large as it gets"] = may_grow()
        declare(2)
        found["declared, may be larger"] = may_grow()
        declare(1)
        os.environ["RAY_NODE_TYPE_NAME"] = "gpu-group"
        cluster.add_node(num_cpus=1)
        del os.environ["RAY_NODE_TYPE_NAME"]
        found["second version, a node of a group"] = may_grow()
    found["first version"] = first_version_runs()
    return found


def first_version_runs() -> bool:
    """With Ray's own autoscaler, over a provider of machines that it has for its tests."""
    from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

    kind = {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0}
    commands = ["initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray"]
    config = {
        "cluster_name": "test",
        "max_workers": 2,
        "idle_timeout_minutes": 5,
        "upscaling_speed": 1.0,
        "provider": {"type": "fake_multinode", "use_node_id_as_ip": True},
        "available_node_types": {"head": kind, "worker": {**kind, "max_workers": 2}},
        "head_node_type": "head",
        **{f"{each}_commands": [] for each in commands},
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
        "file_mounts_sync_continuously": False,
    }
    file = Path(os.environ["RAY_TMPDIR"]) / "autoscaling.json"
    file.write_text(json.dumps(config))
    os.environ |= {
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    }
    with cluster_of(num_cpus=1, autoscaling_config=str(file)):
        deadline = time.monotonic() + 30
        while not may_grow() and time.monotonic() < deadline:
            time.sleep(0.2)
        return may_grow()


@pytest.mark.slow
def test_an_autoscaler_is_noticed() -> None:
    assert run_alone(grow) == {
        "second version, nodes of no group": False,
        "declared, as large as it gets": False,
        "declared, may be larger": True,
        "second version, a node of a group": True,
        "first version": True,
    }
