"""The log of a sweep: the truth about it, from which everything else follows.

A line for each entry, only ever added to (but that a metric may be set right until something follows from it), without
times or paths: two sweeps that went the same way have equal logs. A crash may leave half a line, which is cut. Times
are in `times.jsonl` beside it, which nothing is decided by.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from raytune_fsdp.base.durable import open_private, replace_durably, sync_directory
from raytune_fsdp.base.errors import ResumeError, TransientError
from raytune_fsdp.base.untrusted import (
    MIB,
    UnsoundError,
    check_format,
    is_count,
    open_regular,
    read_file,
    reason,
    shown,
)
from raytune_fsdp.record.lines import from_bytes, is_number, to_bytes

FORMAT = 1
LOG_FILE, TIMES_FILE = "log.jsonl", "times.jsonl"
_MOST_BYTES = 256 * MIB
"""The largest log that is read: 1,000 trials of 1,000 evaluations have 60 MB."""


@dataclass(frozen=True, slots=True)
class SweepBegun:
    """The first entry (`sweep`): what of sweep.yaml decides how the sweep goes."""

    decides: Mapping[str, Any]
    """`space`, `search`, `scheduler`, `metric` and `seeds`, as in sweep.yaml."""
    base: Mapping[str, Any]
    """What the base says of what trials learn (`tune/space.py:base_of`)."""
    highest: bool
    """Whether the highest value is the best."""
    threads: int | None = None
    """On how many threads each rank computes, where trials share out the cores of a machine: it decides how products
    are added up. None: what starts a rank says it."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A run of the sweep (`trial`): the base with some changes."""

    number: int
    """Counts the sweep's trials from 0."""
    changes: Mapping[str, Any]
    """Values by the dotted names of their fields (or `recipe`)."""
    variant: int
    """Which changes these are: trials that differ in nothing but their seed have the same. Without seeds the number."""
    seed: int | None = None
    """Which of the sweep's seeds, from 0: it is added to the base's `run.seed`. None: the sweep has one seed."""


@dataclass(frozen=True, slots=True)
class Value:
    """What an evaluation of a trial has measured (`value`)."""

    trial: int
    step: int
    value: float
    """The value of the sweep's metric; NaN if it is missing or not finite."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Which trials go on beyond a step and which do not (`decision`)."""

    step: int
    on: tuple[int, ...]
    stop: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draw:
    """A member of a population goes on as a fork of another one (`draw`)."""

    trial: int
    step: int
    source: int
    """The trial whose checkpoint of this step it goes on from."""
    changes: Mapping[str, Any]
    """All changes of the base that it then trains with."""


@dataclass(frozen=True, slots=True)
class TrialEnded:
    """A trial's newest run has ended (`ended`): complete, or failed for good."""

    trial: int
    step: int
    """Its last step."""
    error: str | None = None
    """Why it failed, in one line. None: it is complete."""


Entry = SweepBegun | Trial | Value | Decision | Draw | TrialEnded


_KINDS: dict[str, type[Entry]] = {
    "sweep": SweepBegun,
    "trial": Trial,
    "value": Value,
    "decision": Decision,
    "draw": Draw,
    "ended": TrialEnded,
}
_NAMES = {entry: kind for kind, entry in _KINDS.items()}


def line_of(entry: Entry) -> bytes:
    """Return the line of an entry."""
    line = {"kind": _NAMES[type(entry)], **({"format": FORMAT} if isinstance(entry, SweepBegun) else {})}
    return to_bytes({**line, **{each.name: getattr(entry, each.name) for each in fields(entry)}})


