"""After which steps something is due, the same on any number of ranks: every N steps, or N times an epoch."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Any


@dataclass(frozen=True, slots=True)
class PartsOfEpochs:
    """A cadence by parts of epochs: due after each step in which another part ends."""

    parts: int
    """How many parts an epoch has."""
    ends: tuple[int, ...]
    """The packed samples up to the end of each epoch. If there is one number, all epochs are that long."""
    batch: int
    """Packed samples of a step."""

    @classmethod
    def of(cls, parts: int, epochs: tuple[int, ...], batch: int) -> PartsOfEpochs:
        """Make the cadence. `epochs`: the packed samples of each epoch."""
        return cls(parts, tuple(accumulate(epochs)), batch)

    def times_due(self, step: int) -> int:
        samples = step * self.batch
        if len(self.ends) == 1:
            return self.parts * samples // self.ends[0] if self.ends[0] else 0
        whole = bisect_right(self.ends, samples)
        begin = self.ends[whole - 1] if whole else 0
        rest = self.parts * (samples - begin) // (self.ends[whole] - begin) if whole < len(self.ends) else 0
        return self.parts * whole + rest


Every = int | PartsOfEpochs
"""A cadence: every N steps, or by parts of epochs."""


def times_due(step: int, every: Every) -> int:
    """Return how often something with this cadence has been due up to this step."""
    return step // every if isinstance(every, int) else every.times_due(step)


def due(step: int, every: Every) -> bool:
    """Return whether something with this cadence is due after this step."""
    return times_due(step, every) > times_due(step - 1, every)


def is_multiple(every: Every, of: Every) -> bool:
    """Return whether `of` is due whenever `every` is."""
    if isinstance(every, int) and isinstance(of, int):
        return every % of == 0
    if isinstance(every, PartsOfEpochs) and isinstance(of, PartsOfEpochs):
        return of.parts % every.parts == 0
    return of == 1


def cadence_in_words(every: Every) -> str:
    """Return the cadence as words that follow a verb, such as `saved`."""
    if isinstance(every, int):
        return f"every {every:,} steps"
    return "once per epoch" if every.parts == 1 else f"{every.parts:,} times per epoch"


def to_json(every: Every) -> Any:
    """Return the cadence as it is written to plan.json."""
    return every if isinstance(every, int) else {"per_epoch": every.parts}
