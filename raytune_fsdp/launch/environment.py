"""Environment variables for the libraries below, which must not outlive the call that needs them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock

_lock = Lock()
_held: Counter[str] = Counter()
"""Variables that are ours, and how many blocks need each: two threads may call finetune() at the same time."""


@contextmanager
def environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Set those of these variables that a user has not set, while the block lasts."""
    with _lock:
        ours = [name for name in defaults if name not in os.environ or _held[name]]
        for name in ours:
            os.environ.setdefault(name, defaults[name])
        _held.update(ours)
    try:
        yield
    finally:
        with _lock:
            _held.subtract(ours)
            for name in ours:
                if not _held[name]:
                    os.environ.pop(name, None)
