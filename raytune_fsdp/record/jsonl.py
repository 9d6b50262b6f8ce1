"""The run directory's own record, `metrics.jsonl` and `events.jsonl`: the truth about a run.

`metrics.jsonl` has a line per optimizer step, exactly once and in order, and a line per evaluation. `events.jsonl` only
ever grows, and other processes append to it too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from raytune_fsdp.base.batch import StepMetrics
from raytune_fsdp.base.durable import open_private
from raytune_fsdp.base.errors import RaytuneError, ResumeError, TrainingError, TransientError
from raytune_fsdp.base.lease import Lease, TakenOverError
from raytune_fsdp.base.redaction import redact
from raytune_fsdp.base.untrusted import UnsoundError, is_count, lines_of
from raytune_fsdp.plan.run_dir import EVALUATIONS_FILE, EVENTS_FILE, METRICS_FILE
from raytune_fsdp.record import names
from raytune_fsdp.record.lines import (
    WHOLE_STEP,
    evaluation_line,
    from_bytes,
    metrics_of,
    now,
    read_line,
    step_lines,
    to_bytes,
)
from raytune_fsdp.record.repair import truncate
from raytune_fsdp.record.tracker import RunStart, Status

_STEP = b'{"kind": "step", "trajectory": {'


class JsonlTracker:
    """Writes both files. A write that fails raises `TrainingError`: a run without a record is not worth its time.

    The operating system has a line when the call returns, and the disk has it when `sync` returns. Every commit calls
    that first, so no committed checkpoint is ahead of its lines.
    """

    def __init__(self, directory: Path, lease: Lease | None = None) -> None:
        """`lease` is asked before anything is written: the run may be another command's by now."""
        self._lease = lease
        self._metrics_path = directory / METRICS_FILE
        self._events_path = directory / EVENTS_FILE
        self._file: FileIO | None = None
        self._attempt = 0
        self._evaluated: set[tuple[int, str]] = set()
        self.repaired: dict[str, object] = {}
        """What was mended at the start, as fields of the event: problems, and where the broken file is."""

    def start(self, run: RunStart) -> None:
        """Opens `metrics.jsonl` after the line of step `resumed_from`, and removes all lines after that."""
        if self._lease is not None:
            self._lease.check()
        self._attempt = run.attempt
        aside = self._metrics_path.with_name(f"{METRICS_FILE}.a{run.attempt}.damaged")
        try:
            self._metrics_path.parent.mkdir(parents=True, exist_ok=True)
            taken = truncate(self._metrics_path, run.resumed_from, aside=aside)
            self._file = FileIO(self._metrics_path, "ab", opener=open_private)
        except OSError as error:
            raise _cannot_write(self._metrics_path, error) from error
        self._evaluated = set(taken.evaluated)
        self.repaired = repair_event(taken.problems, aside)

    def steps(self, metrics: Sequence[StepMetrics], world_size: int, attempt: int) -> None:
        if self._lease is not None:
            self._lease.check_now_and_then()
        self._append(step_lines(metrics, world_size, attempt))

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Leaves out values that are on record already: an attempt may repeat the evaluation at its checkpoint."""
        fresh = {key: value for key, value in values.items() if (step, key) not in self._evaluated}
        if fresh:
            self._evaluated |= {(step, key) for key in fresh}
            self._append([evaluation_line(step, fresh, self._attempt)])

    def event(self, name: str, /, **fields: object) -> None:
        if self._lease is not None:
            self._lease.check_now_and_then()
        append_event(self._events_path, name, attempt=self._attempt, fields=fields)

    def state(self) -> dict[str, str]:
        return {}

    def finish(self, status: Status) -> None:
        with suppress(TakenOverError):  # said before, or too late to matter
            self.sync()
            if self._file is not None:
                with suppress(TransientError):  # a full disk: what ends the attempt is said elsewhere, too
                    self.event(names.ATTEMPT_ENDED, status=status)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, lines: Iterable[Mapping[str, object]]) -> None:
        assert self._file is not None, "steps and evaluations come between start and finish"
        try:
            _write_all(self._file, b"".join(map(to_bytes, lines)))
        except OSError as error:
            raise _cannot_write(self._metrics_path, error) from error

    def sync(self) -> None:
        """As above. Also where a commit learns that the run is not this command's any more."""
        try:
            if self._file is not None:
                os.fsync(self._file.fileno())
            if self._events_path.exists():
                with FileIO(self._events_path, "ab") as events:
                    os.fsync(events.fileno())
        except OSError as error:
            raise _cannot_write(self._metrics_path, error) from error
        if self._lease is not None:
            self._lease.check()  # last: what comes before may take long


def append_event(path: Path, name: str, *, attempt: int, fields: Mapping[str, object]) -> None:
    """Appends a line to an `events.jsonl`, with the time and without secrets. Any process may do so at any time."""
    _append_line(path, {
        "time": now(),
        "attempt": attempt,
        "event": name,
        "fields": redact(dict(fields)),
    })  # fmt: skip


def append_evaluation(path: Path, step: int, values: Mapping[str, float], *, attempt: int) -> None:
    """Appends a line to an `evaluations.jsonl`: what the driver has had measured, in the order of the steps."""
    _append_line(path, evaluation_line(step, values, attempt))


