"""A bounded queue between training and a slow receiver. Putting never waits; a full queue drops its oldest parcel."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

Point = tuple[str, float, int, int]
"""A metric's name, value, time in milliseconds since 1970, and step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Points and tags that are sent together."""

    points: tuple[Point, ...] = ()
    tags: Mapping[str, str] = field(default_factory=dict)


class Outbox:
    """For any number of senders, and one receiver that takes parcels, sends them and reports the outcome."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._parcels: deque[Parcel] = deque()
        self._taken: list[Parcel] = []
        self._changed = threading.Condition()
        self._closed = False
        self._dropped = 0

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def dropped(self) -> int:
        """How many parcels were dropped."""
        return self._dropped

    @property
    def left(self) -> int:
        """How many parcels wait or are being sent."""
        with self._changed:
            return len(self._parcels) + len(self._taken)

    def put(self, parcel: Parcel) -> None:
        with self._changed:
            if self._closed:
                return
            self._parcels.append(parcel)
            self._trim()
            self._changed.notify_all()

    def close(self) -> None:
        """Takes no more parcels, and wakes the receiver."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def take(self, max_points: int, max_tags: int) -> list[Parcel]:
        """The oldest parcels within the limits, at least one; waits for it. An empty list: it is closed and empty."""
        with self._changed:
            while not self._parcels and not self._closed:
                self._changed.wait()
            points = tags = 0
            while self._parcels:
                points += len(self._parcels[0].points)
                tags += len(self._parcels[0].tags)
                if self._taken and (points > max_points or tags > max_tags):
                    break
                self._taken.append(self._parcels.popleft())
            return list(self._taken)

    def delivered(self) -> None:
        with self._changed:
            self._taken.clear()

    def give_back(self) -> None:
        """Puts the taken parcels back at the front: they were not sent."""
        with self._changed:
            self._parcels.extendleft(reversed(self._taken))
            self._taken.clear()
            self._trim()

    def throw_away(self) -> None:
        """Drops the taken parcels: they can never be sent."""
        with self._changed:
            self._dropped += len(self._taken)
            self._taken.clear()

    def wait_closed(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed, timeout=seconds)

    def _trim(self) -> None:
        while len(self._parcels) > self._capacity:
            self._parcels.popleft()
            self._dropped += 1
