"""Send the record on from a thread: training only says how far it is committed, and the thread sends what is missing.

A library that talks to a server may block for minutes, so the thread that trains never calls it. It does not hand over
the lines either: the sending thread reads them from the record. Only lines up to the newest checkpoint are sent, as a
resume cuts the others and few receivers take anything back.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from raytune_fsdp.base.batch import Progress
from raytune_fsdp.base.durable import replace_at_once
from raytune_fsdp.base.errors import in_one_line
from raytune_fsdp.base.redaction import redact_text
from raytune_fsdp.base.untrusted import LINE_BYTES, NULS, read_file, reason
from raytune_fsdp.plan.run_dir import EVALUATIONS_FILE, METRICS_FILE
from raytune_fsdp.record.lines import is_number, read_line, step_of
from raytune_fsdp.record.names import SAVED
from raytune_fsdp.record.tracker import RunStart, Status, Tracker

logger = logging.getLogger(__name__)

# A cursor into `metrics.jsonl`: how far a tracker has sent it, and the lines that come next.


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A place between two lines: after all lines of the steps before `step`, and the first `lines` of that step.

    Not a number of bytes: a resume may cut lines that were sent, and they are then written again.
    """

    step: int = 0
    lines: int = 0


@dataclass(frozen=True, slots=True)
class Sent:
    """How far a record has been sent, as the receiver keeps it."""

    place: Position = Position()
    highest: int = -1
    """The highest step of which the receiver may have points that this cursor does not know of: the run went back
    behind what had been sent, or was begun by a version without cursors."""

    def to_text(self) -> str:
        return json.dumps({"step": self.place.step, "lines": self.place.lines, "highest": self.highest})

    @classmethod
    def from_text(cls, text: str | None) -> Sent | None:
        """Read a cursor; None if there is none, or if it was not written here."""
        try:
            found = json.loads(text or "")
            numbers = [found[key] for key in ("step", "lines", "highest")]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        return (
            cls(Position(*numbers[:2]), numbers[2]) if all(type(n) is int and is_number(n) for n in numbers) else None
        )