def _append_line(path: Path, line: Mapping[str, object]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Appended in one write, without a buffer: lines of several processes must not be mixed.
        with FileIO(path, "ab+", opener=open_private) as file:
            # A line that a crash left unfinished must not swallow this one.
            torn = file.seek(0, os.SEEK_END) > 0 and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n"
            _write_all(file, b"\n" * torn + to_bytes(line))
    except OSError as error:
        raise _cannot_write(path, error) from error


def repair_event(problems: Sequence[str], aside: Path) -> dict[str, object]:
    """The fields of the event that says what was mended in a record; empty if nothing was."""
    if not problems:
        return {}
    return {"problems": [*problems], "kept": str(aside) if aside.exists() else None}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every line of a `metrics.jsonl`, steps and evaluations, except a last one that is still being written."""
    return [_known(path, raw) for raw in _finished(path)]


def each_line_of(run_dir: Path) -> Iterator[dict[str, Any] | None]:
    """Steps and evaluations of a run: what the ranks have written, then what was measured beside them."""
    yield from each_line(run_dir / METRICS_FILE)
    yield from each_line(run_dir / EVALUATIONS_FILE)


def each_line(path: Path) -> Iterator[dict[str, Any] | None]:
    """The same lines one by one, so that a million of them take no memory; None for one that is neither."""
    return map(read_line, _finished(path))


def read_evaluations(path: Path, last_step: int) -> dict[int, dict[str, float]]:
    """The results of evaluations up to a step, by step."""
    found: dict[int, dict[str, float]] = {}
    for raw in _finished(path):
        if raw.startswith(b'{"kind": "step"'):  # most lines: they are not parsed
            continue
        line = _known(path, raw)
        if line["kind"] == "eval" and line["step"] <= last_step:
            found.setdefault(line["step"], {}).update(line["values"])
    return found


def read_step(path: Path, step: int) -> dict[str, Any] | None:
    """The line of a step; None if it is not on record."""
    for raw in _finished(path):
        known = WHOLE_STEP.fullmatch(raw)
        if known is not None and int(known[1]) != step:  # most lines: they are not parsed
            continue
        line = _known(path, raw)
        if line["kind"] == "step" and line["trajectory"]["step"] == step:
            return line
    return None


def seconds_after(path: Path, step: int) -> float:
    """How long the steps after this one have taken."""
    seconds = 0.0
    for raw in _finished(path):
        known = WHOLE_STEP.fullmatch(raw)
        if known is not None and int(known[1]) <= step:  # most lines: they are not parsed
            continue
        line = read_line(raw)
        if line is not None and line["kind"] == "step" and line["trajectory"]["step"] > step:
            seconds += metrics_of(line).step_seconds
    return seconds


def read_trajectory(path: Path) -> list[dict[str, Any]]:
    """What makes two runs equal, step by step: the "trajectory" of every step line, in the file's order."""
    return [line["trajectory"] for line in read_metrics(path) if line["kind"] == "step"]


def raw_steps(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Of every step line the bytes of its trajectory, and the whole line. Equal bytes are equal trajectories.

    Nothing is parsed: two records of 100,000 steps are compared in 0.3 s, and in 2 s where each line is.
    """
    for raw in _finished(path):
        if raw.startswith(_STEP):
            # As `step_lines` writes it: a trajectory has no braces inside.
            yield raw[len(_STEP) : raw.find(b"}") + 1], raw
        elif b'"step"' in raw and b'"trajectory"' in raw:
            yield raw, raw


def read_events(path: Path) -> list[dict[str, Any]]:
    """Every event on record, except lines that a crash left unfinished, and any that nobody here has written."""
    return list(each_event(path))


def each_event(path: Path) -> Iterator[dict[str, Any]]:
    """The same one by one."""
    return (event for event in map(event_of, _finished(path)) if event is not None)


def event_of(raw: bytes) -> dict[str, Any] | None:
    """A line of `events.jsonl`; None if it is not an event."""
    line = from_bytes(raw)
    if not isinstance(line, dict) or not isinstance(line.get("event"), str):
        return None
    # The next attempt has the next number, which is part of the name of a directory.
    known = is_count(line.get("attempt")) and line["attempt"] < 1 << 31 and isinstance(line.get("fields"), dict)
    return line if known else None


def _finished(path: Path) -> Iterator[bytes]:
    """The lines, but not a last one that is still being written."""
    if not path.exists():
        return
    try:
        for raw in lines_of(path):
            if raw.endswith(b"\n") or from_bytes(raw) is not None:
                yield raw
    except UnsoundError as error:
        raise ResumeError(f"{path} {error}: it is the record of the run, so move away what is there") from error


def _known(path: Path, raw: bytes) -> dict[str, Any]:
    line = read_line(raw)
    if line is None:
        raise RaytuneError(f"{path} has a line that is neither a step nor an evaluation: {raw[:80]!r}")
    return line


def _write_all(file: FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:  # an unbuffered write may take only a part, on a disk that is filling up
        view = view[file.write(view) :]


def _cannot_write(path: Path, error: OSError) -> TrainingError:
    return TransientError(
        f"{path} cannot be written: {error.strerror or error}. It is the record of the run, so training stops. "
        "Make room or make it writable; the same command then continues from the newest checkpoint."
    )
