"""Watch whether the ranks of an attempt get on, from what the driver hears."""

from __future__ import annotations

from dataclasses import dataclass

from raytune_fsdp.config.sections.cluster import ClusterConfig
from raytune_fsdp.launch.ray.board import Beat, Joined
from raytune_fsdp.launch.ray.watch.hangs import Hang
from raytune_fsdp.launch.ray.watch.listening import Listening
from raytune_fsdp.launch.ray.watch.starting import Starting


@dataclass(frozen=True, slots=True)
class Stuck:
    """The finding that no rank gets on."""

    words: str
    """For how long, and before the second step who is waited for."""
    suspect: int | None
    """A rank that says nothing, while others do."""
    certain: bool
    """Whether it began while the driver listened."""


class Watch:
    """Watches the ranks of one attempt."""

    def __init__(self, cluster: ClusterConfig, clock: Listening) -> None:
        self._clock = clock
        self._starting = Starting(cluster.start_hang_minutes, clock)
        self._hang = Hang(cluster.hang_minutes, clock)

    def joined(self, notice: Joined) -> None:
        self._starting.joined(notice)

    def heard(self, beat: Beat) -> None:
        if not self._starting.has(beat.rank):
            return  # a late word of the attempt before
        if beat.rank == 0:
            self._hang.heard(beat)
        if not self._hang.in_force:
            self._starting.heard(beat)

    def word(self, workers: int) -> str | None:
        """Return a line about ranks that have not come to their second step, once a minute."""
        return None if self._hang.in_force else self._starting.word(workers)

    def stuck(self, workers: int) -> Stuck | None:
        """Say what is wrong, if the ranks have not got on for too long."""
        if self._clock.drains():
            return None
        part = self._hang if self._hang.in_force else self._starting
        silent = part.overdue()
        if silent is None:
            return None
        words = f"no rank got on for {silent:.0f} s"
        certain = not self._clock.was_away_at(part.got_on)
        if not certain:
            words += f" in which this command listened (before, it was away for {self._clock.away:.0f} s)"
        if part is self._hang:
            return Stuck(words, None, certain)
        waited_for = self._starting.waited_for(workers)
        return Stuck(f"{words} while starting, waiting for {waited_for}", self._starting.suspect(workers), certain)
