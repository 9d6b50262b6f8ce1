"""The run directory's own record, `metrics.jsonl` and `events.jsonl`: the truth about a run.

`metrics.jsonl` has a line per optimizer step, exactly once and in order, and a line per evaluation. Floats are written
so that reading gives the same bits. JSON has no NaN and no infinities: they are written as "NaN", "Infinity" and
"-Infinity", as in protobuf's JSON, and the readers here turn them back. `events.jsonl` only ever grows, and other
processes append to it too.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

from raytune_fsdp.durable import sync_directory
from raytune_fsdp.errors import RaytuneError, ResumeError, TrainingError, TransientError
from raytune_fsdp.redaction import redact
from raytune_fsdp.rundir import EVENTS_FILE, METRICS_FILE
from raytune_fsdp.tracking.tracker import RunStart, Status
from raytune_fsdp.types import StepMetrics
from raytune_fsdp.untrusted import UnsoundError, is_count, lines_of, parse_json

logger = logging.getLogger(__name__)

# One NaN object for all: containers compare by identity first, so two runs with the same NaN have equal trajectories.
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
# What is the same however often a run is interrupted or resized; no key of it may depend on the machine.
_TRAJECTORY = ("step", "epoch", "samples", "tokens", "target_tokens", "loss", "grad_norm", "lr")
_BESIDE = ("step_seconds", "data_seconds", "tokens_per_second", "mfu", "memory_bytes", "windows_built", "skipped")


class JsonlTracker:
    """Writes both files. A write that fails raises `TrainingError`: a run without a record is not worth its time.

    The operating system has a line when the call returns, and the disk has it when `sync` returns. Every commit calls
    that first, so no committed checkpoint is ahead of its lines.
    """

    def __init__(self, directory: Path) -> None:
        self._metrics_path = directory / METRICS_FILE
        self._events_path = directory / EVENTS_FILE
        self._file: FileIO | None = None
        self._attempt = 0
        self._evaluated: set[tuple[int, str]] = set()

    def start(self, run: RunStart) -> None:
        """Opens `metrics.jsonl` after the line of step `resumed_from`, and removes all lines after that."""
        self._attempt = run.attempt
        try:
            self._metrics_path.parent.mkdir(parents=True, exist_ok=True)
            self._evaluated = cut(self._metrics_path, run.resumed_from)
            self._file = FileIO(self._metrics_path, "ab")
        except OSError as error:
            raise _cannot_write(self._metrics_path, error) from error

    def steps(self, metrics: Sequence[StepMetrics], world_size: int, attempt: int) -> None:
        self._append(_step_line(step, world_size, attempt) for step in metrics)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Leaves out values that are on record already: an attempt may repeat the evaluation at its checkpoint."""
        fresh = {key: value for key, value in values.items() if (step, key) not in self._evaluated}
        if fresh:
            self._evaluated |= {(step, key) for key in fresh}
            self._append([{"kind": "eval", "step": step, "values": fresh, "attempt": self._attempt}])

    def event(self, name: str, /, **fields: object) -> None:
        append_event(self._events_path, name, attempt=self._attempt, fields=fields)

    def state(self) -> dict[str, str]:
        return {}

    def finish(self, status: Status) -> None:
        self.sync()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, lines: Iterable[Mapping[str, object]]) -> None:
        assert self._file is not None, "steps and evaluations come between start and finish"
        try:
            _write_all(self._file, b"".join(_to_line(line) for line in lines))
        except OSError as error:
            raise _cannot_write(self._metrics_path, error) from error

    def sync(self) -> None:
        try:
            if self._file is not None:
                os.fsync(self._file.fileno())
            if self._events_path.exists():
                with FileIO(self._events_path, "ab") as events:
                    os.fsync(events.fileno())
        except OSError as error:
            raise _cannot_write(self._metrics_path, error) from error


def append_event(path: Path, name: str, *, attempt: int, fields: Mapping[str, object]) -> None:
    """Appends a line to an `events.jsonl`, with the time and without secrets. Any process may do so at any time."""
    line = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "attempt": attempt,
        "event": name,
        "fields": redact(dict(fields)),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Appended in one write, without a buffer: lines of several processes must not be mixed.
        with FileIO(path, "ab+") as file:
            # A line that a crash left unfinished must not swallow this one.
            torn = file.seek(0, os.SEEK_END) > 0 and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n"
            _write_all(file, b"\n" * torn + _to_line(line))
    except OSError as error:
        raise _cannot_write(path, error) from error


