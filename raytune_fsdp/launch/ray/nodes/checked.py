"""Ask the nodes of a cluster that already runs (`raytune-fsdp doctor`). Start no Ray, and leave nothing behind.

The caller hands in the questions: this file only brings them to the nodes, and the answers back in time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from raytune_fsdp.base.errors import RaytuneError, TransientError, in_one_line
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.sections.cluster import ClusterConfig
from raytune_fsdp.launch.ray.private import KNOCK
from raytune_fsdp.launch.ray.resources import Node, Request, bundle, local_cpus, nodes, shortage
from raytune_fsdp.launch.ray.session import check_not_in_a_copy, connect, find_cluster

__all__ = [
    "LateError",
    "ask_each",
    "asks_for_a_token",
    "check_not_in_a_copy",
    "connected",
    "find_cluster",
    "on_ranks",
    "this_machine",
]

_STARTING_SECONDS = 50.0
"""How long the processes of ranks may take to start and to import torch."""


class LateError(RaytuneError):
    """An answer did not come in time. Nothing wrong was seen: a process of Ray's starts slowly."""


def asks_for_a_token(address: str, seconds: float) -> bool | None:
    """Return whether the cluster turns away callers without a token; None where that cannot be found out."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", KNOCK, address], capture_output=True, text=True, timeout=seconds,
            env={**environment, "RAY_AUTH_MODE": "disabled"},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return {"open": False, "token": True}.get(done.stdout.strip())


@contextmanager
def connected(address: str, config: ClusterConfig) -> Iterator[str]:
    """Join the cluster at this address while the context lasts; yield which one it is, in words."""
    session = connect(config, 1, address)
    try:
        yield session.about
    finally:
        session.close()


def this_machine(config: ClusterConfig, gpus: int) -> Node:
    """Return the node that a Ray started here for a run would have."""
    total = {"CPU": float(local_cpus(config, config.most or max(1, gpus))), "GPU": float(gpus)}
    return Node(id="", name="this machine", total=total, free=total)


def ask_each(
    among: Sequence[Node], work: Callable[..., Any], *arguments: Any, seconds: float, by_value: ModuleType | None = None
) -> dict[str, Any]:
    """Return a function's result on each node, by the node's id; an exception where it fails or is late (LateError).

    `by_value`: its module, if that is to be sent along, since the node may have another version of it or none.
    """
    if by_value is not None:
        ray.cloudpickle.register_pickle_by_value(by_value)
    # No CPU is asked for: nodes answer while runs have all of them.
    task = ray.remote(num_cpus=0, max_retries=0)(work)
    asked = {
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(
            *arguments
        ): node.id
        for node in among
    }
    try:
        done, late = ray.wait(list(asked), num_returns=len(asked), timeout=seconds)
        answers: dict[str, Any] = {asked[each]: LateError(f"no answer within {seconds:.0f} s") for each in late}
        for each in late:
            ray.cancel(each, force=True)
        for each in done:
            try:
                answers[asked[each]] = ray.get(each)
            except Exception as error:  # the function's own, or that of a node that was lost meanwhile
                answers[asked[each]] = getattr(error, "cause", None) or error
        return answers
    finally:
        if by_value is not None:
            ray.cloudpickle.unregister_pickle_by_value(by_value)


class _Rank:
    """A process in the place of a worker of the run."""

    def address(self) -> str:
        import socket

        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def prepare(self, work: Callable[[], None]) -> None:
        work()

    def call(self, work: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        return work(node=ray.get_runtime_context().get_node_id(), **arguments)


def on_ranks(
    config: FinetuneConfig,
    request: Request,
    work: Callable[..., Any],
    *,
    first: Callable[[], None],
    wait: float,
    seconds: float,
) -> list[Any]:
    """Return a function's results on all ranks of processes that are placed and equipped as the run's would be.

    It is called with `rank`, `world`, `device`, `node` (its id) and `init`, the address at which the ranks meet; before
    that, `first` is called in each of them. `wait`: seconds to wait for their resources.
    """
    group = placement_group([bundle(request)] * request.workers, strategy=request.placement.upper())
    actors: list[Any] = []
    try:
        if not group.wait(wait):
            raise TransientError(f"{shortage(request, nodes())}; try again when it is free")
        kind = ray.remote(max_restarts=0)(_Rank)
        env = {"env_vars": dict(config.cluster.env)} if config.cluster.env else None
        reserved = {name: amount for name, amount in request.per_worker.items() if name not in ("CPU", "GPU")}
        actors = [
            kind.options(
                num_cpus=request.per_worker.get("CPU", 0), num_gpus=request.per_worker.get("GPU", 0),
                resources={name: amount for name, amount in reserved.items() if name != "memory"},
                runtime_env=env, scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
            ).remote()
            for index in range(request.workers)
        ]  # fmt: skip
        ready = [actor.prepare.remote(first) for actor in actors]
        _, late = ray.wait(ready, num_returns=len(ready), timeout=_STARTING_SECONDS)
        if late:
            raise LateError(
                f"not measured: {len(late)} of {len(ready)} processes did not start and import torch within "
                f"{_STARTING_SECONDS:g} s"
            )
        ray.get(ready)
        init = ray.get(actors[0].address.remote(), timeout=wait)
        about = {"world": request.workers, "device": request.device, "init": init}
        results = [actor.call.remote(work, {**about, "rank": rank}) for rank, actor in enumerate(actors)]
        return list(ray.get(results, timeout=seconds))
    except ray.exceptions.GetTimeoutError as error:
        raise TransientError(
            f"the ranks did not meet, or did not finish, within {seconds:g} s; look for a firewall between the nodes, "
            "and set NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME in cluster.env to the interface that joins them"
        ) from error
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        raise TransientError(
            f"a collective fails ({in_one_line(cause)}); set NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME in cluster.env "
            "to the interface that joins the nodes, and read the log with cluster.env={NCCL_DEBUG: INFO}"
        ) from error
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)