class SweepLog:
    """The file of a sweep's log."""

    def __init__(self, path: Path) -> None:
        """Read the log, if there is one, and cut a last line that a crash left unfinished.

        Raises ResumeError if it is not a log of this version.
        """
        self.path = path
        self.entries, self._size, torn = _read(path)
        if torn:
            self._cut()

    def append(self, entries: Iterable[Entry]) -> None:
        """Add entries, and wait until storage has them. After a crash the last of them may be missing.

        Raises TransientError if they cannot be written.
        """
        added = list(entries)
        if not added:
            return
        content = b"".join(map(line_of, added))
        with writing(self.path):
            begins = not self.path.exists()
            try:
                with open(self.path, "ab", opener=open_own) as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError:
                if self.path.exists():
                    self._cut()  # what comes next must not follow half a line
                raise
            if begins:
                sync_directory(self.path.parent)
        self.entries += added
        self._size += len(content)

    def begin_again(self, begun: SweepBegun) -> None:
        """Replace the first entry, from which nothing has followed. Raises TransientError if it cannot be written."""
        entries = [begun, *self.entries[1:]]
        content = b"".join(map(line_of, entries))
        with writing(self.path):
            replace_durably(self.path, content.decode(), private=True)
        self.entries, self._size = entries, len(content)

    def _cut(self) -> None:
        with os.fdopen(open_regular(self.path, write=True), "r+b") as file:
            file.truncate(self._size)
            os.fsync(file.fileno())


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say in one line that a file of a sweep cannot be written, if so. Raises TransientError."""
    try:
        yield
    except OSError as error:
        raise TransientError(
            f"{path} cannot be written: {error.strerror or error}: make room or make it writable; the same command "
            "goes on"
        ) from error


def open_own(name: str, flags: int) -> int:
    """Open a file of a sweep's directory to add to it, for `open`. Another user may have made a link there, which could
    lead anywhere, or a pipe that nobody reads."""
    return open_private(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def read_log(path: Path) -> list[Entry]:
    """Return the entries of a log, without changing it: for whoever looks on. Raises ResumeError as `SweepLog` does."""
    return _read(path)[0]


def _read(path: Path) -> tuple[list[Entry], int, bool]:
    """Return the entries of a log, the bytes of their lines, and whether an unfinished line follows."""
    try:
        content = read_file(path, limit=_MOST_BYTES)
    except FileNotFoundError:
        return [], 0, False
    except (OSError, UnsoundError) as error:
        raise ResumeError(f"{path}: {reason(error)}: {WAY_OUT}") from error
    # A crash of the machine may leave zero bytes where the last lines belong. With lines after them they are none.
    zeros = content.find(0)
    torn = zeros >= 0 and not content[zeros:].strip(b"\0\n")
    end = content.rfind(b"\n", 0, zeros if torn else len(content)) + 1
    entries: list[Entry] = []
    trials = 0
    for number, raw in enumerate(content[:end].split(b"\n")[:-1], 1):
        try:
            entry = _entry(raw, first=not entries, trials=trials)
        except ValueError as error:
            raise ResumeError(f"{path}: line {number} {reason(error).removeprefix('it ')}: {WAY_OUT}") from error
        entries.append(entry)
        trials += isinstance(entry, Trial)
    return entries, end, end < len(content)


WAY_OUT = "put back the log as the sweep wrote it, or give the sweep another name"


def _entry(raw: bytes, *, first: bool, trials: int) -> Entry:
    """Return the entry of a line: with the fields of its kind, in its place, and about one of the trials before it."""
    line = from_bytes(raw)
    kind = line.pop("kind", None) if isinstance(line, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise UnsoundError("is not an entry of a sweep's log")
    if (kind == "sweep") != first:
        raise UnsoundError(f"has the kind {kind}, but the entry of the sweep itself comes first, and once")
    if kind == "sweep":
        check_format(line.pop("format", None), FORMAT)
    known = {each.name for each in fields(_KINDS[kind])}
    if set(line) != known:
        raise UnsoundError(f"has the fields {shown(sorted(map(str, line)))}; {kind} has {', '.join(sorted(known))}")
    for name, value in line.items():
        if not _CHECKS[name](value):
            raise UnsoundError(f"has {name}={shown(value)}, which no {kind} has")
    about = [line[name] for name in ("trial", "source") if name in line]
    about += [*line.get("on", ()), *line.get("stop", ())]
    if kind == "trial" and line["number"] != trials:
        raise UnsoundError(f"is trial {line['number']}, but the next one is {trials}")
    if strange := [trial for trial in about if trial >= trials]:
        raise UnsoundError(f"is about trial {strange[0]}, which is on no line before it")
    if kind == "decision":
        line |= {"on": tuple(line["on"]), "stop": tuple(line["stop"])}
    if kind == "value":
        line["value"] = float(line["value"])
    return _KINDS[kind](**line)


def _is_map(value: object) -> bool:
    return isinstance(value, dict)


def _are_trials(value: object) -> bool:
    return isinstance(value, list) and all(map(is_count, value))


_CHECKS: dict[str, Callable[[object], bool]] = {
    "decides": _is_map,
    "base": _is_map,
    "highest": lambda value: isinstance(value, bool),
    "threads": lambda value: value is None or is_count(value),
    "number": is_count,
    "changes": _is_map,
    "variant": is_count,
    "seed": lambda value: value is None or is_count(value),
    "trial": is_count,
    "step": is_count,
    "value": is_number,
    "on": _are_trials,
    "stop": _are_trials,
    "source": is_count,
    "error": lambda value: value is None or isinstance(value, str),
}
"""What a field of an entry may be."""


def trials_in(log: Iterable[Entry]) -> list[Trial]:
    """Return the trials on the log."""
    return [entry for entry in log if isinstance(entry, Trial)]


def draws_of(trial: int, log: Iterable[Entry], step: int | None = None) -> list[Draw]:
    """Return the forks that a trial has become, up to its newest run, or to that which has trained `step`."""
    # A fork after step N trains step N + 1 first; step N was its trial's older run's.
    draws = [entry for entry in log if isinstance(entry, Draw) and entry.trial == trial]
    return draws if step is None else [draw for draw in draws if draw.step < step]


def changes_now(trial: Trial, log: Iterable[Entry], step: int | None = None) -> Mapping[str, Any]:
    """Return what a trial changes of the base, in its newest run, or in that which has trained `step`."""
    draws = draws_of(trial.number, log, step)
    return draws[-1].changes if draws else trial.changes


def generation(trial: int, log: Iterable[Entry], step: int | None = None) -> int:
    """Return which of its runs is the newest of a trial, or that which has trained `step`: 0 before any fork."""
    return len(draws_of(trial, log, step))
