"""How long a run takes to save, and whether what may end it waits for that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from raytune_fsdp.base.untrusted import is_count
from raytune_fsdp.config.sections.cluster import SPOT_NOTICE_SECONDS
from raytune_fsdp.predict.prediction import Prediction
from raytune_fsdp.record import names

_SAVES = 2
"""The most saves that a stop waits for: the one that is being written as it comes, and the last."""


@dataclass(frozen=True, slots=True)
class Writing:
    """How fast checkpoints are written."""

    speed: float
    """Bytes a second, over all ranks."""
    measured: bool
    """Whether the run itself has measured it, in an earlier save; else somebody says so."""


def as_recorded(events: Iterable[Mapping[str, Any]]) -> Writing | None:
    """Return how fast the last save of a run has written, by its events; None if it has saved nothing."""
    found = None
    for event in events:
        if event["event"] == names.SAVED:
            seconds, size = event["fields"].get("seconds"), event["fields"].get("bytes")
            if isinstance(seconds, int | float) and seconds > 0 and is_count(size) and size:
                found = Writing(size / seconds, measured=True)
    return found


@dataclass(frozen=True, slots=True)
class Stopping:
    """The seconds that saves and stops take."""

    writing: Writing
    save: float
    stop: float
    """The longest that a stop takes, with the step that has begun."""

    @classmethod
    def of(cls, found: Prediction, writing: Writing) -> Stopping:
        save = found.checkpoint / writing.speed
        return cls(writing, save, _SAVES * save + found.seconds.step)

    def saved_within(self, notice: float) -> float:
        """Return the size of the largest checkpoint that is written within this notice."""
        return notice * self.writing.speed


def notices() -> dict[float, list[str]]:
    """Return the clouds by the seconds of their notice, the longest first."""
    found: dict[float, list[str]] = {}
    for cloud, seconds in sorted(SPOT_NOTICE_SECONDS.items(), key=lambda each: -each[1]):
        found.setdefault(seconds, []).append(cloud)
    return found
