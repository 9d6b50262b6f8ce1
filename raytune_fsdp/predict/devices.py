"""What a plan needs to know of a device: its memory, how fast that is read, what it reaches of its peak, and its links.

Peaks are in flops.py. Sources, by vendor:

- NVIDIA's data sheets: V100, T4, A100, A800, A10, A40, A30, L4, L20, L40, L40S, H100 (SXM, PCIe, NVL), H800, H20,
  H200 (SXM, NVL), GH200, HGX B200 and B300, GB200 and GB300 NVL72, RTX A5000, RTX A6000, RTX 5000 Ada, RTX 6000 Ada,
  RTX PRO 6000 Blackwell; the specifications of GeForce RTX 3080 to 5090. The A10G is in AWS's page of G5 instances.
- AMD's data sheets: Instinct MI210, MI250X, MI300X, MI325X, MI350X, MI355X.

`memory` is what torch sees, where that has been reported: by prime-rl's benchmarks (B200, H100, H200, RTX A6000:
https://github.com/PrimeIntellect-ai/prime-rl/tree/main/benchmarks/baselines), or as the total in a message of CUDA or
HIP that memory has run out. Many such messages name no device, only a total that cards of one size have. Drivers differ
by 0.2 GiB. Where no report was found it is the data sheet's number in units of 10^9 bytes, which is 6 % less than what
drivers show of cards with HBM: a plan errs on the safe side. Cards with GDDR6 lose 1/16 to ECC.

`link_bandwidth` is what all devices of a machine can do at once. A bridge that joins two or four cards (A100 PCIe, H100
NVL, A40, RTX 3090 ...) does not count: a ring over more of them goes at the speed of PCIe.

`matmul` is the fraction of the peak that large bf16 products reach. Measured: stas00's table of maximum achievable
matmul FLOPS, https://github.com/stas00/ml-engineering/blob/master/compute/accelerator/README.md, as of 2026-08-22. Its
TFLOP/s are divided by the peaks of flops.py here, since it takes 1300 for a MI300X and 2300 for a MI355X. Nobody's
measurement is behind the others: they are assumed to be like the measured device that they name.

`fp8`: whether it multiplies in 8 bits, for which the vendors' data sheets give twice the peak of 16 bits (with fp32
accumulation and dense matrices). What is reached of that is not known here: it is assumed to be as much as in 16 bits.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.base.untrusted import UnsoundError, check_format, is_count, parse_json, read_file, reason, shown
from raytune_fsdp.step.flops import peak_flops

GIB = 2**30
_GIGA, _TERA = 1e9, 1e12
_LIST = "python -c \"from raytune_fsdp.predict.devices import DEVICES; print(*DEVICES, sep='\\n')\""

_MEASURED_TFLOPS = {
    # bf16, from stas00's table (see above).
    "GB200": 1822.0, "B300": 1769.0, "B200": 1745.0, "GH200-144GB": 828.6, "H100": 794.5,
    "A100-80GB": 271.2, "A100-PCIe-80GB": 252.9, "MI355X": 1565.0, "MI325X": 784.9, "MI300X": 668.4,
}  # fmt: skip

_LINKS = {
    # In one direction, of one device, in 10^9 bytes/s.
    "NVLink 5": 900, "NVLink 4": 450, "NVLink 3": 300, "NVLink 2": 150,
    "NVLink 4, cut": 200, "NVLink 3, cut": 200,  # H800 and A800: 400 both ways
    "Infinity Fabric 4": 535.5, "Infinity Fabric 3": 448,  # 7 links, one to each other device of a board
    "Infinity Fabric 2": 175,  # of one die; a package of two has 350
    "PCIe 5 x16": 63, "PCIe 4 x16": 31.5, "PCIe 3 x16": 15.75,
}  # fmt: skip

_WITHOUT_FP8 = ("V100", "T4", "A", "RTX-A", "RTX-30", "MI2")

_REPORTED_BY_NAME = {
    "A10", "A100-80GB", "B200", "GB200", "H100", "H200", "MI300X", "RTX-6000-Ada", "RTX-A6000", "T4",
}  # fmt: skip
"""The other totals in GiB come from reports that name no device, or from one of a device with the same memory."""

# name, GB that it is sold with, GiB that torch sees (None: nominal), 10^9 bytes/s of memory, link,
# whose fraction of the peak it has
_TABLE: tuple[tuple[str, int, float | None, float, str, str], ...] = (
    ("GB300", 288, None, 8000, "NVLink 5", "B300"),
    ("GB200", 186, 184.31, 8000, "NVLink 5", "GB200"),
    ("B300", 288, None, 8000, "NVLink 5", "B300"),
    # The data sheet has 8000. The driver names a bus of 7680 bits at 3996 MHz: https://github.com/pytorch/ao/pull/4002
    ("B200", 180, 178.35, 7672, "NVLink 5", "B200"),
    ("GH200-144GB", 144, None, 4900, "NVLink 4", "GH200-144GB"),
    ("GH200-96GB", 96, None, 4000, "NVLink 4", "GH200-144GB"),
    ("H200", 141, 139.80, 4800, "NVLink 4", "H100"),  # the table says of it: the same as H100
    ("H200-NVL", 141, None, 4800, "PCIe 5 x16", "H100"),
    ("H100", 80, 79.18, 3350, "NVLink 4", "H100"),
    # Meta's Grand Teton: HBM2e, 500 W. torchtitan, which publishes with it, does not know its peak either.
    ("H100-96GB", 96, None, 2400, "NVLink 4", "H100"),
    ("H100-PCIe", 80, 79.18, 2000, "PCIe 5 x16", "H100"),
    ("H100-NVL", 94, None, 3900, "PCIe 5 x16", "H100"),
    ("H800", 80, 79.18, 3350, "NVLink 4, cut", "H100"),
    ("H20", 96, None, 4000, "NVLink 4", "H100"),
    ("A100-80GB", 80, 79.25, 2039, "NVLink 3", "A100-80GB"),
    ("A100-40GB", 40, 39.49, 1555, "NVLink 3", "A100-80GB"),
    ("A100-PCIe-80GB", 80, 79.25, 1935, "PCIe 4 x16", "A100-PCIe-80GB"),
    ("A100-PCIe-40GB", 40, 39.49, 1555, "PCIe 4 x16", "A100-PCIe-80GB"),
    ("A800", 80, 79.25, 2039, "NVLink 3, cut", "A100-80GB"),
    ("A30", 24, None, 933, "PCIe 4 x16", "A100-PCIe-80GB"),
    ("A40", 48, 44.34, 696, "PCIe 4 x16", "A100-PCIe-80GB"),
    ("A10G", 24, 22.03, 600, "PCIe 4 x16", "A100-PCIe-80GB"),
    ("A10", 24, 22.06, 600, "PCIe 4 x16", "A100-PCIe-80GB"),
    ("L40S", 48, 44.34, 864, "PCIe 4 x16", "A100-PCIe-80GB"),
    ("L40", 48, 44.34, 864, "PCIe 4 x16", "A100-PCIe-80GB"),
    ("L20", 48, 44.34, 864, "PCIe 4 x16", "A100-PCIe-80GB"),
    ("L4", 24, 22.03, 300, "PCIe 4 x16", "A100-PCIe-80GB"),
    ("RTX-PRO-6000", 96, 94.97, 1792, "PCIe 5 x16", "A100-PCIe-80GB"),
    ("RTX-6000-Ada", 48, 44.43, 960, "PCIe 4 x16", "A100-PCIe-80GB"),
    ("RTX-5000-Ada", 32, None, 576, "PCIe 4 x16", "A100-PCIe-80GB"),
    ("RTX-A6000", 48, 47.40, 768, "PCIe 4 x16", "A100-PCIe-80GB"),
    ("RTX-A5000", 24, None, 768, "PCIe 4 x16", "A100-PCIe-80GB"),
    ("RTX-5090", 32, 31.36, 1792, "PCIe 5 x16", "A100-PCIe-80GB"),
    ("RTX-5080", 16, None, 960, "PCIe 5 x16", "A100-PCIe-80GB"),
    ("RTX-4090", 24, 23.52, 1008, "PCIe 4 x16", "A100-PCIe-80GB"),
    ("RTX-4080", 16, None, 717, "PCIe 4 x16", "A100-PCIe-80GB"),
    ("RTX-3090-Ti", 24, 23.56, 1008, "PCIe 4 x16", "A100-PCIe-80GB"),
    ("RTX-3090", 24, 23.56, 936, "PCIe 4 x16", "A100-PCIe-80GB"),
    ("RTX-3080", 10, None, 760, "PCIe 4 x16", "A100-PCIe-80GB"),
    ("MI355X", 288, None, 8000, "Infinity Fabric 4", "MI355X"),
    ("MI350X", 288, None, 8000, "Infinity Fabric 4", "MI355X"),
    ("MI325X", 256, None, 6000, "Infinity Fabric 3", "MI325X"),
    ("MI300X", 192, 191.69, 5300, "Infinity Fabric 3", "MI300X"),
    ("MI250X", 64, None, 1638, "Infinity Fabric 2", "MI300X"),  # one of its two dies, as torch shows it
    ("MI210", 64, None, 1638, "PCIe 4 x16", "MI300X"),
    ("V100-32GB", 32, 31.73, 900, "NVLink 2", "A100-80GB"),
    ("V100-16GB", 16, None, 900, "NVLink 2", "A100-80GB"),
    ("V100-PCIe-32GB", 32, 31.73, 900, "PCIe 3 x16", "A100-PCIe-80GB"),
    ("V100-PCIe-16GB", 16, None, 900, "PCIe 3 x16", "A100-PCIe-80GB"),
    ("T4", 16, 14.56, 320, "PCIe 3 x16", "A100-PCIe-80GB"),
)

_OTHER_NAMES = {
    "GH200 480GB": "GH200-96GB",  # torch's name has the memory of the processor
    "B200 192GB": "B200",  # what its chips have; boards are sold with 180
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU, or what torch shows as one."""

    name: str
    sold_gb: int
    """The number in its name, in GB."""
    memory: float
    """Bytes of its memory."""
    memory_basis: str
    bandwidth: float
    """Bytes a second of its memory."""
    link: str
    link_bandwidth: float
    """Bytes a second to the other devices of its machine, in one direction."""
    bf16: bool
    """Whether it computes in bf16. V100 and T4 do not; their peaks are fp16's."""
    fp8: bool
    """Whether it multiplies in 8 bits: Ada and what came after it, and MI300."""
    peak: float
    """Operations a second, from flops.py."""
    matmul: float
    """Fraction of the peak that large products reach."""
    matmul_basis: str
    measured: Calibration | None = None
    """What a machine with this device was measured to do; None: nobody has measured one."""

    @property
    def host_bandwidth(self) -> float:
        """Bytes a second to the memory of its machine, in one direction: by the slot that boards with it have."""
        if self.name.startswith(("GH200", "GB")):
            return 450 * _GIGA  # NVLink-C2C
        newer = self.name.startswith(("B", "H", "RTX-50", "RTX-PRO", "MI3"))
        older = self.name.startswith(("V100", "T4"))
        return _LINKS["PCIe 5 x16" if newer else "PCIe 3 x16" if older else "PCIe 4 x16"] * _GIGA

    @property
    def kind(self) -> str:
        """`cuda` or `cpu`, as torch calls it (a GPU of AMD is `cuda`, too)."""
        return "cuda" if self.measured is None else self.measured.kind


