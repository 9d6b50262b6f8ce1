"""Write and read the run directory's own record, `metrics.jsonl` and `events.jsonl`: the truth about a run.

`metrics.jsonl` has exactly one line per optimizer step, in order, and a line per evaluation. `events.jsonl` only ever
grows, and other processes append to it, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from raytune_fsdp.base.durable import open_private, take_turn
from raytune_fsdp.base.errors import RaytuneError, ResumeError, TrainingError, TransientError
from raytune_fsdp.base.lease import Lease, TakenOverError
from raytune_fsdp.base.measured import StepMetrics
from raytune_fsdp.base.redaction import redact
from raytune_fsdp.base.untrusted import UnsoundError, is_count, lines_of, open_regular
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
from raytune_fsdp.record.tracker import RunStart, Status, Tracker

_STEP = b'{"kind": "step", "trajectory": {'
_TURN_SECONDS, _LOOK_SECONDS = 1.0, 0.01
"""How long an append waits for another one, which takes milliseconds."""


class _ReplacedError(TransientError):
    """Another file has the record's name, so what this attempt writes is read by nobody."""


class JsonlTracker(Tracker):
    """Writes both files. A write that fails raises `TrainingError`: training without a record is a waste of time.

    The operating system has a line when the call returns, and the disk has it when `sync` returns. Every commit calls
    `sync` first, so no committed checkpoint is ahead of its lines.
    """

    def __init__(self, directory: Path, lease: Lease | None = None) -> None:
        """`lease` is checked before anything is written: another command may own the run by now."""
        self._lease = lease
        self._metrics_path = directory / METRICS_FILE
        self._events_path = directory / EVENTS_FILE
        self._file: FileIO | None = None
        self._replaced = False
        """Whether a later attempt has begun: it has put a file of its own in the place of this one's."""
        self._attempt = 0
        self._evaluated: set[tuple[int, str]] = set()
        self.repaired: dict[str, object] = {}
        """What was mended at the start, as fields of an event: the problems, and where the broken file is."""

    def start(self, run: RunStart) -> None:
        """Remove all lines of `metrics.jsonl` after step `resumed_from`, and open it for appending."""
        if self._lease is not None:
            self._lease.check()
        self._attempt = run.attempt
        aside = self._metrics_path.with_name(f"{METRICS_FILE}.a{run.attempt}.damaged")
        try:
            self._metrics_path.parent.mkdir(parents=True, exist_ok=True)
            taken = truncate(self._metrics_path, run.resumed_from, aside=aside, begins_after=run.begins_after)
            self._file = FileIO(self._metrics_path, "ab", opener=open_private)
        except OSError as error:
            raise _cannot_write(self._metrics_path, error) from error
        self._evaluated = set(taken.evaluated)
        self.repaired = repair_event(taken.problems, aside)

    def steps(self, metrics: Sequence[StepMetrics], world_size: int, attempt: int) -> None:
        self._check_now_and_then()
        self._append(step_lines(metrics, world_size, attempt))

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values that are not on record: an attempt may repeat the evaluation at its checkpoint."""
        fresh = {key: value for key, value in values.items() if (step, key) not in self._evaluated}
        if fresh:
            self._evaluated |= {(step, key) for key in fresh}
            self._append([evaluation_line(step, fresh, self._attempt)])

    def event(self, name: str, /, **fields: object) -> None:
        self._check_now_and_then()
        append_event(self._events_path, name, attempt=self._attempt, fields=fields)

    def finish(self, status: Status) -> None:
        with suppress(TakenOverError, _ReplacedError):  # reported before, or too late to matter
            self.sync()
            if self._file is not None:
                with suppress(TransientError):  # a full disk: how the attempt ends is reported elsewhere, too
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
        """Return when all lines are on the disk. Here a commit also learns that the run is no longer this attempt's."""
        file = self._file
        try:
            if file is not None:
                os.fsync(file.fileno())
            if self._events_path.exists():
                with FileIO(self._events_path, "ab") as events:
                    os.fsync(events.fileno())
        except OSError as error:
            raise _cannot_write(self._metrics_path, error) from error
        if self._lease is not None:
            self._lease.check()  # last, as syncing may take long
        if file is not None:
            self._replaced = self._replaced or self._is_another(file)
        self._check_replaced()

    def _check_now_and_then(self) -> None:
        if self._lease is not None:
            self._lease.check_now_and_then()
        self._check_replaced()

    def _is_another(self, file: FileIO) -> bool:
        """Return whether a later attempt has begun. The lease is that of the command, with all its attempts.

        The command may believe that an attempt has ended whose processes it cannot reach, and start the next one.
        """
        try:
            # Opened, not only looked at: NFS remembers for a while which file had a name.
            there = open_regular(self._metrics_path)
        except (OSError, UnsoundError):  # a person has moved it, or storage does not answer: that is no attempt
            return False
        try:
            same = os.path.samestat(os.fstat(there), os.fstat(file.fileno()))
        finally:
            os.close(there)
        # Not by that alone: a person may have replaced the file, and some storage gives it another number each time.
        with suppress(RaytuneError, OSError):
            return not same and any(event["attempt"] > self._attempt for event in each_event(self._events_path))
        return False

    def _check_replaced(self) -> None:
        if self._replaced:
            raise _ReplacedError(
                f"{self._metrics_path} is not the file that attempt {self._attempt} writes any more: a later attempt "
                "goes on with the run; what is saved is saved, and this attempt writes nothing more; the same command "
                "continues from the newest checkpoint"
            )


