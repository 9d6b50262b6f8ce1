"""Tell the driver every few seconds how far a rank is, from a thread that ends with the process."""

from __future__ import annotations

import time
from contextlib import suppress

import psutil

from raytune_fsdp.base.beat import pulse
from raytune_fsdp.base.threads import in_thread
from raytune_fsdp.launch.ray.board import Beat, Board, beat_seconds

_LOOK_SECONDS = 5.0
"""Seconds between two looks at what this process reads and computes."""
_LEAST_LOAD = 0.05
"""The share of a processor that a call which cannot beat uses at least while it gets on."""


class Beats:
    """The beats of one rank. Rank 0 sends them to the end of the attempt, the others to their second step."""

    def __init__(self, board: Board, rank: int, world: int) -> None:
        self._board, self._rank = board, rank
        self._seconds = beat_seconds(rank, world)
        self._left = ["imports", "model", "data", "step"]
        """The phases that are not finished."""
        self._first_step = 0
        self._looked = -_LOOK_SECONDS
        self._read = 0
        """Bytes that this process has read, without those of the looks themselves."""
        self._read_by_looks, self._seconds_of_looks = 0, 0.0
        """The cost of the looks: one at helpers reads about all processes of the machine, and that is no progress."""
        self._computed = 0
        """How often a call that cannot beat was seen to get on."""
        self._busy: tuple[float, float] | None = None
        """When such a call was last looked at, and the processor time that it had used by then."""

    def begin(self) -> None:
        in_thread(self._run, "pulse")

    def evaluates_first(self) -> None:
        """Note that an evaluation comes before the first step."""
        self._left.insert(self._left.index("step"), "evaluation")

    def reached(self, phase: str) -> None:
        """Say at once that this rank has finished the phase: it may be stopped before it beats in the next one."""
        if phase in self._left:
            self._left.remove(phase)
            self._board.tell(self.now())

    def _run(self) -> None:
        while self._rank == 0 or not self._trains():
            self._board.tell(self.now())
            time.sleep(self._seconds)

    def _trains(self) -> bool:
        """Return whether the second step has begun."""
        step = pulse().step
        self._first_step = self._first_step or step
        return step > self._first_step

    def now(self) -> Beat:
        """Return how far this rank is."""
        found, now = pulse(), time.monotonic()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self._look(now, found.computing > 0)
        left = tuple(self._left)
        return Beat(
            found.step,
            found.beats + self._computed,
            found.patience_seconds,
            rank=self._rank,
            at=now,
            phase=left[0] if left else "training",
            left=len(left),
            read=self._read,
        )

    def _look(self, now: float, computing: bool) -> None:
        """Look at what this process has read, and at whether a call that cannot beat has used the processor since the
        last look."""
        read, before, self._busy = _bytes_read(), self._busy, None
        self._read = read - self._read_by_looks
        if not computing:
            return
        began = time.thread_time()
        used = _processor_seconds()
        self._seconds_of_looks += time.thread_time() - began
        self._read_by_looks += _bytes_read() - read
        self._busy = now, used - self._seconds_of_looks
        if before is not None:
            self._computed += self._busy[1] - before[1] > _LEAST_LOAD * (now - before[0])


def _processor_seconds() -> float:
    """Return the processor time of this process and of those that it has started: compilers have helpers."""
    own, total = psutil.Process(), 0.0
    helpers: list[psutil.Process] = []
    with suppress(psutil.Error):
        helpers = own.children(recursive=True)
    for each in [own, *helpers]:
        with suppress(psutil.Error):
            total += sum(each.cpu_times()[:2])
    return total


def _bytes_read() -> int:
    """Return what this process has read, from files, connections, and mapped files as far as the system counts them."""
    with suppress(psutil.Error, OSError, AttributeError):  # not every system says it
        found = psutil.Process().io_counters()
        return int(found.read_chars + found.read_bytes)
    return 0
