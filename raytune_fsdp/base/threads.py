"""Threads, for calls that nothing can interrupt, and for files that are read at the same time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

READERS = 4
"""How many files one process reads at the same time: neither reading nor hashing holds Python's lock."""

T = TypeVar("T")


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Begin a call without waiting for it. In a daemon thread, not a pool: the process may end before the call."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return outcome