def append_event(path: Path, name: str, *, attempt: int, fields: Mapping[str, object]) -> None:
    """Append a line to an `events.jsonl`, with the time and without secrets. Any process may do so at any time."""
    _append_line(path, {
        "time": now(),
        "attempt": attempt,
        "event": name,
        "fields": redact(dict(fields)),
    })  # fmt: skip


def append_evaluation(path: Path, step: int, values: Mapping[str, float], *, attempt: int) -> None:
    """Append a line to an `evaluations.jsonl`, which the driver writes, in the order of the steps."""
    _append_line(path, evaluation_line(step, values, attempt))


def _append_line(path: Path, line: Mapping[str, object]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Append in one write, without a buffer: lines of several processes must not be mixed.
        with FileIO(path, "ab+", opener=open_private) as file:
            # On NFS each node finds the end of the file by itself: lines that two nodes append at once would take the
            # same place.
            take_turn(file.fileno(), _TURN_SECONDS, _LOOK_SECONDS)
            # A line that a crash left unfinished must not swallow this one.
            torn = file.seek(0, os.SEEK_END) > 0 and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n"
            _write_all(file, b"\n" * torn + to_bytes(line))
    except OSError as error:
        raise _cannot_write(path, error) from error


def repair_event(problems: Sequence[str], aside: Path) -> dict[str, object]:
    """Return the fields of the event that says what was mended in a record; empty if nothing was."""
    return {"problems": [*problems], "kept": str(aside) if aside.exists() else None} if problems else {}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return every line of a `metrics.jsonl`, steps and evaluations, except a last one that is still being written."""
    return [_known(path, raw) for raw in _finished(path)]


def each_line_of(run_dir: Path) -> Iterator[dict[str, Any] | None]:
    """Yield steps and evaluations of a run: first the ranks' lines, then evaluations that other processes measured.

    Yields None for a line that is neither.
    """
    yield from each_line(run_dir / METRICS_FILE)
    yield from each_line(run_dir / EVALUATIONS_FILE)


def each_line(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield lines one at a time, so that a million take no memory; None for one that is neither step nor evaluation."""
    return map(read_line, _finished(path))


def read_evaluations(path: Path, last_step: int) -> dict[int, dict[str, float]]:
    """Return the results of evaluations up to a step, by step."""
    found: dict[int, dict[str, float]] = {}
    for raw in _finished(path):
        if raw.startswith(b'{"kind": "step"'):  # most lines, so do not parse them
            continue
        line = _known(path, raw)
        if line["kind"] == "eval" and line["step"] <= last_step:
            found.setdefault(line["step"], {}).update(line["values"])
    return found


def all_evaluations(run_dir: Path, last_step: int = (1 << 63) - 1) -> dict[int, dict[str, float]]:
    """Return what was measured up to a step, in training and later, in the order of the steps."""
    found = read_evaluations(run_dir / METRICS_FILE, last_step)
    for step, values in read_evaluations(run_dir / EVALUATIONS_FILE, last_step).items():
        found.setdefault(step, {}).update(values)
    return dict(sorted(found.items()))


def read_step(path: Path, step: int) -> dict[str, Any] | None:
    """Return the line of a step; None if it is not on record."""
    for raw in _finished(path):
        known = WHOLE_STEP.fullmatch(raw)
        if known is not None and int(known[1]) != step:  # most lines, so do not parse them
            continue
        line = _known(path, raw)
        if line["kind"] == "step" and line["trajectory"]["step"] == step:
            return line
    return None


def steps_after(path: Path, step: int) -> list[dict[str, Any]]:
    """Return what is on record of the steps after this one, an entry for each attempt that has trained some of them.

    Each has the fields of `names.CUT`. Steps of which the attempt is not on record are those of attempt 0.
    """
    found: dict[int, dict[str, Any]] = {}
    for raw in _finished(path):
        known = WHOLE_STEP.fullmatch(raw)
        if known is not None and int(known[1]) <= step:  # most lines, so do not parse them
            continue
        line = read_line(raw)
        if line is not None and line["kind"] == "step" and (number := line["trajectory"]["step"]) > step:
            attempt = line["attempt"] if is_count(line.get("attempt")) else 0
            of = found.setdefault(attempt, {"attempt": attempt, "steps": 0, "seconds": 0.0})
            of |= {"last": number, "until": line["time"] if isinstance(line.get("time"), str) else None}
            of["steps"], of["seconds"] = of["steps"] + 1, round(of["seconds"] + metrics_of(line).step_seconds, 6)
    return list(found.values())


def read_trajectory(path: Path) -> list[dict[str, Any]]:
    """Return the "trajectory" of every step line, in the file's order. Two runs are equal if these are."""
    return [line["trajectory"] for line in read_metrics(path) if line["kind"] == "step"]


def raw_steps(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yield the bytes of the trajectory and the whole line of every step. Equal bytes are equal trajectories.

    Nothing is parsed: comparing two records of 100,000 steps takes 0.3 s; it would take 2 s with parsing.
    """
    for raw in _finished(path):
        if raw.startswith(_STEP):
            # In the form of `step_lines`, a trajectory has no braces inside.
            yield raw[len(_STEP) : raw.find(b"}") + 1], raw
        elif b'"step"' in raw and b'"trajectory"' in raw:
            yield raw, raw


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return every event on record, except lines that a crash left unfinished, or that we have not written."""
    return list(each_event(path))


def each_event(path: Path) -> Iterator[dict[str, Any]]:
    """Yield events one at a time."""
    return (event for event in map(event_of, _finished(path)) if event is not None)


def event_of(raw: bytes) -> dict[str, Any] | None:
    """Parse a line of `events.jsonl`; None if it is not an event."""
    line = from_bytes(raw)
    known = (
        isinstance(line, dict)
        and isinstance(line.get("event"), str)
        # Bounded, because the next attempt has the next number, which is part of a directory's name.
        and is_count(line.get("attempt"))
        and line["attempt"] < 1 << 31
        and isinstance(line.get("fields"), dict)
    )
    return line if known else None


def _finished(path: Path) -> Iterator[bytes]:
    """Yield the lines, except a last one that is still being written."""
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
