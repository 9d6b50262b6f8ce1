"""The log of a sweep: the truth about it, from which everything else follows.

A line for each entry, only ever added to, without times or paths: two sweeps that went the same way have equal logs. A
crash may leave half a line, which is cut. Times are in `times.jsonl` beside it, which nothing is decided by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
LOG_FILE, TIMES_FILE = "log.jsonl", "times.jsonl"


@dataclass(frozen=True, slots=True)
class SweepBegun:
    """The first entry (`sweep`): what of sweep.yaml decides how the sweep goes."""

    decides: Mapping[str, Any]
    """`space`, `search`, `scheduler`, `metric` and `seeds`, as in sweep.yaml."""
    highest: bool
    """Whether the highest value is the best."""


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


class SweepLog:
    """The file of a sweep's log."""

    def __init__(self, path: Path) -> None:
        """Read the log, if there is one, and cut a last line that a crash left unfinished.

        Raises ResumeError if it is not a log of this version.
        """
        raise NotImplementedError

    @property
    def entries(self) -> Sequence[Entry]:
        raise NotImplementedError

    def append(self, entries: Iterable[Entry]) -> None:
        """Add entries, and wait until storage has them. Entries of one call are there all or in part, from the first."""
        raise NotImplementedError


def read_log(path: Path) -> list[Entry]:
    """Return the entries of a log, without changing it: for whoever looks on. Raises ResumeError as `SweepLog` does."""
    raise NotImplementedError


def trials_in(log: Iterable[Entry]) -> list[Trial]:
    """Return the trials on the log."""
    return [entry for entry in log if isinstance(entry, Trial)]


def changes_now(trial: Trial, log: Iterable[Entry], step: int | None = None) -> Mapping[str, Any]:
    """Return what a trial changes of the base, in its newest run, or in that which had trained `step`."""
    raise NotImplementedError


def generation(trial: int, log: Iterable[Entry], step: int | None = None) -> int:
    """Return which of its runs is the newest of a trial, or that which has trained `step`: 0 before any fork."""
    raise NotImplementedError
