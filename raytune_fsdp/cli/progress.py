"""Shows how far long work has come: a bar in a terminal, a line now and then in a log."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import TaskID

    from raytune_fsdp.types import Progress

_SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def shown(*, quiet: bool = False) -> Iterator[Progress | None]:
    """A callback that shows progress on stderr while the context lasts; None with `quiet`."""
    if quiet:
        yield None
    elif not sys.stderr.isatty() or _in_pipe(sys.stdout):
        yield _Lines()
    else:
        with _bars() as progress:
            yield progress


def _in_pipe(stream: TextIO) -> bool:
    """Whether a stream is a pipe: `| tee log` prints on the same terminal, across a bar."""
    try:
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):  # not a file at all, as in a notebook
        return False


class _Lines:
    """For logs: a line every ten seconds, so none about short work."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last.setdefault(what, now) >= _SECONDS_BETWEEN_LINES:
            self._last[what] = now
            print(f"{what}: {done:,} of {total:,}", file=sys.stderr, flush=True)


@contextmanager
def _bars() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        # rich prints on stderr, above the bar, what is printed on stdout: right in a terminal, lost for a file.
        redirect_stdout=sys.stdout.isatty(),
    ) as bars:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what)
            bars.update(tasks[what], completed=done, total=total)

        yield show
