"""Watch ranks between joining and their second step: none may get on for too long, but all may take their time.

The first step compiles and connects, and a model may be downloaded before it: nobody knows how long that takes. A rank
that gets on beats, reaches a phase, or reads; one that does is enough, as the others may be waiting for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytune_fsdp.launch.ray.board import Beat, Joined, beat_seconds
from raytune_fsdp.launch.ray.watch.listening import Listening

_READ_BYTES = 64 << 10
"""A process that waits reads less than this between two beats, if anything."""
_SILENT_BEATS = 3.0
"""A rank is silent once it has missed this many beats."""
_WORD_SECONDS = 60.0
_PHASES = {"step": "first step", "training": "after its first step"}


@dataclass(slots=True)
class _Known:
    joined: Joined
    heard: float
    """When the rank said something the last time."""
    last: Beat | None = None


class Starting:
    """Watches the ranks of one attempt until their second step."""

    def __init__(self, minutes: float, clock: Listening) -> None:
        self._seconds = 60 * minutes
        self._clock = clock
        self._known: dict[int, _Known] = {}
        self.got_on = self._began = self._next_word = 0.0
        """When a rank got on the last time, by the clock."""

    def joined(self, notice: Joined) -> None:
        now = self._clock.now
        if not self._known:
            self._began, self._next_word = now, now + _WORD_SECONDS
        self._known[notice.rank] = _Known(notice, now)
        self.got_on = now

    def has(self, rank: int) -> bool:
        """Return whether the rank has joined."""
        return rank in self._known

    def heard(self, beat: Beat) -> None:
        known = self._known[beat.rank]
        last, known.last = known.last, beat
        known.heard = self._clock.now
        if last is None or (beat.beats, beat.left) != (last.beats, last.left) or beat.read - last.read >= _READ_BYTES:
            self.got_on = known.heard

    def overdue(self) -> float | None:
        """Return the seconds in which no rank got on, if they are too many."""
        if not self._known:
            return None  # Ray Train waits for its workers, and the driver with it
        patience = max((known.last.patience_seconds for known in self._known.values() if known.last), default=0.0)
        silent = self._clock.now - self.got_on
        return silent if silent > self._seconds + patience else None

    def word(self, workers: int) -> str | None:
        """Return a line about who is waited for, once a minute."""
        now = self._clock.now
        if not self._known or now < self._next_word:
            return None
        self._next_word = now + _WORD_SECONDS
        still = now - self.got_on
        limit = f"; no rank has got on for {still:.0f} s, and {self._seconds:.0f} s are the most "
        return f"the ranks have been starting for {now - self._began:.0f} s: waiting for {self.waited_for(workers)}" + (
            f"{limit}(cluster.start_hang_minutes)" if still > _WORD_SECONDS / 2 else ""
        )

    def waited_for(self, workers: int) -> str:
        """Name the ranks that are not there, else those that are silent, else those that are furthest behind."""
        if missing := self._missing(workers):
            return f"{_ranks(missing)}, not there yet"
        if silent := self._silent():
            named = [known for rank, known in self._known.items() if rank in silent]
            quiet = self._clock.now - max(known.heard for known in named)
            return f"{self._who(silent)} ({_phases(named)}; not heard of for {quiet:.0f} s)"
        left = {rank: known.last.left if known.last else 1 << 30 for rank, known in sorted(self._known.items())}
        most = max(left.values())  # one that has said nothing is furthest behind
        behind = [rank for rank, phases in left.items() if phases == most]
        return f"{self._who(behind)} ({_phases([self._known[rank] for rank in behind])})"

    def suspect(self, workers: int) -> int | None:
        """Return the one rank that is not there or says nothing, while others do."""
        silent = self._missing(workers) or self._silent()
        return silent[0] if len(silent) == 1 < workers else None

    def _missing(self, workers: int) -> list[int]:
        return [rank for rank in range(workers) if rank not in self._known]

    def _silent(self) -> list[int]:
        now, world = self._clock.now, len(self._known)
        return [
            rank
            for rank, known in sorted(self._known.items())
            if now - known.heard > _SILENT_BEATS * beat_seconds(rank, world)
        ]

    def _who(self, ranks: Sequence[int]) -> str:
        if len(ranks) == len(self._known) > 1:
            return "all ranks"
        return _ranks(ranks) + (f" on {self._known[ranks[0]].joined.node}" if len(ranks) == 1 else "")


def _phases(ranks: Sequence[_Known]) -> str:
    found = dict.fromkeys(known.last.phase if known.last else "imports" for known in ranks)
    return ", ".join(_PHASES.get(phase, phase) for phase in found)


def _ranks(ranks: Sequence[int]) -> str:
    """Name ranks in short: `ranks 0-6, 9`."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    words = ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts)
    return f"rank{'s' * (len(ranks) > 1)} {words}"
