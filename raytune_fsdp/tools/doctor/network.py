"""Measure the collectives of a training step between real ranks, and compare with what the network should do."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.tools.doctor.finding import Finding, ok, problem, warning

if TYPE_CHECKING:
    import torch

SHARE = 0.8
"""On a good network, collectives reach 80 to 85 % of the nominal speed."""
_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
"""The size of a message: large enough that latency does not count. Units of a large model have this size."""
_SECONDS = 1.5
"""How long each collective is measured."""
_MOST_TIMES = 50
_MEETING = timedelta(seconds=40)
_SPEED = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(bps|bit/s|b/s|Bps|B/s)\s*", re.ASCII)


def parse_speed(text: str) -> float:
    """Return the bits a second of `400Gbps`, `100Gb/s` or `50GB/s`."""
    found = _SPEED.fullmatch(text)
    if found is None or not float(found[1]):
        raise ConfigError(f"--bandwidth {text} is not a speed: write it like 400Gbps (bits) or 50GB/s (bytes)")
    unit = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[found[2]]
    return float(found[1]) * unit * (8 if found[3].startswith("B") else 1)


def preload() -> None:
    """Import what `measure` needs, before its clock runs."""
    import torch.distributed  # noqa: F401


def measure(*, rank: int, world: int, device: str, init: str, node: str, seconds: float = _SECONDS) -> dict[str, Any]:
    """Return the bus speed in bits a second of each collective, on the slowest rank, and this node. Call on all ranks.

    The bus speed is what passes the slowest link of a ring, which is what a network's nominal speed means. An
    all-reduce sends each byte 2 (n-1) / n times, the other two (n-1) / n times.
    """
    import torch
    import torch.distributed as dist

    place = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(place)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=init, rank=rank, world_size=world, timeout=_MEETING)
    try:
        numbers = _BYTES[place.type] // 4 // world * world
        whole = torch.zeros(numbers, device=place)
        part = torch.zeros(numbers // world, device=place)
        once = (world - 1) / world
        collectives: Mapping[str, tuple[Callable[[], object], float]] = {
            "all-reduce": (lambda: dist.all_reduce(whole), 2 * once),
            "all-gather": (lambda: dist.all_gather_into_tensor(whole, part), once),
            "reduce-scatter": (lambda: dist.reduce_scatter_tensor(part, whole), once),
        }
        speeds = {}
        for name, (call, times_sent) in collectives.items():
            speeds[name] = 8 * _BYTES[device] * times_sent / _seconds(call, place, seconds)
        return {"node": node, "backend": backend, "speeds": speeds}
    finally:
        dist.destroy_process_group()


def _seconds(call: Callable[[], object], place: torch.device, seconds: float) -> float:
    """Return the seconds of one call, on the slowest rank."""
    import torch
    import torch.distributed as dist

    def timed(times: int) -> float:
        dist.barrier()
        began = time.monotonic()
        for _ in range(times):
            call()
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        slowest = torch.tensor([time.monotonic() - began], dtype=torch.float64, device=place)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest) / times

    timed(1)  # the first call connects
    return timed(max(1, min(_MOST_TIMES, int(seconds / max(timed(1), 1e-6)))))


def judge(ranks: Sequence[Mapping[str, Any]], nominal: float | None) -> list[Finding]:
    """Judge what was measured against the nominal speed of the network, in bits a second."""
    nodes = len({rank["node"] for rank in ranks})
    who = f"{len(ranks)} ranks on {nodes} node{'s' * (nodes > 1)}, {ranks[0]['backend']}"
    found = []
    for name in ranks[0]["speeds"]:
        speed = min(rank["speeds"][name] for rank in ranks)
        said = f"{name}: {_speed(speed)} ({who})"
        share = "" if nominal is None or nodes == 1 else f": {speed / nominal:.0%} of {_speed(nominal)}"
        if share and nominal is not None and speed < SHARE * nominal:
            found.append(problem("network", f"{said}{share}, where {SHARE:.0%} can be planned for", _FIX))
        else:
            found.append(ok("network", said + share))
    if nominal is not None and nodes == 1:
        said = "all ranks are on one node, so nothing crossed the network that --bandwidth is about"
        found.append(warning("network", said, "measure with ranks on several nodes: cluster.placement=strict_spread"))
    return found


_FIX = (
    "cluster.env={NCCL_DEBUG: INFO} shows what is used: NET/Socket means that InfiniBand or EFA is not (install its "
    "plugin, give the container its devices); set NCCL_SOCKET_IFNAME to the fast interface, put the nodes into one "
    "placement group, or plan with the speed that is there"
)


def _speed(bits: float) -> str:
    return f"{bits / 1e9:,.1f} Gbit/s" if bits >= 1e8 else f"{bits / 1e6:,.2f} Mbit/s"
