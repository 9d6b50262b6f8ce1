"""A cache with a bound, for what a process keeps open: files, clients of object stores."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any


class Bounded:
    """Keeps the values that were used last: their sizes together stay within a limit, or there is only one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._start()
        os.register_at_fork(after_in_child=self._fork)

    def _start(self) -> None:
        self._lock = Lock()
        self._held = 0
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def _fork(self) -> None:
        # A fork copies no threads, and without its threads a client of an object store can be neither used nor closed:
        # the child keeps its parent's values alive, unused.
        self._parents = self._values
        self._start()

    def get(self, key: Hashable, make: Callable[[], Any], size: Callable[[Any], int] = lambda value: 1) -> Any:
        """Return the value of `key`; make it if it is not held. A dropped value is not closed: others may use it."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
        value = make()  # without the lock: opening a file in an object store takes a while
        with self._lock:
            if key in self._values:
                return self._values[key][0]
            self._values[key] = value, size(value)
            self._held += self._values[key][1]
            while self._held > self._limit and len(self._values) > 1:
                self._held -= self._values.popitem(last=False)[1][1]
        return value

    def drop(self, key: Hashable) -> None:
        """Forget the value of `key`, if it is held."""
        with self._lock:
            if key in self._values:
                self._held -= self._values.pop(key)[1]

    def clear(self) -> None:
        """Forget all values."""
        with self._lock:
            self._values.clear()
            self._held = 0
