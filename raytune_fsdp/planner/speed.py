"""How long a step takes, from the traced operations and from what moves between devices.

An operation takes as long as its arithmetic or its memory traffic, whichever is longer. A pass takes as long as its
operations or its collectives, whichever are longer, since FSDP gathers the next unit while one computes. What is not
hidden: the first unit of a pass, the last reduction, the update of the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from raytune_fsdp.estimate.devices import Device
from raytune_fsdp.estimate.traffic import Traffic
from raytune_fsdp.plan import Layout
from raytune_fsdp.planner.memory import all_phases
from raytune_fsdp.planner.trace import Trace
from raytune_fsdp.planner.work import Operation

_COPIES = 0.9
"""Of a memory's bandwidth. A large copy on an H200 reaches 4.3 of 4.8 TB/s (stas00/ml-engineering)."""

_LINKS = 0.8
"""Of a link's bandwidth, for collectives of the size of a unit: to plan for 80 to 85 % is a rule of thumb, which NCCL's
all-reduce over NVLink meets (stas00/ml-engineering, network benchmarks)."""

_FUSED = 0.35
"""Of the bytes of what is no product, where blocks are compiled. By count: a norm reads and writes its input 12 times
operation by operation, and 4 times as a graph; rotations and gates about as much."""

_PER_OPERATION = 6e-6
"""Seconds that a host takes to start an operation; a graph starts a fused one for about five. An assumption, which
`--calibrate` replaces."""

REACHED = 0.70
"""Of the roofline, by real steps: the median of the six published rows that were set aside for this before anything was
predicted (0.35, 0.66, 0.69, 0.71, 0.76, 0.85; `benchmarks/published_speed.py`)."""

MIDDLE = (0.81, 0.68)
"""Of the roofline: the upper and the lower quartile of the scored rows."""

_ATTENTION = {
    # Of the peak, forward and backward together, causal, heads of 128. FlashAttention-2's paper: 190 to 230 TFLOP/s on
    # A100; its kernels on H100: 335 to 400 (FlashAttention-3's paper). torch's own is FlashAttention-2.
    "A100": 0.60, "A800": 0.60, "H": 0.36, "GH": 0.36,
}  # fmt: skip
_OTHER_ATTENTION = 0.5
"""On devices that nobody published it for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device does in a second."""

    products: float
    """Operations, in the type that the run computes in."""
    wide_products: float
    """In 32 bits."""
    attention: float
    bandwidth: float
    """Bytes read and written, of what is no product: more than the memory has, where operations are fused."""
    copies: float
    """Bytes read and written by one operation."""
    per_operation: float
    """Seconds of the host."""
    basis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What moves in a second between devices, in one direction."""

    per_node: int
    """Devices of a machine."""
    inside: float
    """Of a device, to the others of its machine; bytes."""
    between: float | None
    """Of a machine, to the others; None: nobody said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Of a step."""

    step: float
    roofline: float
    """Of the same step, if every operation went as fast as the fastest of its kind."""
    compute: float
    moving: float
    """The collectives of all passes, hidden or not."""
    update: float
    inside: float
    """Bytes that a device sends to others of its machine in a step."""
    between: float
    """Bytes that a machine sends to others in a step."""

    @property
    def bound(self) -> str:
        return "communication" if self.moving > self.compute else "computation"


def rates_of(device: Device, *, compiled: bool, tf32: bool) -> Rates:
    """By published measurements."""
    share = next((s for start, s in _ATTENTION.items() if device.name.startswith(start)), _OTHER_ATTENTION)
    return Rates(
        products=device.peak * device.matmul,
        wide_products=device.peak * device.matmul * (0.5 if tf32 else 1 / 16),
        attention=device.peak * share,
        bandwidth=device.bandwidth * _COPIES / (_FUSED if compiled else 1),
        copies=device.bandwidth * _COPIES,
        per_operation=_PER_OPERATION / (5 if compiled else 1),
        basis=f"products: {device.matmul_basis}",
    )


def network_of(device: Device, per_node: int, between: float | None) -> Network:
    return Network(per_node=per_node, inside=device.link_bandwidth, between=between)


def seconds_of(
    trace: Trace, rates: Rates, network: Network, layout: Layout, traffic: Traffic | None, passes: int
) -> Seconds:
    """Of a step with so many forward and backward passes."""
    by_phase = {name: compute_seconds(operations, rates) for name, operations in phases_of(trace)}
    first, later, update = 0.0, 0.0, update_seconds(trace, rates)
    for name in all_phases(trace, by_phase):
        if name in ("start", "update"):
            continue
        if name.split()[1] == "0":
            first += by_phase[name]
        else:
            later += by_phase[name]
    # Of the traced blocks only; every weight takes as long.
    update *= trace.trained_bytes / max(1, trace.trained_bytes_traced)
    compute = first + (passes - 1) * later
    moving, inside, between = moving_seconds(layout, network, traffic) if traffic else (0.0, 0.0, 0.0)
    # What is gathered before the first block, and what is reduced after the last: of about as many units as blocks.
    ends = moving / passes / (len(trace.stands_for) + 2)
    roofline = max(compute + 2 * ends * passes, moving) + update
    # Links are counted at what collectives reach; arithmetic and memory at what an operation reaches alone.
    step = max(compute / REACHED + 2 * ends * passes, moving) + update / REACHED
    return Seconds(
        step=step, roofline=roofline, compute=compute / REACHED, moving=moving, update=update / REACHED,
        inside=inside, between=between,
    )  # fmt: skip


def update_seconds(trace: Trace, rates: Rates) -> float:
    """Of gradients' norm, their scaling and the optimizer, which no graph is made of."""
    plain = replace(rates, bandwidth=rates.copies)
    return sum(compute_seconds(ops, plain) for name, ops in phases_of(trace) if name == "update")


def phases_of(trace: Trace) -> Iterable[tuple[str, Sequence[Operation]]]:
    marks = trace.timeline.marks
    for mark, following in zip(marks, marks[1:], strict=False):
        yield mark.name, trace.timeline.operations[mark.operations : following.operations]


def compute_seconds(operations: Sequence[Operation], rates: Rates) -> float:
    seconds = sum(_seconds(each, rates) for each in operations)
    # A host that is slower than its device decides.
    return max(seconds, len(operations) * rates.per_operation)


def _seconds(operation: Operation, rates: Rates) -> float:
    speed = rates.products if operation.itemsize <= 2 else rates.wide_products
    if operation.sort == "attention":
        speed = rates.attention
    bandwidth = rates.bandwidth if operation.sort == "rest" else rates.copies
    return max(operation.flops / speed, operation.nbytes / bandwidth)


def moving_seconds(layout: Layout, network: Network, traffic: Traffic) -> tuple[float, float, float]:
    """Seconds of all collectives of a step, and the bytes of a device inside of its machine, and of a machine to
    others."""
    shards = traffic.bytes_of_weights + traffic.scattered * traffic.bytes_reduced
    copies = traffic.all_reduced * traffic.bytes_reduced
    local = min(network.per_node, layout.world)
    inside = between = 0.0
    # A ring over several machines sends each byte once into each of them, over all its links together.
    if layout.shard_size > network.per_node:
        between += shards
    else:
        inside += shards
    # Replicas of a shard lie `shard_size` ranks apart: so many rings run side by side on a machine.
    if layout.world > network.per_node:
        between += copies * min(layout.shard_size, local)
    else:
        inside += copies
    seconds = inside / (network.inside * _LINKS)
    if between:
        seconds += between / ((network.between or network.inside) * _LINKS)
    return seconds, inside, between
