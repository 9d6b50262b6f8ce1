"""Measure the phases before the first step, which are shown, printed, and kept in events.jsonl."""

from __future__ import annotations

import time
from collections.abc import Sequence

from raytune_fsdp.record.screen_messages import tell

ON_RAY = ("start", "checks", "Ray", "workers", "imports", "model", "data")
HERE = ("checks", "model")
TOGETHER = ("checks", "workers", "model")
"""The phases without Ray: with one rank in this process (`HERE`), or several in other processes (`TOGETHER`)."""


class Phases:
    """The seconds that each phase took, in order. Can be sent to other processes of the same machine."""

    def __init__(self, expected: Sequence[str] = ON_RAY) -> None:
        """`expected`: the phases that every start has; after them comes the first step."""
        self._expected = expected
        self._start = self._last = time.monotonic()
        self.seconds: dict[str, float] = {}
        self._show()

    def finished(self, phase: str) -> float:
        """End a phase; return the seconds since the previous one ended."""
        now = time.monotonic()
        self.seconds[phase] = round(now - self._last, 2)
        self._last = now
        if phase != "step":  # from the first step on, the region shows training
            self._show()
        return self.seconds[phase]

    @property
    def total(self) -> float:
        return self._last - self._start

    @property
    def elapsed(self) -> float:
        """The seconds until now, also of a phase that is not finished."""
        return time.monotonic() - self._start

    def in_words(self) -> str:
        return ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self.seconds.items())

    def _show(self) -> None:
        left = [phase for phase in self._expected if phase not in self.seconds]
        tell(
            title="starting",
            done=len(self._expected) - len(left),
            total=len(self._expected) + 1,
            elapsed=time.monotonic() - self._start,
            fields=[*(f"{phase} {seconds:.1f} s" for phase, seconds in self.seconds.items()), *left, "first step"],
        )
