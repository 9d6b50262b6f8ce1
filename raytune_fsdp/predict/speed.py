"""How long a step takes, from the traced operations and from what moves between devices.

An operation takes as long as its arithmetic or its memory traffic, whichever is longer. A pass takes as long as its
operations or its collectives, whichever are longer, since FSDP gathers the next unit while one computes. What is not
hidden: the first unit of a pass, the last reduction, the update of the weights. On CPUs nothing is hidden: the cores
that compute also move.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.plan.plan import Plan
from raytune_fsdp.predict.devices import Calibration, Device
from raytune_fsdp.predict.links import Network, add_up, exchange, move
from raytune_fsdp.predict.memory import Memory, all_phases
from raytune_fsdp.predict.trace.trace import Trace
from raytune_fsdp.predict.trace.work import Operation, Sort

_COPIES = 0.9
"""The share of a memory's bandwidth that copies reach. A large copy on an H200 reaches 4.3 of 4.8 TB/s
(stas00/ml-engineering)."""

_FUSED = 0.35
"""The share of bytes that is left of what is no product, where layers are compiled. By count: a norm reads and writes
its input 12 times operation by operation, and 4 times as a graph; rotations and gates about as much."""

_NARROWING = 5 / 33 * 0.52
"""The share that is left of what makes 8 bits of 16: operation by operation 33 bytes a number, as a graph 2 to find the
largest, and 3 to read and write it. A graph does about half of it at all: queries, keys and values have one input, both
products of backward one gradient, and nothing is narrowed again for products that are kept (0.52 of a Llama 8B's layer,
by count). With it, an 8B at 8192 on 8 H100 is planned to be 1.14 times as fast as in bf16. torchtitan's first figures
were 7,186 tokens a second to 5,760, 1.25 times (https://github.com/pytorch/torchtitan/commit/7a04053): a plan errs on
the slow side."""

_NARROW = 2.0
"""How many operations in 8 bits take the time of one in 16: the ratio of peaks in data sheets. Nobody's measurement is
behind it."""

_NOT_MEASURED = f"; in 8 bits {_NARROW:g} times that, by data sheets, not measured"

_PER_OPERATION = 6e-6
"""Seconds that a host takes to start an operation; a graph starts a fused one for about five. An assumption, which
`--calibrate` replaces."""

REACHED = 0.70
"""The share of the roofline that real steps reach: the median of the six published rows that were set aside for this
before anything was predicted (0.35, 0.66, 0.69, 0.71, 0.76, 0.85; `benchmarks/published_speed.py`)."""

MIDDLE = (0.81, 0.68)
"""The upper and the lower quartile of what the scored rows reach of the roofline."""

LINKS_BETWEEN = (0.8 / 0.85, 0.8 / 0.6)
"""How many times as long as planned collectives may take: at 85 % of their links' speed, the best of the rule of thumb,
and at 60 %. The latter is an assumption."""

_ATTENTION = {
    # A share of the peak, forward and backward together, causal, heads of 128. FlashAttention-2's paper: 190 to 230
    # TFLOP/s on A100; its kernels on H100: 335 to 400 (FlashAttention-3's paper). torch's own is FlashAttention-2.
    "A100": 0.60, "A800": 0.60, "H": 0.36, "GH": 0.36,
}  # fmt: skip
_OTHER_ATTENTION = 0.5
"""That share on devices for which nobody published it."""

_ATTENTION_SORTS = ("attention", "attention backward")

_MOVING = ("collective", "exchange", "sum")


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Rates by the measurements of others."""

    products: float
    """Operations a second, in the type that the run computes in."""
    wide_products: float
    """Operations a second in 32 bits."""
    attention: float
    bandwidth: float
    """Bytes a second, read and written by what is no product: more than the memory has where operations are fused."""
    copies: float
    """Bytes a second that are read and written by one operation."""
    narrowing: float
    """Bytes a second that are read and written on the way to 8 bits."""
    per_operation: float
    """Seconds of the host for each operation."""
    basis: str
    reached: float = REACHED
    hides: bool = True

    def seconds(self, operations: Sequence[Operation]) -> float:
        found = [each for each in operations if each.sort not in _MOVING]
        # A host that is slower than its device decides.
        return max(sum(map(self._seconds, found)), len(found) * self.per_operation)

    def uncompiled(self) -> Published:
        return replace(self, bandwidth=self.copies, narrowing=self.copies)

    def _seconds(self, operation: Operation) -> float:
        speed = self.products if operation.itemsize <= 2 else self.wide_products
        speed *= _NARROW if operation.itemsize == 1 else 1
        if operation.sort in _ATTENTION_SORTS:
            speed = self.attention
        bandwidth = {"rest": self.bandwidth, "narrowing": self.narrowing}.get(operation.sort, self.copies)
        return max(operation.flops / speed, operation.nbytes / bandwidth)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """Rates by a calibration of the machine."""

    calibration: Calibration
    type: str
    """Bytes of the numbers that the run computes with."""
    compiled: bool
    basis: str

    @property
    def reached(self) -> float:
        return self.calibration.reached[self.type]

    @property
    def hides(self) -> bool:
        return self.calibration.kind != "cpu"  # there both are computed by the same cores

    def seconds(self, operations: Sequence[Operation]) -> float:
        found = [each for each in operations if each.sort not in _MOVING]
        device = sum(map(self._seconds, found))
        host = len(found) * self.calibration.per_operation / (5 if self.compiled else 1)
        return max(device, host) if self.calibration.kind == "cuda" else device + host

    def uncompiled(self) -> Calibrated:
        return replace(self, compiled=False)

    def _seconds(self, operation: Operation) -> float:
        calibration, width = self.calibration, "2" if operation.itemsize <= 2 else "4"
        if operation.sort == "products":
            speed = calibration.products[width].at(*operation.sides)
            return operation.flops / (speed * (_NARROW if operation.itemsize == 1 else 1))
        if operation.sort in _ATTENTION_SORTS:
            way = "backward" if operation.sort == "attention backward" else "forward"
            return operation.flops / calibration.attention[f"{width} {way}"].at(*operation.sides)
        fused = (_NARROWING if operation.sort == "narrowing" else _FUSED) if self.compiled else 1
        return fused * operation.nbytes / calibration.elementwise.at(operation.nbytes, operation.nbytes)


Rates = Published | Calibrated
"""What a device does in a second. `reached`: what real steps reach of the sum of their operations. `hides`: whether
collectives run during the computation, and take none of its time. `seconds` returns those of operations one after the
other, and `uncompiled` the rates where no graph is made of operations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Seconds of a step, and the bytes that move in it."""

    operations: float
    """Forward and backward, if every operation were as fast as the fastest of its kind."""
    updating: float
    """The update of the weights, in the same way."""
    reached: float
    """What real steps reach of both."""
    moving: float
    """The collectives of all passes, hidden or not."""
    exposed: float
    """The collectives that no computation hides."""
    offloading: float
    """Copies to the memory of the host and back, at the same time as both."""
    inside: float
    """Bytes that a device sends to others of its machine in a step."""
    between: float
    """Bytes that a machine sends to others in a step."""
    exchanged: float
    """Bytes of both that a device receives for attention, from the ranks that share its samples."""
    added: float
    """Bytes of both that a device receives of sums over the ranks that have each a part of a layer."""

    def at(self, reached: float, links: float = 1.0) -> float:
        """Return the seconds of a step that reaches this share of the roofline, and moves in `links` times as long."""
        moving, computing = links * self.moving, self.operations / reached
        return max(computing + links * self.exposed, moving, self.offloading) + self.updating / reached

    @property
    def step(self) -> float:
        return self.at(self.reached)

    @property
    def compute(self) -> float:
        return self.operations / self.reached

    @property
    def update(self) -> float:
        return self.updating / self.reached

    @property
    def bound(self) -> str:
        bounds = {"computation": self.compute, "communication": self.moving, "offloading": self.offloading}
        return max(bounds, key=bounds.__getitem__)


def rates_of(device: Device, *, compiled: bool, tf32: bool, itemsize: int, narrow: bool = False) -> Rates:
    """Return the rates that were measured on the device, or else those of published measurements.

    `itemsize`: bytes of the numbers that are computed with. `narrow`: layers multiply in 8 bits.
    """
    caveat = _NOT_MEASURED if narrow and device.kind == "cuda" else ""  # CPUs emulate it
    if device.measured is not None:
        found = device.measured
        basis = f"kernels of {found.device}, measured by {found.ranks} ranks at a time on {found.date}{caveat}"
        fused = compiled and found.kind == "cuda"
        return Calibrated(calibration=found, type="2" if itemsize <= 2 else "4", compiled=fused, basis=basis)
    share = next((s for start, s in _ATTENTION.items() if device.name.startswith(start)), _OTHER_ATTENTION)
    return Published(
        products=device.peak * device.matmul,
        wide_products=device.peak * device.matmul * (0.5 if tf32 else 1 / 16),
        attention=device.peak * share,
        bandwidth=device.bandwidth * _COPIES / (_FUSED if compiled else 1),
        copies=device.bandwidth * _COPIES,
        narrowing=device.bandwidth * _COPIES / (_NARROWING if compiled else 1),
        per_operation=_PER_OPERATION / (5 if compiled else 1),
        basis=f"products: {device.matmul_basis}{caveat}",
    )


def forwards_of(config: FinetuneConfig) -> int:
    """Return how many passes without gradients a step makes: KTO looks ahead, and a reference may be asked."""
    return (config.train.objective.type == "kto") + (config.reference.when == "during")


def seconds_of(
    trace: Trace, rates: Rates, network: Network, plan: Plan, memory: Memory, *, further: int = 0
) -> Seconds:
    """Return the seconds of a step of the whole network.

    `further`: passes without gradients.
    """
    phases, passes = dict(phases_of(trace)), plan.division.full_rounds
    operations = of_all_passes(trace, {name: rates.seconds(each) for name, each in phases.items()}, passes)
    traffic = trace.traffic
    if further:
        forward = _forward({name: rates.seconds(each) for name, each in phases.items()})
        operations += further * of_all_passes(trace, forward, passes)
        traffic = None if traffic is None else replace(traffic, gathered=traffic.gathered * (1 + further / 2))
    update = rates.uncompiled().seconds(phases["update"])
    if trace.offloaded:  # the optimizer runs on the host
        update = sum(each.nbytes for each in phases["update"]) / network.host_memory * rates.reached
    counts = {name: float(sum(each.sort == "collective" for each in ops)) for name, ops in phases.items()}
    collectives = of_all_passes(trace, counts, passes) + counts["start"] + counts["update"]
    moved = move(plan.layout, network, traffic, collectives)
    nbytes, times = moved_in_layers(trace, phases, passes, "exchange")
    exchanged = exchange(plan.layout, network, nbytes, times)
    added = add_up(plan.layout, network, *moved_in_layers(trace, phases, passes, "sum"))
    # What is gathered before the first layer, and what is reduced after the last: of about as many units as layers.
    ends = 2 * moved.seconds / (len(trace.stands_for) + 2)
    # Bytes between a device and its host in a pass. Of this rank's share: weights for forward and once more for
    # backward, and gradients to the host.
    offloaded = 2 * memory.start.get("weights", 0) + trace.trained_bytes if trace.offloaded else 0
    return Seconds(
        operations=operations,
        # Of the traced layers only; every weight takes as long.
        updating=update * trace.trained_bytes / max(1, trace.trained_bytes_traced),
        reached=rates.reached,
        moving=moved.seconds + exchanged.seconds + added.seconds,
        # Attention waits for what is exchanged, and whatever comes behind a layer that is cut for its sums.
        exposed=(ends if rates.hides else moved.seconds) + exchanged.seconds + added.seconds,
        offloading=passes * (2 * memory.sent + offloaded) / network.to_host,
        inside=moved.inside + exchanged.inside + added.inside,
        between=moved.between + exchanged.between + added.between,
        exchanged=nbytes * (plan.layout.sequence - 1) / plan.layout.sequence,
        added=added.inside,
    )


def _forward(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return what a pass without gradients takes: a head that computes gradients has two products for each of these."""
    shares = {"pass": 1.0, "forward": 1.0, "head": 1 / 4}
    return {name: shares.get(name.split()[0], 0.0) * each for name, each in seconds.items()}


def moved_in_layers(
    trace: Trace, phases: Mapping[str, Sequence[Operation]], passes: int, sort: Sort
) -> tuple[float, float]:
    """Return the bytes that are exchanged for attention in a step, or added up, with those that stay, and how often."""
    found = {name: [each.nbytes for each in ops if each.sort == sort] for name, ops in phases.items()}
    of_all = [
        of_all_passes(trace, {name: float(each(sizes)) for name, sizes in found.items()}, passes) for each in (sum, len)
    ]
    return of_all[0], of_all[1]


def of_all_passes(trace: Trace, by_phase: Mapping[str, float], passes: int) -> float:
    """Add up all layers and passes, without what comes before the first and after the last."""
    first = later = 0.0
    for name in all_phases(trace, by_phase):
        if name in ("start", "update"):
            continue
        if name.split()[1] == "0":
            first += by_phase[name]
        else:
            later += by_phase[name]
    return first + (passes - 1) * later


def phases_of(trace: Trace) -> Iterable[tuple[str, Sequence[Operation]]]:
    marks = trace.timeline.marks
    for mark, following in zip(marks, marks[1:], strict=False):
        yield mark.name, trace.timeline.operations[mark.operations : following.operations]
