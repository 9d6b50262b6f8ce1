"""Show the progress of long work: in a region of the terminal, or by a line now and then in a log."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from raytune_fsdp.base.batch import Progress
from raytune_fsdp.base.untrusted import printable
from raytune_fsdp.cli.screen import screen
from raytune_fsdp.launch.torchrun import under_torchrun
from raytune_fsdp.record.screen_messages import PLAIN_TERMS, message

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_MESSAGES = 0.1


@contextmanager
def show_progress(*, quiet: bool = False) -> Iterator[Progress | None]:
    """Yield a callback that shows progress while the context lasts; None with `quiet`."""
    if quiet:
        yield None
    elif not (files := _terminal()):
        yield _Lines()
    else:
        with screen(files, colours="NO_COLOR" not in os.environ) as there:
            yield _Messages(files[0]) if there else _Lines()


def _terminal() -> tuple[int, ...]:
    """Return the files of this process that are the terminal which shows the region; none if there should be none."""
    ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    # Under torchrun the terminal belongs to torchrun, which prints there; so does every rank.
    if ci or os.environ.get("TERM", "") in PLAIN_TERMS or under_torchrun() or not sys.executable:
        return ()
    out, error = _is_terminal(sys.stdout, 1), _is_terminal(sys.stderr, 2)
    if out:
        # Not by their names: a terminal may be that of another mount namespace, as in a container.
        return (1, 2) if error and os.fstat(1).st_rdev == os.fstat(2).st_rdev else (1,)
    # `| tee log` prints on the same terminal, across a region.
    return (2,) if error and not _in_pipe(sys.stdout) else ()


def _is_terminal(stream: TextIO, file: int) -> bool:
    try:
        return stream.fileno() == file and os.isatty(file)
    except (OSError, ValueError, AttributeError):  # not a file at all, as in a notebook
        return False


def _in_pipe(stream: TextIO) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError, AttributeError):
        return False


class _Lines:
    """Progress for logs: a line every ten seconds, so none about short work."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last.setdefault(what, now) >= _SECONDS_BETWEEN_LINES:
            self._last[what] = now
            print(printable(f"{what}: {done:,} of {total:,}"), file=sys.stderr, flush=True)


class _Messages:
    """Progress for the region: at most ten messages a second, and always the last one about a piece of work."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._last: dict[str, float] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - self._last.get(what, 0.0) >= _SECONDS_BETWEEN_MESSAGES:
            self._last[what] = now
            with suppress(OSError):  # the region is gone (terminal closed, or killed): no reason to end the command
                os.write(self._file, f"{message(work=what, done=done, total=total)}\n".encode())
