"""How long it takes until a run trains, and with what: printed, and kept in events.jsonl."""

from __future__ import annotations

import time


class Phases:
    """What was finished when, from `start` on."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Another attempt begins."""
        self._start = self._last = time.monotonic()
        self.seconds: dict[str, float] = {}

    def finished(self, phase: str) -> float:
        """Seconds since the phase before it was finished."""
        now = time.monotonic()
        self.seconds[phase] = round(now - self._last, 2)
        self._last = now
        return self.seconds[phase]

    @property
    def total(self) -> float:
        return self._last - self._start

    def in_words(self) -> str:
        return ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self.seconds.items())