def _device(name: str, sold_gb: int, seen_gib: float | None, bandwidth: float, link: str, measured_as: str) -> Device:
    peak, of_measured = peak_flops(name), peak_flops(measured_as)
    assert peak is not None and of_measured is not None, f"{name} and {measured_as} need a peak in flops.py"
    tflops = _MEASURED_TFLOPS[measured_as]
    reported = "reported" if name in _REPORTED_BY_NAME else "reported for its size"
    measured = f"measured by stas00/ml-engineering: {tflops:g} TFLOP/s"
    return Device(
        name=name,
        sold_gb=sold_gb,
        memory=sold_gb * _GIGA if seen_gib is None else seen_gib * GIB,
        memory_basis="nominal" if seen_gib is None else reported,
        bandwidth=bandwidth * _GIGA,
        link=link,
        link_bandwidth=_LINKS[link] * _GIGA,
        bf16=not name.startswith(("V100", "T4")),
        fp8=not name.startswith(_WITHOUT_FP8),
        peak=peak,
        matmul=tflops * _TERA / of_measured,
        matmul_basis=measured if name == measured_as else f"assumed, like {measured_as}",
    )


DEVICES = {row[0]: _device(*row) for row in _TABLE}
"""Devices by the names that a user writes."""


_NO_PART_OF_A_NAME = {
    "nvidia", "amd", "tesla", "geforce", "instinct", "gpu", "sxm", "sxm2", "sxm3", "sxm4", "sxm5", "sxm6", "oam", "ac",
    "hbm2", "hbm2e", "hbm3", "hbm3e", "generation", "blackwell", "server", "workstation", "edition",
}  # fmt: skip
_MEMORY = re.compile(r"(?<![a-z0-9.])(\d{1,4}) ?g(?:i?b)?(?![a-z0-9.])")
_FORMS = ("pcie", "nvl")


