"""Everything that we use of Ray without a public name, and why. Nothing else in the package imports such a name.

Ray Train's are in private_train.py: its import takes as long as the rest of Ray, and neither the start of a Ray nor the
actors on its nodes need it. tests/ray/test_private.py says for each name what Ray has to do: it fails first where a new
Ray does something else.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
import ray._private.worker
from ray._private import state
from ray._private.accelerators import get_accelerator_manager_for_resource
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray._private.services import canonicalize_bootstrap_address, parse_address
from ray._private.utils import get_num_cpus
from ray._raylet import AuthenticationTokenLoader, GcsClient, PlacementGroupID  # type: ignore[attr-defined]
from ray.autoscaler._private.util import format_readonly_node_type
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
from ray.core.generated.gcs_pb2 import PlacementGroupTableData
from ray.exceptions import GetTimeoutError, RayError
from ray.experimental.internal_kv import _internal_kv_get
from ray.util.placement_group import PlacementGroup

# ---- the cluster that a command would join ----


def address_of_cluster() -> str | None:
    """Return what ray.init() would join, None: a Ray of its own. ValueError, ConnectionError for a bad RAY_ADDRESS."""
    found: str | None = canonicalize_bootstrap_address(None)
    return found


def host_and_port(address: str) -> tuple[str, int]:
    host, port = parse_address(address)
    return host, int(port)


def check_token(address: str) -> None:
    """Raise AuthenticationError without the cluster's token. C++ would end a process that joins without any."""
    ensure_token_if_auth_enabled(None, create_token_if_missing=False)
    GcsClient(address=address)  # asks for the cluster's id, and with that whether the token is right


def own_cluster() -> str:
    """Return the id of the cluster that this process is connected to. Ask nobody."""
    return str(ray._private.worker.global_worker.gcs_client.cluster_id.hex())


def cluster_at(address: str) -> str:
    """Return the id of the cluster whose head answers there. A head that has lost its state has another one.

    Where there is no head, this may wait for as long as Ray does.
    """
    return str(GcsClient(address=address).cluster_id.hex())


KNOCK = """
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1])
    print("open")
except AuthenticationError:
    print("token")
"""
"""A program that asks a cluster whether it wants a token. In another process, as Ray reads mode and token once."""


