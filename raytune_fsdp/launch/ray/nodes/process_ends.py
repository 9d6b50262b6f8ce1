"""Hear within milliseconds that a process of this machine has ended, and how, in one thread for all of them."""

from __future__ import annotations

import os
import select
import signal
import struct
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from fcntl import ioctl
from threading import Condition

import psutil

from raytune_fsdp.base.threads import in_thread

_LOOK_SECONDS = 0.05
"""Between two looks at processes where the kernel has no pidfd."""
_REAPED_SECONDS = 0.01
"""How long a parent may take to ask for the end of its child: only then does the kernel tell others."""
_GET_INFO, _EXIT = 0xC040FF0B, 1 << 3
"""PIDFD_GET_INFO and its bit for the exit status, of <linux/pidfd.h>: from Linux 6.15 on it tells any process."""
_INFO = struct.Struct("QQ11Ii")
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)


class ProcessEnds:
    """Hears of these processes, whose parent this one need not be."""

    def __init__(self, pids: Iterable[int], heard: Callable[[int, str | None], None]) -> None:
        """`heard` gets the process and how it has ended, as far as the kernel tells. It hears nothing of processes that
        are not there when this begins: their numbers may be those of another namespace."""
        self._heard = heard
        self._poll = select.poll()
        self._by_fd: dict[int, int] = {}
        self._looked_at: dict[int, psutil.Process] = {}
        self._left: set[int] = set()
        self._changed = Condition()
        for pid in pids:
            with suppress(ProcessLookupError, psutil.Error):
                try:
                    descriptor = os.pidfd_open(pid)
                    self._by_fd[descriptor] = pid
                    self._poll.register(descriptor, select.POLLIN)
                except ProcessLookupError:
                    raise
                except (OSError, AttributeError):  # an old kernel, a sandbox, or no Linux
                    self._looked_at[pid] = psutil.Process(pid)
                self._left.add(pid)
        in_thread(self._run, "ends")

    def wait(self, pids: Collection[int], seconds: float) -> bool:
        """Wait until these have ended. Returns whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: self._left.isdisjoint(pids), seconds)

    def _run(self) -> None:
        while self._left:
            for descriptor, _ in self._poll.poll(1000 * _LOOK_SECONDS if self._looked_at else None):
                self._poll.unregister(descriptor)
                self._ended(self._by_fd.pop(descriptor), _how(descriptor))
                os.close(descriptor)
            for pid, process in list(self._looked_at.items()):
                if not _is_there(process):
                    del self._looked_at[pid]
                    self._ended(pid, None)

    def _ended(self, pid: int, how: str | None) -> None:
        with self._changed:
            self._left.discard(pid)
            self._changed.notify_all()
        self._heard(pid, how)


def _is_there(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _how(descriptor: int) -> str | None:
    """Say how the process has ended, None if the kernel does not tell."""
    until = time.monotonic() + _REAPED_SECONDS
    while True:
        info = bytearray(_INFO.size)
        struct.pack_into("Q", info, 0, _EXIT)
        with suppress(OSError):
            ioctl(descriptor, _GET_INFO, info)
            mask, *_, status = _INFO.unpack(info)
            if mask & _EXIT:
                return in_words(status)
        if time.monotonic() > until:
            return None
        time.sleep(_REAPED_SECONDS / 5)


def in_words(status: int) -> str:
    """Say what a wait status means: `killed by SIGKILL`, `crashed: SIGSEGV`, `exit code 1`."""
    if not os.WIFSIGNALED(status):
        return f"exit code {os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return f"crashed: {name}" if number in _CRASHES else f"killed by {name}"