class RecordReader:
    """Reads a record, which may still be growing, from a given place."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._place = Position()

    def seek(self, place: Position) -> None:
        """Go to a place. A binary search finds its step, so the lines before are not read."""
        self._place = place
        if self._file is None:
            if not self._path.exists():
                return
            self._file = self._path.open("rb")
        self._place = Position(place.step)
        self._file.seek(_first_of(self._file, place.step))
        for _ in range(place.lines):
            if next(self.lines(place.step), None) is None:
                break

    def lines(self, last_step: int) -> Iterator[tuple[Position, dict[str, Any]]]:
        """Yield the next finished lines up to a step, each with the place after it. A later call goes on from there."""
        if self._file is None:
            self.seek(self._place)
        if self._file is None:
            return
        nuls = 0
        while True:
            offset = self._file.tell()
            raw = self._file.readline(LINE_BYTES)
            line = read_line(raw) if raw.endswith(b"\n") else None
            if line is None and raw.endswith(b"\n") and (nuls := nuls + raw.count(0)) <= NULS:
                continue  # not one of ours: the repair at the start of the next attempt reports it
            if line is None or step_of(line) > last_step:
                self._file.seek(offset)
                return
            step = step_of(line)
            self._place = Position(step, self._place.lines + 1 if step == self._place.step else 1)
            yield self._place, line


def _first_of(file: BinaryIO, step: int) -> int:
    """Return where the first line of a step (or of the next one on record) begins. Lines are in the order of steps."""
    low, high = 0, file.seek(0, os.SEEK_END)
    while low < high:  # the line begins between the two
        middle = (low + high) // 2
        after, found = _line_after(file, middle, high)
        if found is not None and found < step:
            low = after
        else:
            high = middle
    return low  # always where a line ends, if `high` may be anywhere in one


def _line_after(file: BinaryIO, offset: int, end: int) -> tuple[int, int | None]:
    """Find the first line of ours that begins between an offset and the end; return where it ends, and its step."""
    file.seek(max(0, offset - 1))
    # First skip the rest of the line that the byte before the offset belongs to.
    nuls = file.readline(LINE_BYTES).count(0) if offset > 0 else 0
    while file.tell() < end and nuls <= NULS:
        raw = file.readline(LINE_BYTES)
        line = read_line(raw)
        if line is not None:
            return file.tell(), step_of(line)
        nuls += raw.count(0)
    return end, None


@contextmanager
def muted(*names: str) -> Iterator[None]:
    """Drop the messages of these loggers in the calling thread, except errors. No level or handler changes."""
    thread = threading.get_ident()

    def passes(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.levelno >= logging.ERROR

    loggers = [logging.getLogger(name) for name in names]
    for each in loggers:
        each.addFilter(passes)
    try:
        yield
    finally:
        for each in loggers:
            each.removeFilter(passes)


MAX_PAUSE_SECONDS = 60.0  # pauses after failures double from two seconds up to this
LAST_PAUSES_SECONDS, LAST_TRIES = 1.0, 5  # after the end of a run
ALL = 2**62  # a step that no run reaches


class Follower(Tracker, ABC):
    """Sends the record from its own thread. Never raises, and waits only in `finish`.

    `finish` waits for `finish_seconds` at most, and reports to `progress` how far it is.
    """

    receiver = ""
    """The receiver's name, for messages."""
    noisy: Sequence[str] = ()
    """Loggers of its libraries that say nothing useful."""
    page: str | None = None
    """Where its pages show the run, after the address of the server; None where that is not known."""

    def __init__(self, directory: Path, *, finish_seconds: float = 30.0, progress: Progress | None = None) -> None:
        self._directory = directory
        self._finish_seconds = finish_seconds
        self._progress = progress
        self._start = RunStart(name="", attempt=0)
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        # What training says to the thread, guarded by `_changed`.
        self._committed = -1
        self._happened = False
        """Whether there was an event since the thread last asked."""
        self._status: Status = "finished"
        self._closed = False
        self._abandoned = False
        # Used by the thread alone.
        self._reader = RecordReader(directory / METRICS_FILE)
        self._ended = False
        self._problem = ""

    def start(self, run: RunStart) -> None:
        self._start = run
        committed = run.resumed_from if run.committed is None else run.committed
        self._committed = committed or -1  # at step 0 nothing is committed: an evaluation there may come again
        self._thread = threading.Thread(target=self._work, name=self.receiver.lower(), daemon=True)
        self._thread.start()

    def event(self, name: str, /, **fields: object) -> None:
        """Wake the thread. After a commit it may send the lines up to it; other events it reads from the record."""
        with self._changed:
            self._happened = True
            if name == SAVED and isinstance(step := fields.get("step"), int):
                self._committed = max(self._committed, step)
            self._changed.notify_all()

    def finish(self, status: Status) -> None:
        """Send the rest and the status within the deadline, and report what is left."""
        if self._thread is None or self._closed or self._abandoned:
            return
        if status == "handed_over":
            # The run goes on at the receiver, too: the next attempt sends what is left, and a node may be gone in
            # seconds.
            with self._changed:
                self._abandoned = True
                self._changed.notify_all()
            return
        with self._changed:
            self._status = status
            if status == "finished":
                # No line of a run that has reached its end will be cut. The uncommitted lines of a failed run will be:
                # if they were sent, the receiver would have them twice when the run continues.
                self._committed = ALL
            self._closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + self._finish_seconds
        while self._thread.is_alive() and (left := deadline - time.monotonic()) > 0:
            self._thread.join(min(0.5, left))
            if self._progress is not None and self._thread.is_alive():
                self._progress(f"steps sent to {self.receiver}", *self._reached())
        self._abandoned = not self._ended
        if self.unsent is not None and not self._start.over:  # if it is over, the command reports it
            self._say_unsent(self.unsent)

    @property
    def unsent(self) -> str | None:
        """After `finish`: a sentence about what the receiver lacks; None if it has everything."""
        because = f" ({self._problem[:200]})" if self._problem else ""  # some errors quote half of a library
        return None if self._ended else f"{self.place} {self._unsent_steps()}{because}; the same command sends the rest"

    @property
    def place(self) -> str:
        """The receiver and where it is, for messages."""
        return self.receiver

    @abstractmethod
    def _sent_steps(self) -> int:
        """Return the last step that the receiver has."""

    @abstractmethod
    def _advance(self) -> None:
        """Do the next thing, or wait until there is one; set `_ended` when all is done. May block or raise."""

    def _say_unsent(self, unsent: str) -> None:
        logger.warning("%s", unsent)

    def _reached(self) -> tuple[int, int]:
        """Return the last step that the receiver has, and the last one that it may have."""
        total = self._start.total_steps
        wanted = max(0, self._committed if total is None else min(self._committed, total))
        return min(self._sent_steps(), wanted), wanted

    def _unsent_steps(self) -> str:
        sent, wanted = self._reached()
        return f"has {sent:,} of {wanted:,} steps of this run" if sent < wanted else "does not know how this run ended"

    # ---- from here on: what the thread does ----

    def _work(self) -> None:
        failures = last_tries = 0
        with muted(*self.noisy):
            while not self._ended and not self._abandoned:
                try:
                    self._advance()
                    failures, last_tries, self._problem = 0, 0, ""
                except Exception as error:  # foreign code; whatever it raises must not reach training
                    failures += 1
                    self._failed()
                    self._problem = redact_text(in_one_line(error))
                    if failures == 1:
                        logger.warning("%s: %s", self.place, self._problem)
                    if self._closed:
                        last_tries += self._is_a_try(error)
                        if last_tries == LAST_TRIES and not self._start.over:
                            return  # the command tries again later, when the ranks no longer hold their devices
                        time.sleep(LAST_PAUSES_SECONDS)
                    self._pause(min(2.0 ** min(failures, 10), MAX_PAUSE_SECONDS))

    @abstractmethod
    def _failed(self) -> None:
        """Prepare for another try: `_advance` has raised."""

    def _is_a_try(self, error: Exception) -> bool:
        """Return whether a failure counts as one of the last tries."""
        return True

    def _pause(self, seconds: float) -> None:
        """Wait for some seconds, or until the run has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._abandoned, timeout=seconds)

    def _wait(self, committed: int, seconds: float | None = None) -> None:
        """Wait for another commit, an event or the end of the run; for `seconds` at most."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._abandoned or self._happened or self._committed != committed,
                timeout=seconds,
            )


