"""Silence loggers in one thread: messages of other threads pass, and no level or handler changes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def muted(*names: str) -> Iterator[None]:
    """Drop the messages of these loggers in the calling thread, except errors."""
    thread = threading.get_ident()

    def passes(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.levelno >= logging.ERROR

    loggers = [logging.getLogger(name) for name in names]
    for each in loggers:
        each.addFilter(passes)
    try:
        yield
    finally:
        for each in loggers:
            each.removeFilter(passes)
