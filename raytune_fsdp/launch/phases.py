"""How long each phase before the first step takes: printed, and kept in events.jsonl."""

from __future__ import annotations

import time


class Phases:
    """The seconds that each phase took, in order."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin again, for another attempt."""
        self._start = self._last = time.monotonic()
        self.seconds: dict[str, float] = {}

    def finished(self, phase: str) -> float:
        """End a phase; returns the seconds since the previous one ended."""
        now = time.monotonic()
        self.seconds[phase] = round(now - self._last, 2)
        self._last = now
        return self.seconds[phase]

    @property
    def total(self) -> float:
        return self._last - self._start

    def in_words(self) -> str:
        return ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self.seconds.items())
