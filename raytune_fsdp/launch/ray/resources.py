"""Say what a run asks of a Ray cluster, and refuse what the cluster can never provide: Ray would wait for ever."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal

import ray
from ray.util.accelerators import accelerators

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.launch.ray import private

if TYPE_CHECKING:
    from ray.train import ScalingConfig

    from raytune_fsdp.config.sections.cluster import ClusterConfig

DATA_CPUS = 1  # needed besides those of the workers: a task that builds a window takes one
LOCAL_DATA_CPUS = 2  # at least, in a Ray started for this run alone, however few CPUs the machine has
_KNOCK_SECONDS = 2.0
_ACCELERATOR = "accelerator_type:"
_FREE_NOW = "; free now: "
_UNITS = 10_000  # Ray counts resources in ten-thousandths. So must we: in floats 1 // 0.1 is 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the cluster, and what it has."""

    id: str
    name: str
    """The name for messages."""
    total: Mapping[str, float]
    free: Mapping[str, float]
    """Empty if unknown."""
    address: tuple[str, int] = ("", 0)
    """Where its raylet listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The workers that a run asks for, and what each of them needs."""

    workers: int
    per_worker: Mapping[str, float]
    accelerator_type: str | None
    placement: str
    device: Literal["cpu", "cuda"]


def nodes(*, leaving: bool = False) -> list[Node]:
    """Return the living nodes of the connected cluster. Those that are about to be taken away only if `leaving`."""
    free, left_out = private.free_by_node(), {} if leaving else draining()
    return [
        Node(
            id=each["NodeID"],
            name=each["NodeName"],
            total=each["Resources"],
            free=free.get(each["NodeID"], {}),
            address=(each["NodeManagerAddress"], each["NodeManagerPort"]),
        )
        for each in ray.nodes()
        if each["Alive"] and each["NodeID"] not in left_out
    ]


