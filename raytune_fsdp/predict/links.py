"""What moves between devices in a step, over which links, and how long that takes."""

from __future__ import annotations

from dataclasses import dataclass

from raytune_fsdp.plan.plan import Layout
from raytune_fsdp.predict.devices import Device
from raytune_fsdp.step.traffic import Traffic

_LINKS = 0.8
"""The share of a link's bandwidth that collectives of the size of a unit reach: to plan for 80 to 85 % is a rule of
thumb, which NCCL's all-reduce over NVLink meets (stas00/ml-engineering, network benchmarks)."""

_HOST_MEMORY = 200e9
"""Bytes a second that all processors of a machine read and write. An assumption: servers have 8 to 12 channels of DDR4
or DDR5 a socket, at 25 to 38 GB/s each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Links: the bytes that move over each in a second, in one direction."""

    per_node: int
    """Devices of a machine."""
    inside: float
    """From a device to the others of its machine."""
    between: float | None
    """From a machine to the others; None: nobody said."""
    to_host: float
    """From a device to its host's memory."""
    host_memory: float
    """In that memory, for each device of the machine."""
    reducing: float | None = None
    """Inside of a machine, for what is summed; None: as fast as the rest."""
    per_collective: float = 0.0
    """Seconds of a collective that moves next to nothing."""
    share: float = _LINKS


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    seconds: float
    inside: float
    """Bytes that a device sends to others of its machine."""
    between: float
    """Bytes that a machine sends to others."""


def network_of(device: Device, per_node: int, between: float | None) -> Network:
    found = device.measured
    host = {"to_host": device.host_bandwidth * _LINKS, "host_memory": _HOST_MEMORY / per_node}
    if found is None or found.ranks == 1:
        return Network(per_node=per_node, inside=device.link_bandwidth, between=between, **host)
    # Measured at what collectives reach.
    return Network(
        per_node=per_node,
        inside=found.gathering,
        between=between,
        reducing=found.reducing,
        per_collective=found.per_collective,
        share=1.0,
        **host,
    )


def move(layout: Layout, network: Network, traffic: Traffic | None, collectives: float) -> Moved:
    """Return time and bytes of all `collectives` of a step."""
    if traffic is None:
        return Moved(seconds=0.0, inside=0.0, between=0.0)
    reducing, outside = network.reducing or network.inside, network.between or network.inside
    gathered, scattered = traffic.bytes_of_weights, traffic.bytes_scattered
    copies = traffic.all_reduced * traffic.bytes_reduced
    # A ring passes every byte through each device; where it is over several machines, into each of them once, over all
    # its links together. Its slowest link decides.
    inside, between = gathered + scattered, 0.0
    seconds = gathered / network.inside + scattered / reducing
    # Shards of one part of a layer lie `tensor` ranks apart: that many rings run side by side on a machine.
    copy = layout.shard_size * layout.tensor
    if copy > network.per_node:
        between += inside * min(layout.tensor, network.per_node)
        seconds = max(seconds, between / outside)
        if traffic.crossing or traffic.direct:
            # Summed in two levels, one after the other: only sums leave a machine, a part of them by each device.
            crossing = traffic.crossing * traffic.bytes_crossing
            if traffic.direct:  # everything leaves it, for each rank that is elsewhere
                crossing = scattered * (copy - network.per_node) / (copy - 1)
            inside = gathered + scattered - crossing
            between = gathered + crossing * network.per_node
            seconds = max(gathered / network.inside, gathered / outside)
            seconds += (scattered - crossing) / reducing + crossing * network.per_node / outside
    # Replicas of a shard lie a copy of the model apart.
    if layout.world > network.per_node:
        rings = min(copy, network.per_node, layout.world)
        between += copies * rings
        seconds += max(copies * rings / outside, copies / reducing)
    else:
        inside += copies
        seconds += copies / reducing
    return Moved(seconds=seconds / network.share + network.per_collective * collectives, inside=inside, between=between)


def exchange(layout: Layout, network: Network, nbytes: float, times: float) -> Moved:
    """Return time and bytes where `nbytes` go from each rank to the others with which it shares samples."""
    members, per_node = layout.sequence, network.per_node
    here = min(members, max(1, per_node // layout.tensor))  # those of a machine follow one another
    inside = nbytes * (here - 1) / members
    between = nbytes * (members - here) / members * min(per_node, layout.world)
    seconds = max(inside / network.inside, between / (network.between or network.inside))
    return Moved(seconds=seconds / network.share + network.per_collective * times, inside=inside, between=between)


def add_up(layout: Layout, network: Network, nbytes: float, times: float) -> Moved:
    """Return time and bytes of sums of `nbytes`, there and back, over the ranks that have each a part of a layer."""
    members, per_node = layout.tensor, network.per_node
    sent = 2 * nbytes * (members - 1) / members
    if members <= per_node:  # they are next to each other
        inside, between = sent, 0.0
        seconds = inside / (network.reducing or network.inside)
    else:
        inside, between = sent, sent
        seconds = between / (network.between or network.inside)
    return Moved(seconds=seconds / network.share + network.per_collective * times, inside=inside, between=between)
