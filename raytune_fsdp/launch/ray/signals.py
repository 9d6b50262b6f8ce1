"""SIGTERM and SIGINT in the driver, which only watches others train. (Ranks without Ray: `worker.StopFlag`.)"""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any

from raytune_fsdp.errors import Interrupted

_TOGETHER_SECONDS = 1.0  # Ctrl-C and some schedulers signal the process and its group: one press arrives twice
_KINDS = (signal.SIGTERM, signal.SIGINT)


class _Stop(BaseException):
    """Not an Exception, or a library that catches those would report the signal as an error of its own."""


class Signals:
    """Until `hold` is called, a signal ends the block at once, as Interrupted; after that it is only counted."""

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
        """Handle both signals; called again after a library has installed its own handlers."""
        for kind in _KINDS:
            signal.signal(kind, self._receive)

    def hold(self) -> None:
        self._holding = True

    def _receive(self, kind: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last < _TOGETHER_SECONDS:
            return  # the same one, sent twice
        self._last = now
        self.count += 1
        if not self._holding:
            self._holding = True  # raise only once: clean-up must not be interrupted
            raise _Stop(f"stopped by {signal.Signals(kind).name} before training began; nothing is lost")
