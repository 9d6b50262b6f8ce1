"""Handle SIGTERM and SIGINT in the process that a person or a scheduler stops: the driver, or a rank without Ray.

At SIGUSR1, a rank says what it is doing.
"""

from __future__ import annotations

import ctypes
import faulthandler
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType, TracebackType
from typing import Any, ClassVar, Self

from raytune_fsdp.base.batch import StopReason
from raytune_fsdp.base.errors import Interrupted

_TOGETHER_SECONDS = 1.0  # Ctrl-C and some schedulers signal the process and its group: one press arrives twice
_KINDS = (signal.SIGTERM, signal.SIGINT)
_PR_SET_PDEATHSIG = 1

STACKS_SIGNAL = signal.SIGUSR1
"""At this, a rank writes the stacks of all its threads to its standard error, whatever it is doing."""


def answer_with_stacks() -> None:
    """Make this process write its stacks at the signal, which would end it by default."""
    # The handler is in C, so it works while Python's lock is held. By the file's number, as a log may replace stderr.
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)


@contextmanager
def stacks_at_signal() -> Iterator[None]:
    """Write stacks at the signal while the context lasts, in a caller's process, unless that has its own handler."""
    if signal.getsignal(STACKS_SIGNAL) is not signal.SIG_DFL:
        yield
        return
    answer_with_stacks()
    try:
        yield
    finally:
        faulthandler.unregister(STACKS_SIGNAL)


@contextmanager
def deaf_children() -> Iterator[None]:
    """Keep Ctrl-C, which a terminal sends to all, from processes started in this context, until they are `listening`.

    They import for seconds before they can handle it, and would print tracebacks. This process still receives it, in
    another thread.
    """
    if not _may_handle():
        yield
        return
    over = threading.Event()
    listener = threading.Thread(target=over.wait, name="ctrl-c", daemon=True)
    # multiprocessing starts the tracker with its first child, and would unblock the signal then.
    resource_tracker.ensure_running()
    listener.start()  # before this thread blocks the signal, as children inherit its mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        over.set()


@contextmanager
def listening() -> Iterator[None]:
    """Receive the Ctrl-C that `deaf_children` keeps away, while the context lasts.

    After it the process ends, and another Ctrl-C, which its parent passes on as well, would only print a traceback.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def hear_no_ctrl_c() -> None:
    """Let Ctrl-C do nothing in this process, outside of contexts that handle it. For a rank, which ends after its own.

    It comes twice, from the terminal and from the rank's parent. The second one would find Python ending, and print a
    traceback: blocking it, as `listening` does, is for one thread, and threads of libraries receive it for the process.
    SIG_IGN would drop one that waits to be received.
    """
    signal.signal(signal.SIGINT, lambda *_: None)


class SignalReceived(BaseException):
    """A signal arrived. Not an Exception: a library that catches those would report it as an error of its own."""


class Signals:
    """A context that a signal ends at once, as Interrupted. After `hold` was called, signals are only counted.

    Does nothing outside of the main thread, as only that one may handle signals.
    """

    _lost: ClassVar[SignalReceived | None] = None
    """An exception that was raised and has not ended its context. Python drops exceptions in finalizers and in
    callbacks of weak references (imports have many): then the next context that begins, or the end of this one, raises
    it again."""

    def __init__(self, when: str = "before training began; nothing is lost") -> None:
        self.count = 0
        self._when = when
        self._last = -_TOGETHER_SECONDS
        self._holding = False
        self._raised: SignalReceived | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._unraisable = sys.unraisablehook

    def __enter__(self) -> Self:
        if Signals._lost is not None:
            raise Signals._lost
        self._before = {kind: signal.getsignal(kind) for kind in _KINDS}
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._unraised
        self.take()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        held, before = self._holding, self.count
        self._holding = True  # one that comes now is raised at the end, when all handlers are back
        if sys.unraisablehook == self._unraised:
            sys.unraisablehook = self._unraisable
        for each, handler in self._before.items():
            if handler is not None and _may_handle():  # None: a library's handler, which Python cannot put back
                signal.signal(each, handler)
        # Also where another error came of it: C++ that is being imported (scipy's) says ImportError.
        stopped: BaseException | None = self._raised if Signals._lost is self._raised else None
        if self._raised is not None:
            Signals._lost = None
        if isinstance(error, SignalReceived):
            stopped = error
        if not held and self.count > before:
            stopped = SignalReceived(f"stopped by a signal {self._when}")
        if stopped is not None and not isinstance(error, Interrupted):  # which says more
            raise Interrupted(str(stopped)) from None if isinstance(error, SignalReceived) else error

    def _unraised(self, dropped: sys.UnraisableHookArgs) -> None:
        """Print nothing about a dropped SignalReceived: it is raised again."""
        if not isinstance(dropped.exc_value, SignalReceived):
            self._unraisable(dropped)

    def take(self) -> None:
        """Handle both signals; called again after a library has installed its own handlers."""
        for kind in _KINDS if _may_handle() else ():
            signal.signal(kind, self._receive)

    def hold(self) -> None:
        if not self._holding:
            self._holding = True
        elif self._raised is not None and Signals._lost is self._raised:
            raise self._raised

    def check_export(self, at_end: bool) -> None:
        """Raise if a stop came too late for training and an export, which may take as long, is to follow."""
        if self.count and at_end:
            raise Interrupted("stopped: the run is complete, but its export is not; the same command makes it")

    def _receive(self, kind: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last < _TOGETHER_SECONDS:
            return  # the same signal, sent twice
        self._last = now
        self.count += 1
        if sys.platform == "linux":
            # Who has asked for a stop may be gone before it is done, as the command of a sweep in a job that is
            # stopped. The kernel would say so by the same signal, and that is no wish to stop at once.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
        if not self._holding:
            self._holding = True  # raise only once: clean-up must not be interrupted
            self._raised = Signals._lost = SignalReceived(f"stopped by {signal.Signals(kind).name} {self._when}")
            raise self._raised


class StopFlag(Signals):
    """The signals of a rank. Training asks it once per step whether to stop, and then ends with a checkpoint.

    Before training asks for the first time there is nothing to save: then a signal ends the context at once.
    """

    def __init__(self, *, insist: bool = True) -> None:
        """`insist`: a second signal of the same kind has its default effect, which ends the process."""
        super().__init__("before the first step; the same command continues")
        self._insist = insist
        self._timers: dict[int, threading.Timer] = {}

    def __call__(self) -> StopReason | None:
        self._holding, Signals._lost = True, None
        return StopReason.SIGNAL if self.count else None

    def __exit__(self, *error: Any) -> None:
        for timer in self._timers.values():
            timer.cancel()
            timer.join()
        super().__exit__(*error)

    def _receive(self, kind: int, frame: FrameType | None) -> None:
        super()._receive(kind, frame)
        if self._insist and kind not in self._timers:
            # Only after a while, as the same signal may be sent twice. In C, because Python can do it neither in a
            # thread nor while the main thread waits in a collective for a rank that hangs, and that is when a person
            # presses Ctrl-C again.
            timer = threading.Timer(_TOGETHER_SECONDS, ctypes.CDLL(None).signal, (kind, signal.SIG_DFL.value))
            timer.daemon = True
            self._timers[kind] = timer
            timer.start()


def _may_handle() -> bool:
    return threading.current_thread() is threading.main_thread()
