"""A control group with a limit of memory, where one can be made."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PLACES = ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max"))


@contextmanager
def limited(name: str, limit: int) -> Iterator[Path | None]:
    """The group's directory, to whose `cgroup.procs` processes are written; None where none can be made."""
    made = None
    for root, file in PLACES:
        with suppress(OSError):
            place = root / name
            place.mkdir()
            made = place
            (place / file).write_text(str(limit))
            break
    else:
        if made is not None:
            made.rmdir()
            made = None
    try:
        yield made
    finally:
        deadline = time.monotonic() + 10
        while made is not None and made.exists() and time.monotonic() < deadline:
            with suppress(OSError):  # busy, until the last process is gone
                made.rmdir()
            time.sleep(0.1)