def seconds_without_head() -> float:
    """Return how long Ray waits for the head's GCS to come back, before it ends the process."""
    return float(os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s") or 60)  # noqa: SIM112


def forget_token() -> None:
    """Make Ray read the token again: it keeps the first one for as long as a process lives."""
    AuthenticationTokenLoader.instance().reset_cache()


# ---- a Ray that was started here ----


def dead_processes() -> list[str]:
    """Return the kinds of the processes that have ended, of a Ray that this process has started."""
    node = ray._private.worker._global_node
    return [] if node is None else [kind for kind, _ in node.dead_processes()]


def is_elsewhere(directory: Path) -> bool:
    """Return whether this process has a Ray that was not started with its files in this directory: somebody else's.

    So it is where the start of one has failed in a process that is connected to another.
    """
    node = ray._private.worker._global_node
    return node is not None and Path(node.get_temp_dir_path()) != directory


def workers() -> list[psutil.Process]:
    """Return the processes that run tasks and actors of the Ray that this process has started."""
    node = ray._private.worker._global_node
    found: list[psutil.Process] = []
    for each in [] if node is None else node.all_processes.get("raylet", []):
        with suppress(psutil.NoSuchProcess):
            found += psutil.Process(each.process.pid).children(recursive=True)
    return found


def kill_processes() -> None:
    """End that Ray at once, before its processes print what they think of each other."""
    ray._private.worker._global_node.kill_all_processes(check_alive=False, allow_graceful=False)


def cpus_of_machine() -> int:
    """Return the CPUs of this machine, without Ray's warning where a container's limit decides."""
    return int(get_num_cpus(override_docker_cpu_warning=True))


def gpus_of_machine() -> int:
    return int(get_accelerator_manager_for_resource("GPU").get_current_node_num_accelerators())


# ---- nodes ----


def free_by_node() -> dict[str, dict[str, float]]:
    """Return what is free on each node, by its id. `ray.available_resources()` has the sum alone."""
    return dict(state.available_resources_per_node())


def leaving_nodes() -> dict[str, int]:
    """Return the nodes that drain, by id, and when they end in milliseconds since 1970; 0: that is not known."""
    return dict(state.state.get_draining_nodes())


def drain(gcs_address: str, node_id: str, why: str, ends_at: float) -> None:
    """Tell Ray that a node will be taken away at that time, in seconds since 1970."""
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, refusal = GcsClient(address=gcs_address).drain_node(node_id, reason, why, int(ends_at * 1000))
    if not accepted:
        raise RuntimeError(f"Ray has refused it: {refusal}")


# ---- the autoscaler ----


def declared_sizes() -> list[tuple[int, int]]:
    """Return the fewest and the most nodes of each kind, where a platform declares them; -1: as many as are wanted."""
    declared = state.state.get_cluster_config()  # as Ray Data does
    return [(group.min_count, group.max_count) for group in (declared.node_group_configs if declared else ())]


def kind_of_node_by_hand(node_id: str) -> str:
    """Return the type in an autoscaler's reports of a node that it has not made: each has one of its own."""
    return str(format_readonly_node_type(node_id))


def reported_kinds() -> Iterator[str]:
    """Yield the node types in the reports that Ray's autoscaler, of either version, writes for `ray status`."""
    written = _internal_kv_get(DEBUG_AUTOSCALING_STATUS)
    report = json.loads(written).get("autoscaler_report", {}) if written else {}
    yield from {**report.get("active_nodes", {}), **(report.get("idle_nodes") or {})}
    yield from (report.get("node_type_mapping") or {}).values()  # also of nodes that have not reported yet
    status = get_cluster_status(ray.get_runtime_context().gcs_address)  # version 2
    if status.stats.autoscaler_version not in (None, "0"):
        yield from (node.ray_node_type_name for node in [*status.active_nodes, *status.idle_nodes])


# ---- placement groups ----


@dataclass(frozen=True, slots=True)
class MadeGroup:
    """A placement group. `ray.util.placement_group_table()` leaves out who made it, and when."""

    id: str
    state: str
    maker: str
    """The id of the actor that made it."""

    def handle(self) -> PlacementGroup:
        """Return the handle that `ray.util` takes to remove the group."""
        return PlacementGroup(PlacementGroupID(bytes.fromhex(self.id)))


def placement_groups() -> list[MadeGroup]:
    """Return all groups of the cluster but removed ones, in the order in which they were made."""
    accessor = state.state._connect_and_get_accessor()
    table = [PlacementGroupTableData.FromString(each) for each in accessor.get_placement_group_table()]
    return [
        MadeGroup(
            group.placement_group_id.hex(),
            PlacementGroupTableData.PlacementGroupState.Name(group.state),
            group.creator_actor_id.hex(),
        )
        for group in sorted(table, key=lambda group: group.placement_group_creation_timestamp_ms)
        if group.state != PlacementGroupTableData.REMOVED
    ]


def free_in_bundles(group: PlacementGroup) -> list[Mapping[str, float]]:
    """Return what is free in each bundle of a group: to Ray a resource `CPU_group_INDEX_GROUP` of the bundle's node."""
    names = re.compile(rf"(.+)_group_(\d+)_{group.id.hex()}")
    found: list[dict[str, float]] = [{} for _ in range(group.bundle_count)]
    for free in free_by_node().values():
        for name, amount in free.items():
            if match := names.fullmatch(name):
                found[int(match[2])][match[1]] = amount
    return [*found]


def why_dead(actor: Any, seconds: float) -> RayError | None:
    """Return Ray's error for an actor whose process has ended, None if it answers. GetTimeoutError: Ray does not know.

    Every actor has this method, and Ray Train's workers are free to answer it while they train.
    """
    try:
        ray.get(actor.__ray_ready__.remote(), timeout=seconds)
    except GetTimeoutError:
        raise
    except RayError as error:
        return error
    return None
