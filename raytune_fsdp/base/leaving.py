"""Leave the process at once, where Python's own way out would crash or wait."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import NoReturn

crashing: list[str] = []
"""What would crash in this process while Python ends it, in words. Only a command leaves because of that: `finetune()`
raises or returns as always, and what its caller does then is not ours to decide."""


def leave(code: int) -> NoReturn:
    """End the process with this exit code. No handler of `atexit` and no destructor runs."""
    try:
        flush_output()
    finally:
        os._exit(code)


def flush_output() -> None:
    """Write out what was printed, as far as that is possible."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a full disk, or a pipe that nobody reads any more
            stream.flush()