def _parts(name: str) -> tuple[str, str, int | None]:
    """Split a name: what is left of it without vendor, form and memory; the form; the memory in GB."""
    text = re.sub(r"[-_/ ]+", " ", name.lower())
    memory = _MEMORY.search(text)
    words = [word for word in _MEMORY.sub(" ", text).split() if word not in _NO_PART_OF_A_NAME]
    rest = "".join(words)
    form = next((form for form in _FORMS if rest.endswith(form)), "")
    return rest.removesuffix(form), form, int(memory[1]) if memory else None


_KNOWN = {
    **{_parts(name): name for name in DEVICES},
    **{_parts(other): name for other, name in _OTHER_NAMES.items()},
}


def find_device(name: str) -> Device:
    """Return the device that a user, or torch, calls `name`; raise ConfigError if there is none, or more than one.

    Case, spaces, hyphens and the vendor's name do not matter, and neither does the memory where there is only one size:
    `NVIDIA H100 80GB HBM3` is `H100`.
    """
    rest, form, memory = _parts(name)
    for spelled in (rest, f"rtx{rest}"):
        if exact := _KNOWN.get((spelled, form, memory)):
            return DEVICES[exact]
        of_kind = dict.fromkeys(known for key, known in _KNOWN.items() if key[:2] == (spelled, form))
        found = [DEVICES[known] for known in of_kind if memory in (None, DEVICES[known].sold_gb)]
        if len(found) == 1:
            return found[0]
        if found:
            raise ConfigError(
                f"the device {name!r} comes in {len(found)} sizes: write {' or '.join(each.name for each in found)}"
            )
    plain = {re.sub(r"[^a-z0-9]", "", known.lower()): known for known in DEVICES}
    asked = f"{rest}{form}{f'{memory}gb' if memory else ''}"
    near = [plain[match] for match in get_close_matches(asked, plain, n=3, cutoff=0.4)]
    nearest = f"; the nearest are {', '.join(near)}" if near else ""
    raise ConfigError(f"the device {name!r} is not known{nearest}. To list all: {_LIST}")