class Copy(Follower):
    """A follower whose receiver cannot say what it has: files in the run's directory keep how far it is."""

    def __init__(self, directory: Path, sent_file: Path, **kwargs: Any) -> None:
        super().__init__(directory, **kwargs)
        self._steps = _Part(self._reader, sent_file)
        measured = RecordReader(directory / EVALUATIONS_FILE)
        self._measured = _Part(measured, sent_file.with_name(f"{sent_file.name}.evaluations"))
        self._late_at = 0
        """The last step at which a late evaluation was written, or where writing began."""
        self._is_open = False

    @abstractmethod
    def _open(self, step: int) -> None:
        """Begin to write with this step, of which the receiver may have something already.

        Called at the start, and again after a failure.
        """

    @abstractmethod
    def _write(self, place: Position, line: Mapping[str, Any]) -> None:
        """Take a line of the record. `place`: the one after it."""

    def _write_late(self, place: Position, line: Mapping[str, Any]) -> None:
        """Take an evaluation that was measured by another process while training went on, so later steps are written.

        One at most for every step that is written.
        """
        self._write(place, line)

    @abstractmethod
    def _flush(self) -> None:
        """Return when the receiver has the lines so far."""

    @abstractmethod
    def _close(self, status: Status) -> None: ...

    def _sent_steps(self) -> int:
        return self._steps.sent.step

    def _failed(self) -> None:
        self._is_open = False

    def _advance(self) -> None:
        with self._changed:
            committed, closed = self._committed, self._closed
            self._happened = False
        if not self._is_open:
            if self._start.over and not (self._steps.more(committed) or self._measured.more(ALL)):
                self._ended = closed  # nothing to send, so it need not be opened
                if not closed:
                    self._wait(committed)
                return
            # From the first line of the step: the receiver may have more than the place we kept, and nobody can remove
            # a part of a step there.
            step = min(self._steps.last_sent().step, max(committed, 0))
            self._open(step)
            self._steps.go_to(Position(step))
            self._late_at = step
            measured = self._measured.last_sent()
            self._measured.go_to(measured if measured.step < step else Position(step))
            self._is_open = True
        began = time.monotonic()
        copied = self._copy(self._steps, self._write, committed)
        if (self._steps.sent.step > self._late_at or self._start.over) and self._copy(
            self._measured, self._write_late, ALL, most=1
        ):
            copied, self._late_at = True, self._steps.sent.step
        if copied:
            # Pause for as long as sending took: training gets Python's lock for half of the time at least.
            self._pause(time.monotonic() - began)
        elif closed:
            self._close(self._status)
            self._ended = True
        else:
            self._wait(committed)

    def _copy(
        self, part: _Part, write: Callable[[Position, Mapping[str, Any]], None], last_step: int, most: int = ALL
    ) -> bool:
        """Copy what comes next, for a tenth of a second; return whether there was anything."""
        began, sent = time.monotonic(), part.sent
        for place, line in islice(part.reader.lines(last_step), most):
            write(place, line)
            sent = place
            if time.monotonic() > began + 0.1:
                break
        if sent == part.sent:
            return False
        self._flush()
        part.keep(sent)
        return True


class _Part:
    """A file that is copied, and how far it has been."""

    def __init__(self, reader: RecordReader, sent_file: Path) -> None:
        self.reader = reader
        self.sent = Position()
        self._sent_file = sent_file

    def last_sent(self) -> Position:
        with suppress(OSError, ValueError):
            sent = Sent.from_text(read_file(self._sent_file, limit=1024).decode())
            return sent.place if sent is not None else Position()
        return Position()

    def more(self, last_step: int) -> bool:
        """Return whether there are lines that were not sent."""
        self.go_to(self.last_sent())
        return next(self.reader.lines(last_step), None) is not None

    def go_to(self, place: Position) -> None:
        self.sent = place
        self.reader.seek(place)

    def keep(self, sent: Position) -> None:
        self._sent_file.parent.mkdir(parents=True, exist_ok=True)
        replace_at_once(self._sent_file, Sent(sent).to_text().encode())
        self.sent = sent


# The id by which a receiver knows a run, in a file of the run's directory.


def kept_id(file: Path) -> str:
    """Return the id; empty if there is none. A file without a usable id is set aside, or nothing more could be sent."""
    try:
        return read_file(file, limit=1024).decode().strip()
    except FileNotFoundError:
        return ""
    except ValueError as error:
        aside = file.with_name(f"{file.name}.damaged")
        os.replace(file, aside)
        logger.warning(
            "%s holds no id (%s): it is %s now, and the run gets a new one there", file, reason(error), aside.name
        )
        return ""
