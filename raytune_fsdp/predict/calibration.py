"""What a machine was measured to do, as `raytune-fsdp plan --calibrate FILE` writes it and `--gpu FILE` reads it."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.base.untrusted import UnsoundError, check_format, is_count, parse_json, read_file, reason, shown

_LIMIT = 1 << 20
_MOST_POINTS = 1000

Point = tuple[float, float, float]
"""Two sizes, and what was measured there."""


@dataclass(frozen=True, slots=True)
class Surface:
    """A rate by two sizes, the first of which is at most the second: between measured points a product of powers of
    both, beyond them that of the nearest."""

    points: tuple[Point, ...]

    def at(self, small: float, large: float) -> float:
        columns: dict[float, list[tuple[float, float]]] = {}
        for first, second, rate in sorted(self.points):
            columns.setdefault(second, []).append((first, rate))
        return _between([(second, _between(column, small)) for second, column in sorted(columns.items())], large)


def _between(points: Sequence[tuple[float, float]], size: float) -> float:
    """On straight lines through the logarithms."""
    sizes = [each for each, _ in points]
    place = bisect_left(sizes, size)
    if place in (0, len(points)):
        return points[max(0, place - 1)][1]
    (left, low), (right, high) = points[place - 1], points[place]
    share = math.log(size / left) / math.log(right / left)
    return low * math.exp(share * math.log(high / low))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Of one rank, while as many others as a machine has did the same."""

    device: str
    """What the machine calls it."""
    kind: str
    """cuda or cpu."""
    memory: int
    """Bytes of the device, or of the machine that its ranks share."""
    ranks: int
    """Of the machine."""
    threads: int
    """Of a rank, on a CPU."""
    products: Mapping[str, Surface]
    """Operations a second, by the two shortest sides of a product. The key is the type: `2` and `4` bytes."""
    attention: Mapping[str, Surface]
    """Operations a second, by the width of a head and the length of a document. Keys: `2 forward`, `4 backward` ..."""
    elementwise: Surface
    """Bytes that are read and written in a second, by bytes (twice the same)."""
    per_operation: float
    """Seconds that the host takes to begin one."""
    per_collective: float
    """Seconds of one that moves next to nothing. 0 with one rank."""
    gathering: float
    """Bytes a second that a rank gets from the others of its machine. 0 with one rank."""
    reducing: float
    """The same, of a sum."""
    reached: Mapping[str, float]
    """Of the sum of its operations, by real steps of a small model, by type."""
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
    """ConfigError if a calibration cannot be written there; an older one is replaced, another file is not."""
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
    """ConfigError if it is not one."""
    try:
        values = parse_json(read_file(path, limit=_LIMIT, links=True))
        return _of(values)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; --calibrate {path} makes one of this machine") from error
    except ValueError as error:
        raise ConfigError(
            f"{path} is not what `raytune-fsdp plan --calibrate` writes: {reason(error)}; name another file"
        ) from error


def _of(values: Any) -> Calibration:
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


def _check_plain(values: Mapping[str, Any]) -> None:
    """The texts and the numbers."""
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