def most_memory(device: Device) -> int:
    """Return the bytes of the largest device that Ray calls as it calls this one: by the first part of the name."""
    alike = [each for name, each in DEVICES.items() if name == device.name or name.startswith(f"{device.name}-")]
    return int(max(each.memory for each in alike))


def device_of(found: Calibration) -> Device:
    """Return the device of a machine, from what was measured there."""
    return Device(
        name=found.device,
        sold_gb=0,
        # The ranks of a CPU share the memory of its machine.
        memory=found.memory / (found.ranks if found.kind == "cpu" else 1),
        memory_basis="as the machine says",
        bandwidth=max(rate for _, _, rate in found.elementwise.points),
        link="measured",
        # With one rank alone nobody asks for it.
        link_bandwidth=found.gathering or math.inf,
        bf16=True,
        fp8=True,
        peak=peak_flops(found.device) or found.peak,
        matmul=1.0,
        matmul_basis="measured",
        measured=found,
    )


_SPEEDS = {"Gbps": _GIGA / 8, "GB/s": _GIGA, "MB/s": _GIGA / 1000}


def link_speed(text: str) -> float:
    """Return bytes a second from what a user writes as `400Gbps` or `50GB/s`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(\S*)\s*", text)
    unit = found[2] if found else ""
    if not found or unit not in _SPEEDS:
        what = f"the unit {unit!r}" if found and unit else "no number and unit" if not found else "no unit"
        raise ConfigError(
            f"the speed {text!r} has {what}: write bits as 400Gbps, or bytes as 50GB/s (both are the same speed)"
        )
    speed = float(found[1]) * _SPEEDS[unit]
    if not 0 < speed < math.inf:
        raise ConfigError(f"the speed {text!r} is none that a link has: write for example 400Gbps or 50GB/s")
    return speed


# What a machine was measured to do, as `raytune-fsdp plan --calibrate FILE` writes it and `--gpu FILE` reads it.

_LIMIT = 1 << 20
_MOST_POINTS = 1000

Point = tuple[float, float, float]
"""Two sizes, and what was measured there."""


@dataclass(frozen=True, slots=True)
class Surface:
    """A rate by two sizes, the first of which is at most the second.

    Between measured points it is a product of powers of both sizes, beyond them the rate of the nearest point.
    """

    points: tuple[Point, ...]

    def at(self, small: float, large: float) -> float:
        columns: dict[float, list[tuple[float, float]]] = {}
        for first, second, rate in sorted(self.points):
            columns.setdefault(second, []).append((first, rate))
        return _between([(second, _between(column, small)) for second, column in sorted(columns.items())], large)


def _between(points: Sequence[tuple[float, float]], size: float) -> float:
    """Interpolate on straight lines through the logarithms."""
    sizes = [each for each, _ in points]
    place = bisect_left(sizes, size)
    if place in (0, len(points)):
        return points[max(0, place - 1)][1]
    (left, low), (right, high) = points[place - 1], points[place]
    share = math.log(size / left) / math.log(right / left)
    return low * math.exp(share * math.log(high / low))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What one rank was measured to do, while as many others as a machine has did the same."""

    device: str
    """The machine's name for its device."""
    kind: str
    """cuda or cpu."""
    memory: int
    """Bytes of the device, or of the machine that its ranks share."""
    ranks: int
    """Ranks of the machine."""
    threads: int
    """Threads of a rank, on a CPU."""
    products: Mapping[str, Surface]
    """Operations a second, by the two shortest sides of a product. The key is the type: `2` and `4` bytes."""
    attention: Mapping[str, Surface]
    """Operations a second, by the width of a head and the length of a document. Keys: `2 forward`, `4 backward` ..."""
    elementwise: Surface
    """Bytes that are read and written in a second, by bytes (twice the same)."""
    per_operation: float
    """Seconds that the host takes to begin an operation."""
    per_collective: float
    """Seconds of a collective that moves next to nothing. 0 with one rank."""
    gathering: float
    """Bytes a second that a rank gets from the others of its machine. 0 with one rank."""
    reducing: float
    """Bytes a second of a sum over the ranks of a machine. 0 with one rank."""
    reached: Mapping[str, float]
    """How much of the sum of their operations the steps of a small model reach, by type."""
    torch: str
    date: str

    @property
    def peak(self) -> float:
        """The most that products have reached, of any type."""
        return max(rate for surface in self.products.values() for _, _, rate in surface.points)


