"""What a process holds open, within a bound."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any


class Bounded:
    """The values used last, as long as their sizes together stay under a limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._start()
        os.register_at_fork(after_in_child=self._fork)

    def _start(self) -> None:
        self._lock = Lock()
        self._held = 0
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def _fork(self) -> None:
        # A client of an object store cannot be used in a child, nor be closed there: its threads are not there.
        self._parents = self._values
        self._start()

    def get(self, key: Hashable, make: Callable[[], Any], size: Callable[[Any], int] = lambda value: 1) -> Any:
        """The value of `key`, made now unless it is still there. What others still use is not closed by leaving."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
        value = make()
        with self._lock:
            if key in self._values:
                return self._values[key][0]
            self._values[key] = value, size(value)
            self._held += self._values[key][1]
            while self._held > self._limit and len(self._values) > 1:
                self._held -= self._values.popitem(last=False)[1][1]
        return value

    def clear(self) -> None:
        """Forget all values."""
        with self._lock:
            self._values.clear()
            self._held = 0
