"""Watch what a process does to the file system, call by call, and end it at one of them. Linux, by ptrace."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_SYSCALL, _SEIZE, _INTERRUPT, _GET_SYSCALL_INFO = 24, 0x4206, 0x4207, 0x420E
_TRACESYSGOOD, _TRACECLONE, _EXITKILL = 1, 8, 1 << 20
_ENTRY = 1
_WALL, _WNOTHREAD = 0x40000000, 0x20000000
_NO_SUCH_PROCESS, _INTERRUPTED = 3, 4

# The system calls that change a file system or make a change durable, by number.
_NUMBERS = {
    "x86_64": {
        1: "write", 18: "pwrite64", 20: "writev", 2: "open", 257: "openat", 85: "creat", 74: "fsync", 75: "fdatasync",
        76: "truncate", 77: "ftruncate", 285: "fallocate", 82: "rename", 264: "renameat", 316: "renameat2",
        83: "mkdir", 258: "mkdirat", 84: "rmdir", 87: "unlink", 263: "unlinkat", 86: "link", 265: "linkat",
        88: "symlink", 266: "symlinkat", 277: "sync_file_range", 326: "copy_file_range", 40: "sendfile",
    },
    "aarch64": {
        64: "write", 68: "pwrite64", 66: "writev", 56: "openat", 82: "fsync", 83: "fdatasync", 45: "truncate",
        46: "ftruncate", 47: "fallocate", 38: "renameat", 276: "renameat2", 34: "mkdirat", 35: "unlinkat",
        37: "linkat", 36: "symlinkat", 84: "sync_file_range", 285: "copy_file_range", 71: "sendfile",
    },
}  # fmt: skip
_ON_A_HANDLE = {"write", "pwrite64", "writev", "fsync", "fdatasync", "ftruncate", "fallocate", "sync_file_range"}
_OPENING = {"open": 1, "openat": 2}
"""Which argument has the flags."""


class _SyscallInfo(ctypes.Structure):
    _fields_ = [
        ("op", ctypes.c_uint8),
        ("pad", ctypes.c_uint8 * 3),
        ("arch", ctypes.c_uint32),
        ("instruction_pointer", ctypes.c_uint64),
        ("stack_pointer", ctypes.c_uint64),
        ("nr", ctypes.c_uint64),
        ("args", ctypes.c_uint64 * 6),
    ]


@dataclass(frozen=True, slots=True)
class Call:
    """A system call that changes the file system."""

    name: str
    what: str
    """The file, where it has a handle."""


def traceable() -> bool:
    """Whether processes can be traced here."""
    return platform.system() == "Linux" and platform.machine() in _NUMBERS


class Tracer:
    """Follows all threads of a process from now on. All of it in one thread, which must have no other children."""

    def __init__(self, pid: int, below: Path) -> None:
        """Only what concerns files below a directory counts."""
        self._pid = pid
        self._below = str(below)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        self._libc.ptrace.restype = ctypes.c_long
        self._names = _NUMBERS[platform.machine()]
        self._inside: dict[int, Call | None] = {}
        options = _TRACESYSGOOD | _TRACECLONE | _EXITKILL
        for task in os.listdir(f"/proc/{pid}/task"):
            if self._ptrace(_SEIZE, int(task), 0, options):
                self._ptrace(_INTERRUPT, int(task))  # it stops, and when it is let go its calls are told

    def run(self, at: Callable[[Call, bool], bool]) -> bool:
        """Follow the process to its end. `at(call, done)` is asked before and after each call: True kills it there.

        Returns whether it was killed.
        """
        killed = False
        while True:
            try:
                task, status = self._wait()
            except ChildProcessError:
                return killed
            if not os.WIFSTOPPED(status):
                self._inside.pop(task, None)
                if task == self._pid:
                    return killed
                continue
            number, event = os.WSTOPSIG(status), status >> 16
            if number == signal.SIGTRAP | 0x80 and not killed and self._at_call(task, at):
                os.kill(self._pid, signal.SIGKILL)
                killed = True
            passed_on = 0 if event or number & 0x80 or number == signal.SIGTRAP else number
            self._ptrace(_SYSCALL, task, 0, passed_on)

    def _wait(self) -> tuple[int, int]:
        status = ctypes.c_int()
        while True:
            task = self._libc.waitpid(-1, ctypes.byref(status), _WALL | _WNOTHREAD)
            if task > 0:
                return task, status.value
            if ctypes.get_errno() != _INTERRUPTED:
                raise ChildProcessError

    def _at_call(self, task: int, at: Callable[[Call, bool], bool]) -> bool:
        info = _SyscallInfo()
        if not self._ptrace(_GET_SYSCALL_INFO, task, ctypes.sizeof(info), ctypes.addressof(info)):
            return False
        if info.op == _ENTRY:
            call = self._inside[task] = self._interesting(task, info)
            return call is not None and at(call, False)
        call = self._inside.pop(task, None)
        return call is not None and at(call, True)

    def _interesting(self, task: int, info: _SyscallInfo) -> Call | None:
        name = self._names.get(info.nr)
        if name is None:
            return None
        if name in _ON_A_HANDLE:
            what = self._file(task, info.args[0])
            return Call(name, what) if what.startswith(self._below) else None
        if name in _OPENING and not info.args[_OPENING[name]] & (os.O_CREAT | os.O_TRUNC):
            return None
        return Call(name, "")

    def _file(self, task: int, handle: int) -> str:
        try:
            return os.readlink(f"/proc/{task}/fd/{handle}")
        except OSError:
            return ""

    def _ptrace(self, request: int, task: int, addr: int = 0, data: int = 0) -> bool:
        """False: the task is gone. One that is stopped ends all the same when another thread ends the process."""
        if self._libc.ptrace(request, task, addr, data) == -1:
            error = ctypes.get_errno()
            if error != _NO_SUCH_PROCESS:
                raise OSError(error, f"ptrace({request}): {os.strerror(error)}")
            return False
        return True