_SURFACES = ("products", "attention")
_KEYS = {
    "products": {"2", "4"},
    "attention": {f"{width} {way}" for width in "24" for way in ("forward", "backward")},
    "reached": {"2", "4"},
}


def check_writable(path: Path) -> None:
    """Raise ConfigError if a calibration cannot be written there; an older one is replaced, another file is not."""
    if path.exists():
        read_calibration(path)
    if path.suffix != ".json":
        raise ConfigError(f"--calibrate {path}: its name must end in .json, by which --gpu knows it from a device")
    if not path.parent.is_dir():
        raise ConfigError(f"--calibrate {path}: there is no directory {path.parent}; make it, or name another file")


def write_calibration(found: Calibration, path: Path) -> None:
    check_writable(path)
    values = asdict(found)
    for name in _SURFACES:
        values[name] = {key: surface["points"] for key, surface in values[name].items()}
    values["elementwise"] = values["elementwise"]["points"]
    try:
        path.write_text(json.dumps({"format": 1, **values}, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--calibrate {path}: it cannot be written: {error.strerror}; name another file") from error


def read_calibration(path: Path) -> Calibration:
    """Read a calibration; raise ConfigError if the file is not one."""
    try:
        values = parse_json(read_file(path, limit=_LIMIT, links=True))
        if not isinstance(values, dict):
            raise UnsoundError("is not an object")
        check_format(values.pop("format", None))
        known = {field.name for field in fields(Calibration)}
        if values.keys() != known:
            raise UnsoundError(f"has the keys {shown(sorted(values))}")
        _check_plain(values)
        for name, keys in _KEYS.items():
            if not isinstance(values[name], dict) or values[name].keys() != keys:
                raise UnsoundError(f"has {name} {shown(values[name])}")
        for key, share in values["reached"].items():
            _positive(f"reached of {key}", share)
        surfaces = {name: {key: _surface(name, each) for key, each in values[name].items()} for name in _SURFACES}
        return Calibration(**{**values, **surfaces, "elementwise": _surface("elementwise", values["elementwise"])})
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; --calibrate {path} makes one of this machine") from error
    except ValueError as error:
        raise ConfigError(
            f"{path} is not what `raytune-fsdp plan --calibrate` writes: {reason(error)}; name another file"
        ) from error


def _check_plain(values: Mapping[str, Any]) -> None:
    """Check the texts and the numbers."""
    for name in ("device", "torch", "date"):
        if not (isinstance(values[name], str) and values[name].isprintable() and len(values[name]) <= 200):
            raise UnsoundError(f"has {name} {shown(values[name])}")
    if values["kind"] not in ("cuda", "cpu"):
        raise UnsoundError(f"has kind {shown(values['kind'])}")
    for name in ("memory", "ranks", "threads"):
        if not is_count(values[name]) or not values[name]:
            raise UnsoundError(f"has {name} {shown(values[name])}")
    _positive("per_operation", values["per_operation"])
    for name in ("gathering", "reducing", "per_collective"):
        if values["ranks"] > 1 or values[name] != 0:
            _positive(name, values[name])


def _surface(name: str, points: Any) -> Surface:
    if not isinstance(points, list) or not 0 < len(points) <= _MOST_POINTS:
        raise UnsoundError(f"has {name} {shown(points)}")
    for point in points:
        if not isinstance(point, list) or len(point) != 3:
            raise UnsoundError(f"has {shown(point)} in {name}")
        for number in point:
            _positive(name, number)
    return Surface(tuple((first, second, rate) for first, second, rate in points))


def _positive(name: str, value: Any) -> None:
    if type(value) not in (int, float) or not 0 < value < 1e30:
        raise UnsoundError(f"has {name} {shown(value)}")
