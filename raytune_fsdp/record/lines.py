"""Write, read and recognise the lines of `metrics.jsonl`.

Floats are written so that reading gives the same bits. JSON has no NaN and no infinities: they are written as the texts
"NaN", "Infinity" and "-Infinity", as in protobuf's JSON, and become floats again when they are read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from raytune_fsdp.base.measured import StepMetrics
from raytune_fsdp.base.untrusted import parse_json

# One NaN object for all: containers compare by identity first, so the trajectories of two runs with NaN can be equal.
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
# These values are the same however often a run is interrupted or resized: none may depend on the machine.
_TRAJECTORY = ("step", "epoch", "samples", "tokens", "target_tokens", "loss", "grad_norm", "lr")
_BESIDE = (
    "accuracy", "datasets", "step_seconds", "data_seconds", "tokens_per_second", "mfu", "memory_bytes",
    "rank_seconds", "rank_data_seconds", "rank_compute_seconds", "rank_memory_bytes", "reserved_bytes",
    "host_memory_bytes", "gpu_utilization", "windows_built", "skipped", "expert_load", "experts_idle", "nodes",
    "predicted",
)  # fmt: skip

DIGESTS = ("digest", "digest_of_everything")
"""Of weights, and with the optimizer's state and the place in the data. Only some steps have them: in the trajectory if
the run is the same to the bit at any number of ranks, and otherwise beside it."""

_NUMBER = rb'(?:-?[0-9][0-9.eE+-]*+|"NaN"|"-?Infinity")'
WHOLE_STEP = re.compile(
    # Checks every value of the trajectory; the rest only has to be one line of plain text without braces. It never
    # backtracks (`*+`), so no line takes long. With a million lines a resume takes 4 s of processor time; it took 16 s
    # when each was parsed. A line in another form is parsed: an additional key only costs time.
    rb'^\{"kind": "step", "trajectory": \{"step": ([1-9][0-9]{0,14}), "epoch": '
    + _NUMBER
    + rb', "samples": "[0-9a-f]*+", "tokens": [0-9]++, "target_tokens": [0-9]++, "loss": '
    + _NUMBER
    + rb', "grad_norm": '
    + _NUMBER
    + rb', "lr": '
    + _NUMBER
    + b"(?:%s)?" % b"".join(b', "%s": "[0-9a-f]{64}"' % key.encode() for key in DIGESTS)
    + rb"\}, [ -z|~]*+\}\n",
    re.MULTILINE,
)
"""Matches the line of a step in the form in which it is written here; the group is the step."""


def step_lines(metrics: Sequence[StepMetrics], world_size: int, attempt: int) -> Iterator[dict[str, object]]:
    """Yield the lines of steps that have just ended."""
    # Steps arrive together, as they are fetched from the device: their durations say when each ended. Trackers take the
    # time from the line, so that a point that is sent twice is the same point.
    end = datetime.now(UTC) - timedelta(seconds=sum(step.step_seconds for step in metrics))
    for step in metrics:
        end += timedelta(seconds=step.step_seconds)
        there = () if step.digest is None else (step.digest.weights, step.digest.everything)
        digests = dict(zip(DIGESTS, there, strict=False))
        yield {
            "kind": "step",
            "trajectory": {**{name: getattr(step, name) for name in _TRAJECTORY}, **(digests if step.exact else {})},
            "world_size": world_size,
            "attempt": attempt,
            "time": end.isoformat(timespec="milliseconds"),
            **{name: getattr(step, name) for name in _BESIDE},
            **({"preferences": step.preferences} if step.preferences else {}),
            **({} if step.exact else digests),
        }


def evaluation_line(step: int, values: Mapping[str, float], attempt: int) -> dict[str, object]:
    """Return the line of an evaluation that has just ended."""
    return {"kind": "eval", "step": step, "values": values, "attempt": attempt, "time": now()}


def now() -> str:
    """Return the time in the form in which lines have it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def to_bytes(line: object) -> bytes:
    """Return a line of a JSON Lines file, with its end."""
    text = json.dumps(_encode(line), allow_nan=False, default=_plain, ensure_ascii=False)
    return text.encode(errors="replace") + b"\n"


def from_bytes(raw: bytes) -> Any:
    """Parse a line; None if it is not JSON."""
    try:
        value = parse_json(raw, doubles=True)
        # Look for these texts in the bytes first: walking through every value takes longer than parsing it.
        return _decode(value) if b'NaN"' in raw or b'Infinity"' in raw else value
    except ValueError:
        return None


def read_line(raw: bytes) -> dict[str, Any] | None:
    """Parse a line of `metrics.jsonl`; None if it is neither a step nor an evaluation."""
    line = from_bytes(raw)
    if not isinstance(line, dict):
        return None
    if line.get("kind") == "step":
        trajectory = line.get("trajectory")
        known = isinstance(trajectory, dict) and all(_is_value(trajectory.get(key), key) for key in _TRAJECTORY)
        return line if known and trajectory["step"] > 0 else None  # type: ignore[index]
    if line.get("kind") == "eval":
        values = line.get("values")
        known = isinstance(values, dict) and all(map(is_number, values.values()))
        return line if known and _is_value(line.get("step"), "step") and line["step"] >= 0 else None
    return None


def metrics_of(line: Mapping[str, Any]) -> StepMetrics:
    """Return the metrics in the line of a step, as far as users are shown them."""
    trajectory = line["trajectory"]

    def number(name: str) -> float:
        return float(line[name]) if is_number(line.get(name)) else 0.0

    return StepMetrics(
        **{name: trajectory[name] for name in _TRAJECTORY},
        step_seconds=number("step_seconds"),
        data_seconds=number("data_seconds"),
        tokens_per_second=number("tokens_per_second"),
        skipped=line.get("skipped") is True,
        preferences=preferences_of(line),
        mfu=number("mfu") if is_number(line.get("mfu")) else None,
        memory_bytes=line["memory_bytes"] if type(line.get("memory_bytes")) is int else 0,
    )


def preferences_of(line: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """Return the rewards and what else the line of a step says of pairs or judged answers, by name."""
    found = line.get("preferences")
    return tuple(
        (entry[0], float(entry[1]))
        for entry in (found if isinstance(found, list | tuple) else ())
        if isinstance(entry, list | tuple) and len(entry) == 2 and isinstance(entry[0], str) and is_number(entry[1])
    )


def step_of(line: Mapping[str, Any]) -> int:
    """Return the step of a line; for an evaluation, the step before it."""
    return int(line["trajectory"]["step"] if line["kind"] == "step" else line["step"])


def time_of(line: Mapping[str, Any]) -> int | None:
    """Return the time in a line, in milliseconds since 1970; None in lines of older versions."""
    try:
        return round(datetime.fromisoformat(line["time"]).timestamp() * 1000)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def seconds_of(line: Mapping[str, Any]) -> float:
    """Return the time in a line, in seconds since 1970; NaN in lines of older versions."""
    when = time_of(line)
    return math.nan if when is None else when / 1000


def is_number(value: object) -> bool:
    """Return whether a value is a number that fits into a float. A bool, which Python counts as an int, is not."""
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def _is_value(value: object, key: str) -> bool:
    if key == "samples":
        return isinstance(value, str)
    return type(value) is int and abs(value) < 2**63 if key == "step" else is_number(value)


def _encode(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_encode(item) for item in value]
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return value


def _plain(value: object) -> object:
    """Return a scalar of an array library as a number, anything else as text."""
    item = getattr(value, "item", None)
    return _encode(item()) if callable(item) else str(value)
