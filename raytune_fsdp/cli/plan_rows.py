"""`raytune-fsdp plan` of a length in epochs: count the rows within ten seconds, or estimate from a part of them.

A process of its own counts: this one then needs no torch, and the time is up when the clock says so, whatever is being
read. What was built by then is in the cache: the same command goes on from there, and so does `data stats`. A file that
was being prepared is begun again.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, TYPE_CHECKING, Any

from raytune_fsdp.base.errors import ConfigError, RaytuneError
from raytune_fsdp.plan.counts import Census, GroupsOfSteps, WindowCounts

if TYPE_CHECKING:
    from raytune_fsdp.base.batch import Progress
    from raytune_fsdp.config import FinetuneConfig
    from raytune_fsdp.data.census import Places
    from raytune_fsdp.data.windows import Windows
    from raytune_fsdp.plan.plan import Plan

SECONDS = 10.0
"""How long the rows are counted."""
_STARTING = 60.0
"""How long the process that counts may take to begin: it imports torch, which a busy machine reads for many seconds."""
_ENDS_SECONDS = 2.0
"""How long it may take to end."""
_HOURS = ("hours", "gpu_hours", "price")
"""What a plan on GPUs says that depends on the length of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedRows:
    """The rows of a config's training data: all of them, or those that were read before the time was up."""

    census: Census
    """The packed samples of each epoch; where not all rows were read, as many as those that were read let expect."""
    read: int
    """Rows that were read."""
    rows: int
    """All rows of the epochs that differ from each other; of one epoch, if none do."""
    seconds: float
    groups: GroupsOfSteps | None = None
    """How many pairs, or judged answers, a step has; None: documents stand alone."""

    @property
    def estimated(self) -> bool:
        return self.read < self.rows

    def in_words(self, command: str) -> str:
        """Return a line for people. `command` counts all rows."""
        samples = f"{self.census.epochs[0]:,} packed samples an epoch"
        if not self.estimated:
            return f"{samples}: all {self.rows:,} rows were counted"
        return (
            f"about {samples}: estimated from {self.read:,} of {self.rows:,} rows, read in {self.seconds:.0f} s; "
            f"`{command}` counts all of them"
        )

    def as_data(self, resolved: Callable[[Census], Plan], fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return what was counted, and the names of those `fields` of a plan that rest on an estimate.

        These are the fields that another number of samples would change; `resolved` returns the plan for a number.
        """
        estimated = []
        if self.estimated:
            twice = replace(self.census, epochs=tuple(2 * samples for samples in self.census.epochs))
            now, then = (resolved(each).to_dict() for each in (self.census, twice))
            estimated = [name for name in now if now[name] != then[name]]
            for name in ("on_gpus", "search"):
                estimated += [f"{name}.{hours}" for hours in _HOURS if name in fields]
        rounded = round(self.seconds, 1)
        groups = {} if self.groups is None else {"groups_of_steps": asdict(self.groups)}
        return {
            **groups,
            "counted": {"rows": self.rows, "rows_read": self.read, "seconds": rounded, "estimated": estimated},
        }


def count_rows(
    config: FinetuneConfig, command: str, progress: Progress | None = None, *, instead: str = "give --samples N, or "
) -> CountedRows:
    """Count the rows of the training data, for at most SECONDS. `command`: what counts them without a limit. `instead`:
    what the caller's command can do without a count.

    Raises ConfigError if that cannot be done here, or if no row was read in time.
    """
    began = time.monotonic()
    seen, doing = _Seen(), "starting"
    with _counting(config) as (answers, said):
        limit = _STARTING
        if answers.poll(limit):
            began, limit = time.monotonic(), SECONDS
        while (left := began + limit - time.monotonic()) > 0 and answers.poll(left):
            try:
                found = answers.recv()
            except EOFError:
                said.seek(0)
                last = said.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
                found = RaytuneError(f"the process that counts has ended: {last[:300] or 'it said nothing'}")
            if isinstance(found, RaytuneError):
                raise ConfigError(
                    f"the length of train.epochs depends on the data, which could not be counted here "
                    f"({'; '.join(map(str, found.args))}): {instead}set train.max_steps"
                )
            if isinstance(found, CountedRows):
                return replace(found, seconds=time.monotonic() - began)
            if isinstance(found, _Seen):
                seen = found
            else:
                doing = f"{found[0]}: {found[1]:,} of {found[2]:,}"
                if progress is not None:
                    progress(*found)
    if not seen.rows:
        raise ConfigError(
            f"the length of train.epochs depends on the data, and {limit:g} s are too short to count it ({doing}): "
            f"`{command}` counts all of it, and this command knows it then; or {instead}set train.max_steps"
        )
    return seen.estimate(config.data.seq_len, time.monotonic() - began, config.train.global_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What the process has read so far."""

    rows: int = 0
    samples: int = 0
    groups: int = 0
    of_rows: tuple[int, ...] = ()
    """The rows of each epoch that differs from the others."""

    def estimate(self, seq_len: int, seconds: float, global_batch: int = 1) -> CountedRows:
        each = Fraction(self.samples, self.rows)
        epochs = tuple(max(1, round(each * rows)) for rows in self.of_rows)
        counted = Census(seq_len=seq_len, epochs=epochs)
        mean = self.groups / max(1, self.samples) * global_batch
        groups = GroupsOfSteps(mean=mean) if self.groups else None
        return CountedRows(census=counted, read=self.rows, rows=sum(self.of_rows), seconds=seconds, groups=groups)


@contextmanager
def _counting(config: FinetuneConfig) -> Iterator[tuple[Connection, IO[bytes]]]:
    """Have a process count while the context lasts. Yield what it sends, and the file of what it prints as errors."""
    ours, theirs = Pipe(duplex=False)
    code = f"from {__name__} import work; work({theirs.fileno()})"
    path = os.pathsep.join(sys.path)  # a job's copy of this package need not be installed
    with tempfile.TemporaryFile() as said, ours:
        with theirs:
            process = subprocess.Popen(  # -P: a file of the working directory is no module of ours or of Python's
                [sys.executable, "-P", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said,
                pass_fds=[theirs.fileno()], env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
            )  # fmt: skip
        try:
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin:  # if it has ended already, its file says why
                pickle.dump(config, process.stdin)
            yield ours, said
        finally:
            ours.close()  # so that a thread which prepares a file fails there, too, when it next tells how far it is
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process, which may first remove what it has begun to prepare, with those that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_ENDS_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def work(pipe: int) -> None:
    """Do the work of the process that counts."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was begun is removed
    answers = Connection(pipe, readable=False)
    config: FinetuneConfig = pickle.load(sys.stdin.buffer)
    from raytune_fsdp.launch.quiet import quiet

    quiet()
    try:
        answers.send(_count(config, answers.send))
    except RaytuneError as error:
        answers.send(error)


def _count(config: FinetuneConfig, tell: Callable[[object], None]) -> CountedRows:
    from raytune_fsdp.data.census import census, different_epochs, groups_of_steps
    from raytune_fsdp.run.prepare import open_as_run

    tell(_Seen())  # from now on the time counts
    _, train, _ = open_as_run(config, lambda *news: tell(news))
    epochs = config.train.epochs or 1.0
    of_rows = tuple(train.rows(epoch) for epoch in range(different_epochs(train, epochs)))

    def build(windows: Windows, places: Places) -> Iterator[tuple[WindowCounts, bool]]:
        return _spread(windows, places, _Seen(of_rows=of_rows), tell)

    counted = census(train, epochs, build=build)
    groups = groups_of_steps(train, config.run.seed, config.train.global_batch)
    return CountedRows(census=counted, read=sum(of_rows), rows=sum(of_rows), seconds=0.0, groups=groups)


def _spread(
    windows: Windows, places: Sequence[tuple[int, int]], seen: _Seen, tell: Callable[[object], None]
) -> Iterator[tuple[WindowCounts, bool]]:
    """Build windows from all parts of the data, so that the first ones are like the rest, and tell of each."""
    from raytune_fsdp.data.mixture import Permutation

    order = Permutation(len(places), key=0)
    found: dict[tuple[int, int], tuple[WindowCounts, bool]] = {}
    for number in range(len(places)):
        place = places[order(number)]
        window, built = windows.get(*place)
        found[place] = window.counts, built
        rows, groups = (sum(getattr(of, what) for of in window.counts.datasets) for what in ("rows", "groups"))
        seen = replace(
            seen, rows=seen.rows + rows, samples=seen.samples + window.counts.samples, groups=seen.groups + groups
        )
        tell(seen)
        tell(("counting the rows", number + 1, len(places)))
    for place in places:
        yield found[place]
