"""SIGTERM and SIGINT in a process that only watches others train."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any

from raytune_fsdp.errors import Interrupted

_TOGETHER_SECONDS = 1.0
_KINDS = (signal.SIGTERM, signal.SIGINT)


class _Stop(BaseException):
    """Not an Exception: what libraries raise is caught in many places, and told as something else."""


class Signals:
    """Until `hold` is called a signal ends the block at once, as Interrupted; from then on it is noted in `count`."""

    def __init__(self) -> None:
        self.count = 0
        self._last = -_TOGETHER_SECONDS
        self._holding = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        self._before = {kind: signal.getsignal(kind) for kind in _KINDS}
        self.take()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
        if isinstance(error, _Stop):
            raise Interrupted(str(error)) from None

    def take(self) -> None:
        """Take them over, again where a library has done so meanwhile."""
        for kind in _KINDS:
            signal.signal(kind, self._receive)

    def hold(self) -> None:
        self._holding = True

    def _receive(self, kind: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last < _TOGETHER_SECONDS:
            return  # the same one, sent to the process and to its group
        self._last = now
        self.count += 1
        if not self._holding:
            self._holding = True  # once is enough: what is open now has to be closed
            raise _Stop(f"stopped by {signal.Signals(kind).name} before training began; nothing is lost")