def answering(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes whose raylet takes a connection. Ray itself notices only after 15 s that a node is gone."""
    if not nodes:
        return []
    with ThreadPoolExecutor(min(32, len(nodes))) as threads:
        return [node for node, answers in zip(nodes, threads.map(_answers, nodes), strict=True) if answers]


def _answers(node: Node) -> bool:
    try:
        socket.create_connection(node.address, timeout=_KNOCK_SECONDS).close()
    except OSError:
        return False
    return True


def draining() -> dict[str, float | None]:
    """Return the nodes that are about to be taken away, by id, and the seconds that are left, if that is known."""
    now = time.time() * 1000
    return {
        node: max(0.0, (deadline - now) / 1000) if deadline else None
        for node, deadline in private.leaving_nodes().items()
    }


def may_grow() -> bool:
    """Return whether an autoscaler may add nodes. Ray does not say whether it has reached its limit."""
    if any(most == -1 or most > fewest for fewest, most in private.declared_sizes()):
        return True
    by_hand = {private.kind_of_node_by_hand(node["NodeID"]) for node in ray.nodes()}
    return not by_hand.issuperset(private.reported_kinds())


def request(config: ClusterConfig, nodes: Sequence[Node], *, growing: bool = False) -> Request:
    """Return what this config means on these nodes: how many workers, on which device, with which resources each."""
    for name in config.resources_per_worker.keys() & {"CPU", "GPU", "TPU"}:
        instead = "workers run on CPUs or GPUs" if name == "TPU" else f"set cluster.{name.lower()}s_per_worker instead"
        raise ConfigError(f"cluster.resources_per_worker.{name}={config.resources_per_worker[name]:g}: {instead}")
    gpus = gpus_of(config, nodes)
    device = _device(config, gpus, growing)
    if config.workers == "auto" and device == "cuda" and growing and not gpus:
        raise ConfigError(
            "cluster.workers=auto means one for each GPU of the cluster, but this cluster, which may grow, has none "
            "yet: set cluster.workers"
        )
    reserved = int(device == "cuda") if config.gpus_per_worker == "auto" else config.gpus_per_worker
    per_worker = {"CPU": config.cpus_per_worker, "GPU": reserved, **config.resources_per_worker}
    return Request(
        workers=config.most or (max(1, gpus) if device == "cuda" else 1),
        per_worker={name: float(amount) for name, amount in per_worker.items() if amount},
        accelerator_type=config.accelerator_type,
        placement=config.placement,
        device=device,
    )


def gpus_of(config: ClusterConfig, nodes: Sequence[Node]) -> int:
    """Return how many GPUs there are for this config."""
    return sum(int(node.total.get("GPU", 0)) for node in _with(config.accelerator_type, nodes))


def _device(config: ClusterConfig, gpus: int, growing: bool) -> Literal["cpu", "cuda"]:
    if config.device == "cuda" and config.gpus_per_worker == 0:
        raise ConfigError(
            "cluster.gpus_per_worker=0 with cluster.device=cuda: Ray hides GPUs from workers that reserve none; set "
            "cluster.gpus_per_worker=auto or cluster.device=cpu"
        )
    if config.device != "auto" or config.gpus_per_worker == 0:
        return "cuda" if config.device == "cuda" else "cpu"
    # Naming an accelerator or reserving a GPU means cuda; `check` refuses if there are too few.
    if config.gpus_per_worker == 1 or config.accelerator_type is not None:
        return "cuda"
    wanted = config.fewest or 1
    if gpus < wanted and growing:
        raise ConfigError(
            f"cluster.device=auto: this cluster has {gpus} GPU{'s' * (gpus != 1)} for {wanted} "
            f"worker{'s' * (wanted != 1)} and may grow, so it is unclear whether the run is to use GPUs; set "
            "cluster.device=cuda or cluster.device=cpu"
        )
    return "cuda" if gpus >= wanted else "cpu"


def check_resources(request: Request, nodes: Sequence[Node], *, growing: bool) -> None:
    """Refuse what the cluster can never provide, even when nothing else runs on it.

    With `growing`, what added nodes could provide is waited for. Ray does not say which kinds of nodes can be added.
    """
    _check_accelerator(request, nodes, growing)
    if growing:
        return
    able = _with(request.accelerator_type, nodes)
    room = [_slots(node, request) for node in able]
    if not any(room):
        raise ConfigError(_too_large(request, able, nodes))
    asked = f"cluster.workers={request.workers}: {_asked(request)}"
    has = f"the cluster has {_kinds(nodes, request)}"
    if sum(room) < request.workers:
        alone = {name: sum(_fits(node, name, each) for node in able) for name, each in request.per_worker.items()}
        short = [name for name, most in alone.items() if most < request.workers and name != "GPU"]
        raise ConfigError(f"{asked}, but there is room for {sum(room)}: {has}; {_ways_out(request, short)}")
    if request.placement == "strict_pack" and max(room) < request.workers:
        raise ConfigError(
            f"cluster.placement=strict_pack with {asked}, all on one node, but no node has room for more than "
            f"{max(room)}: {has}; set cluster.placement=pack, or lower cluster.workers"
        )
    fitting = sum(slots > 0 for slots in room)
    if request.placement == "strict_spread" and fitting < request.workers:
        raise ConfigError(
            f"cluster.placement=strict_spread with {asked}, each on a node of its own, but only {fitting} of the nodes "
            f"fit one: {has}; set cluster.placement=spread, or lower cluster.workers"
        )
    whole = sum(int(node.total.get("CPU", 0)) for node in nodes)
    if whole - request.workers * request.per_worker["CPU"] < DATA_CPUS:
        raise ConfigError(
            f"{asked}: of {whole} CPUs none is left to prepare the data, which needs {DATA_CPUS}: {has}; "
            f"{_ways_out(request, ['CPU'])}"
        )


def _check_accelerator(request: Request, nodes: Sequence[Node], growing: bool) -> None:
    wanted = request.accelerator_type
    possible = {name for node in nodes for name in accelerators_of(node)}
    what = "no node has it"
    if growing:
        possible |= {value for name, value in vars(accelerators).items() if not name.startswith("_")}
        what += ", and Ray knows no accelerator of this name that an added node could have"
    if wanted is not None and wanted not in possible:
        raise ConfigError(
            f"cluster.accelerator_type={wanted}: {what}{_nearest(wanted, possible)}; the cluster has "
            f"{_kinds(nodes, request)}; name one that it has, or leave the field out"
        )


def _too_large(request: Request, able: Sequence[Node], nodes: Sequence[Node]) -> str:
    """Say why no node has room for a single worker, and what to do."""
    has = f"the cluster has {_kinds(nodes, request)}"
    kind = f"node with {request.accelerator_type}" if request.accelerator_type else "node"
    lacking = [name for name, each in request.per_worker.items() if not any(_fits(node, name, each) for node in able)]
    if not lacking:
        return (
            f"cluster.cpus_per_worker={request.per_worker['CPU']:g}: each worker needs {_each(request)}, but no {kind} "
            f"has all of it at once: {has}; lower what each worker reserves, or add such nodes"
        )
    name, amount = lacking[0], request.per_worker[lacking[0]]
    if name == "GPU":
        cuda = request.device == "cuda"
        field, way_out = ("device=cuda", "device=cpu") if cuda else ("gpus_per_worker=1", "gpus_per_worker=0")
        return (
            f"cluster.{field}: each worker needs a GPU, but no {kind} has one: {has}; set cluster.{way_out}, or add "
            "such nodes"
        )
    known = {each for node in nodes for each in node.total if not each.startswith("node:")}
    near = _nearest(name, known) if name not in known else ""
    return (
        f"{_field(name)}={amount:g}: each worker needs {_amount(name, amount)}, but no {kind} has as much{near}: "
        f"{has}; lower it, or add such nodes"
    )


def _ways_out(request: Request, short: Sequence[str]) -> str:
    fields = [_field(name) for name in short if name != "CPU" or request.per_worker[name] > 1]
    cpus = ", add CPUs (`ray start --num-cpus`)" * ("CPU" in short)
    return f"lower {' or '.join(['cluster.workers', *fields])}{cpus}, or add nodes"


def _field(name: str) -> str:
    return "cluster.cpus_per_worker" if name == "CPU" else f"cluster.resources_per_worker.{name}"


def waiting_for(request: Request, nodes: Sequence[Node], group: str | None) -> str:
    """Return a line about what is waited for. `group`: the state of the workers' placement group, None before it."""
    if group == "CREATED":
        return f"starting {request.workers} worker{'s' * (request.workers != 1)}"
    if group is None:
        return f"waiting for {_asked(request)}: Ray Train is starting"
    if room(request, [replace(node, total=node.free) for node in nodes]) >= request.workers:
        # What is free reaches the head later than the request; and other jobs may be before us.
        return f"waiting for {_asked(request)}: as much is free, and Ray is about to reserve it"
    return shortage(request, nodes)


def room(request: Request, nodes: Sequence[Node]) -> int:
    """Return how many workers have room on these nodes, placed as asked."""
    slots = [_slots(node, request) for node in nodes] or [0]
    if request.placement == "strict_pack":
        return max(slots)
    return sum(each > 0 for each in slots) if request.placement == "strict_spread" else sum(slots)


def able(request: Request, nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes that could hold a worker."""
    return [node for node in nodes if _slots(node, request)]


def shortage(request: Request, nodes: Sequence[Node]) -> str:
    """Return a line about workers that wait: what they need, and what is free now on nodes that could hold them."""
    fit = able(request, nodes)

    def described(node: Node) -> str:
        free = {name: _number(name, node.free.get(name, 0)) if node.free else "?" for name in request.per_worker}
        return ", ".join(f"{left} of {_amount(name, node.total[name])}" for name, left in free.items())

    return f"waiting for {_asked(request)}{_FREE_NOW}{_grouped(fit, described) or 'nothing, as no node fits one yet'}"


def way_out(line: str) -> str:
    """Say what to do about a line of `waiting_for` or `shortage` that stays: only the latter lacks resources."""
    if lacks_room(line):
        return "Free the resources, add nodes, ask for less (cluster.workers), or wait longer"
    return (
        "No resources are missing, processes start slowly: look for a busy node (uptime there) and for packages that "
        "are imported from a slow file system (time python -c 'import torch, ray.train' there), or raise "
        "cluster.wait_minutes"
    )


def lacks_room(line: str) -> bool:
    """Return whether a line of `waiting_for` or `shortage` names resources that are missing."""
    return _FREE_NOW in line


def scaling_config(request: Request) -> ScalingConfig:
    from ray.train import ScalingConfig  # takes seconds, which a refused request is spared

    return ScalingConfig(
        num_workers=request.workers,
        use_gpu="GPU" in request.per_worker,
        resources_per_worker=dict(request.per_worker),
        placement_strategy=request.placement.upper(),
        accelerator_type=request.accelerator_type,  # adds a small share of it to each worker's request
    )


def bundle(request: Request) -> dict[str, float]:
    """Return what one worker reserves, as Ray Train asks for it."""
    kind = {} if request.accelerator_type is None else {f"{_ACCELERATOR}{request.accelerator_type}": 0.001}
    return {**request.per_worker, **kind}


def local_cpus(config: ClusterConfig, workers: int) -> int:
    """Return the logical CPUs of a Ray started on this machine for this run alone: some are left for the data."""
    if config.workers == "auto" and config.device != "cpu":
        workers = max(workers, private.gpus_of_machine())
    taken = workers * config.cpus_per_worker
    return taken + max(LOCAL_DATA_CPUS, private.cpus_of_machine() - taken)


def _with(accelerator: str | None, nodes: Sequence[Node]) -> list[Node]:
    return [node for node in nodes if accelerator is None or accelerator in accelerators_of(node)]


def accelerators_of(node: Node) -> list[str]:
    """Return the kinds of accelerators that a node says it has."""
    return [name.removeprefix(_ACCELERATOR) for name in node.total if name.startswith(_ACCELERATOR)]


def _slots(node: Node, request: Request) -> int:
    """Return how many workers fit on this node when it is empty. Exact, since all ask for the same."""
    # A worker takes only a thousandth of the accelerator resource: it selects the node, and never runs out.
    if not _with(request.accelerator_type, [node]):
        return 0
    return min(_fits(node, name, amount) for name, amount in request.per_worker.items())


def _fits(node: Node, name: str, amount: float) -> int:
    return round(node.total.get(name, 0) * _UNITS) // max(1, round(amount * _UNITS))


def _nearest(name: str, among: Iterable[str]) -> str:
    folded = {each.casefold(): each for each in among}
    near = get_close_matches(name.casefold(), folded, n=1)
    return f"; nearest: {folded[near[0]]}" if near else ""


def _each(request: Request) -> str:
    return " + ".join(_amount(name, amount) for name, amount in request.per_worker.items())


def _asked(request: Request) -> str:
    where = f" on nodes with {request.accelerator_type}" if request.accelerator_type else ""
    plural, each = ("s", " each") if request.workers > 1 else ("", "")
    return f"{request.workers} worker{plural} with {_each(request)}{each}{where}"


def _kinds(nodes: Sequence[Node], request: Request) -> str:
    """Describe nodes by what they have in total: `1 node with 4 CPU and 2 nodes with 8 CPU, 4 GPU`."""

    def described(node: Node) -> str:
        of_type = f" ({', '.join(accelerators_of(node))})" if accelerators_of(node) else ""
        has = (_amount(name, node.total.get(name, 0)) for name in dict.fromkeys(["CPU", "GPU", *request.per_worker]))
        return ", ".join(has) + of_type

    return _grouped(nodes, described) or "no nodes"


def _grouped(nodes: Sequence[Node], described: Callable[[Node], str]) -> str:
    groups = Counter(map(described, nodes)).items()
    return " and ".join(f"{count} node{'s' * (count > 1)} with {text}" for text, count in groups)


def _amount(name: str, amount: float) -> str:
    return f"{_number(name, amount)} {'GB memory' if name == 'memory' else name}"


def _number(name: str, amount: float) -> str:
    return f"{amount / 1e9:.4g}" if name == "memory" else f"{amount:.6g}"