def cut(path: Path, last_step: int) -> set[tuple[int, str]]:
    """Removes every line after `last_step` (all of them for 0) and what a crash left unfinished, atomically.

    Returns the evaluations (step, key) that stay. The file is replaced even when nothing is cut: a process of an
    earlier attempt that is still alive then writes into a file that nobody reads.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    evaluated: set[tuple[int, str]] = set()
    num_steps = 0
    with temporary.open("wb") as output:
        for raw, line in _parsed(path):
            step = _step_of(line)
            if step is None or step > last_step or last_step == 0:
                continue
            num_steps += line["kind"] == "step"
            if line["kind"] == "eval":
                evaluated |= {(step, key) for key in line["values"]}
            output.write(raw + b"\n")
        output.flush()
        os.fsync(output.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)
    if num_steps != last_step:
        logger.warning("%s has %d lines for the first %d steps; the missing ones are lost", path, num_steps, last_step)
    return evaluated


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every line of a `metrics.jsonl`, steps and evaluations, except a last one that is still being written."""
    lines = []
    for raw, line in _parsed(path):
        if _step_of(line) is None:
            raise RaytuneError(f"{path} has a line that is neither a step nor an evaluation: {raw[:80]!r}")
        lines.append(_decode(line))
    return lines


def read_evaluations(path: Path, last_step: int) -> dict[int, dict[str, float]]:
    """The results of evaluations up to a step, by step."""
    found: dict[int, dict[str, float]] = {}
    for line in read_metrics(path):
        if line["kind"] == "eval" and line["step"] <= last_step:
            found.setdefault(line["step"], {}).update(line["values"])
    return found


def read_trajectory(path: Path) -> list[dict[str, Any]]:
    """What makes two runs equal, step by step: the "trajectory" of every step line, in the file's order."""
    return [line["trajectory"] for line in read_metrics(path) if line["kind"] == "step"]


def read_events(path: Path) -> list[dict[str, Any]]:
    """Every event on record, except lines that a crash left unfinished, and what is no event."""
    return [_decode(line) for _, line in _parsed(path) if _is_event(line)]


def _is_event(line: Any) -> bool:
    if not isinstance(line, dict) or not isinstance(line.get("event"), str):
        return False
    # The next attempt has the next number, which is part of the name of a directory.
    return is_count(line.get("attempt")) and line["attempt"] < 1 << 31 and isinstance(line.get("fields"), dict)


def _step_line(metrics: StepMetrics, world_size: int, attempt: int) -> dict[str, object]:
    return {
        "kind": "step",
        "trajectory": {name: getattr(metrics, name) for name in _TRAJECTORY},
        "world_size": world_size,
        "attempt": attempt,
        **{name: getattr(metrics, name) for name in _BESIDE},
    }


def _parsed(path: Path) -> Iterator[tuple[bytes, Any]]:
    """The lines and what they mean: None for one that is not JSON; an unfinished last line is left out."""
    if not path.exists():
        return
    try:
        for raw in lines_of(path):
            try:
                line = parse_json(raw, doubles=True)
            except ValueError:
                if raw.endswith(b"\n"):
                    yield raw.rstrip(b"\n"), None
                continue
            yield raw.rstrip(b"\n"), line
    except UnsoundError as error:
        raise ResumeError(f"{path} {error}: it is the record of the run, so move away what is there") from error


def _step_of(line: Any) -> int | None:
    try:
        step = line["trajectory"]["step"] if line["kind"] == "step" else line["step"]
        return step if isinstance(step, int) and line["kind"] in ("step", "eval") else None
    except (TypeError, KeyError):
        return None


def _to_line(value: object) -> bytes:
    text = json.dumps(_encode(value), allow_nan=False, default=_plain, ensure_ascii=False)
    return text.encode(errors="replace") + b"\n"


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
    """A scalar of an array library as a number, anything else as text."""
    item = getattr(value, "item", None)
    return _encode(item()) if callable(item) else str(value)


def _write_all(file: FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:  # an unbuffered write may take only a part, on a disk that is filling up
        view = view[file.write(view) :]


def _cannot_write(path: Path, error: OSError) -> TrainingError:
    return TransientError(
        f"{path} cannot be written: {error.strerror or error}. It is the record of the run, so training stops. "
        "Make room or make it writable; the same command then continues from the newest checkpoint."
    )
