"""How a call in this process ends: what it prints, its time and memory, and what it touches outside of where it may.

Two ways see what it touches. Python tells of every file that it opens and every address that it asks (audit events),
but not of what libraries in C++ and Rust or other processes do; the system tells of every file below a directory that
is opened, by whomever, but only where it is asked to.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

SECONDS, BYTES, LINE = 5.0, 500 << 20, 3000
"""What a file that somebody has forged may take in a process that has imported everything."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a call has ended."""

    code: int | None
    """-1: by an error that is no word to a user."""
    said: list[str]
    """The lines on standard error."""
    seconds: float
    """Of the processor, as other tests may run beside this one."""
    grown: int
    printed: str = ""
    """On standard output."""
    touched: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    def problems(self, codes: Sequence[int | None], lines: Sequence[int]) -> list[str]:
        """What is wrong with it, if it should have ended with one of these exit codes and so many lines."""
        found = {
            f"exit code {self.code}": self.code not in codes,
            f"{len(self.said)} lines": len(self.said) not in lines,
            "control characters": not all(char.isprintable() or char in "\n\t" for char in self.printed)
            or not all(line.isprintable() for line in self.said),
            "a long line": any(len(line) > LINE for line in self.said),
            f"{self.seconds:.1f} s": self.seconds > SECONDS,
            f"{self.grown >> 20} MB": self.grown > BYTES,
            f"touched {self.touched[:5]}": bool(self.touched),
            f"changed {self.changed[:5]}": bool(self.changed),
        }
        return [what for what, wrong in found.items() if wrong]


def measured(work: Callable[[], int]) -> Ending:
    """Call it, as the last command of a process does."""
    from raytune_fsdp.cli.common import exit_code

    code: int
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, start = memory("VmRSS"), time.process_time()
    with captured(2) as said, captured(1) as out:
        try:
            code = exit_code(work)
        except BaseException as error:  # what Rust panics with is no Exception
            code = -1
            print(repr(error), file=sys.stderr)
    seconds, grown = time.process_time() - start, memory("VmHWM") - before
    return Ending(code, "".join(said).splitlines(), seconds, grown, "".join(out))


def memory(what: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what)]
    return int(line.split()[1]) * 1024


@contextlib.contextmanager
def captured(handle: int) -> Iterator[list[str]]:
    """What reaches standard output (1) or error (2), also from libraries that are not Python's."""
    text: list[str] = []
    stream = {1: sys.stdout, 2: sys.stderr}[handle]
    stream.flush()
    before = os.dup(handle)
    with open(os.memfd_create("captured"), "w+", errors="backslashreplace", newline="") as file:
        os.dup2(file.fileno(), handle)
        try:
            yield text
        finally:
            stream.flush()
            os.dup2(before, handle)
            os.close(before)
            file.seek(0)
            text.append(file.read())


# ---- what is opened, listed, written and asked ----

_FILES = ("open", "os.listdir", "os.scandir", "os.truncate", "sqlite3.connect", "subprocess.Popen", "os.posix_spawn")
_NAMES = {
    "os.mkdir": (0,), "os.rmdir": (0,), "os.remove": (0,), "os.utime": (0,), "os.chmod": (0,), "os.chown": (0,),
    "os.rename": (0, 1), "os.link": (0, 1), "os.symlink": (1,),
}  # fmt: skip
"""What acts on a name, and so on a link itself: with which arguments."""
_ADDRESSES = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "socket.bind")

_recording: list[tuple[str, list[str]]] | None = None
_installed = False


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if _recording is None:
        return
    if event in _FILES:
        if isinstance(arguments[0], str | bytes | os.PathLike):
            _recording.append((event, [os.path.realpath(os.fsdecode(arguments[0]))]))
    elif event in _NAMES:
        names = [os.fsdecode(arguments[each]) for each in _NAMES[event] if not isinstance(arguments[each], int)]
        _recording.append(
            (event, [os.path.join(os.path.realpath(os.path.dirname(n)), os.path.basename(n)) for n in names])
        )
    elif event in _ADDRESSES:
        _recording.append((event, [f"address {arguments[1] if event == 'socket.connect' else arguments[0]}"]))


def _own() -> tuple[str, ...]:
    """What every Python reads: its own files, this package's, the system's word on itself."""
    import raytune_fsdp

    (package,) = raytune_fsdp.__path__
    top = os.path.dirname(package)  # of a tree that it runs from: its version and its recipes are read there
    places = {
        sys.prefix,
        sys.base_prefix,
        *sysconfig.get_paths().values(),
        package,
        f"{top}/pyproject.toml",
        f"{top}/jobs",
    }
    return (*(os.path.realpath(each) for each in places), "/proc", "/sys", "/dev/null", "/dev/urandom")


@contextlib.contextmanager
def touching(inside: Sequence[Path | str]) -> Iterator[list[str]]:
    """What is touched that is neither in these places nor Python's and the package's own. Filled at the end."""
    global _recording, _installed
    if not _installed:
        sys.addaudithook(_hear)  # for good: there is no way to take one back
        _installed = True
    places = (*(os.path.realpath(each) for each in inside), *_own())
    imported_from = {f"os.listdir {os.path.realpath(each)}" for each in sys.path}  # again after each change there
    found: list[str] = []
    _recording = []
    try:
        yield found
    finally:
        recorded, _recording = _recording, None
        for event, names in recorded:
            found += [f"{event} {name}" for name in names if not _is_in(name, places)]
        found[:] = [each for each in found if each not in imported_from]


def _is_in(name: str, places: Sequence[str]) -> bool:
    return any(name == place or name.startswith(f"{place}/") for place in places)


_OPEN, _MODIFY, _CREATE, _DELETE = 0x20, 0x2, 0x100, 0x200


@contextlib.contextmanager
def opening(*places: Path) -> Iterator[Callable[[], list[str]]]:
    """A function that says what was opened, changed, made or removed at and below these places since the last call, by
    whomever."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert handle >= 0, os.strerror(ctypes.get_errno())
    names: dict[int, Path] = {}
    try:
        for place in places:
            below = [each for each in place.rglob("*") if each.is_dir()] if place.is_dir() else []
            for each in (place, *below):
                watch = libc.inotify_add_watch(handle, os.fsencode(each), _OPEN | _MODIFY | _CREATE | _DELETE)
                assert watch >= 0, os.strerror(ctypes.get_errno())
                names[watch] = each
        yield lambda: _opened(handle, names)
    finally:
        os.close(handle)  # takes milliseconds: not once a command


def _opened(handle: int, names: dict[int, Path]) -> list[str]:
    content, found = b"", []
    with contextlib.suppress(BlockingIOError):
        while read := os.read(handle, 1 << 16):
            content += read
    while content:
        watch, mask, _, length = struct.unpack("iIII", content[:16])
        name = content[16 : 16 + length].rstrip(b"\0")
        what = {_OPEN: "opened", _MODIFY: "changed", _CREATE: "made", _DELETE: "removed"}.get(mask & 0x322, "left")
        found.append(f"{what} {names[watch] / os.fsdecode(name)}")
        content = content[16 + length :]
    return found


def snapshot(place: Path) -> dict[str, str]:
    """Everything below a directory: kind, rights, size, time and content."""
    found = {}
    for directory, folders, files in os.walk(place):
        for name in (*folders, *files):
            path = os.path.join(directory, name)
            facts = os.lstat(path)
            whole = os.path.isfile(path) and not os.path.islink(path) and facts.st_size < 64 << 20
            content = xxhash.xxh3_64_hexdigest(Path(path).read_bytes()) if whole else ""
            where = os.readlink(path) if os.path.islink(path) else ""
            # The time of a directory counts, too: what was made in it and removed again has changed it.
            found[path] = f"{facts.st_mode:o} {facts.st_size} {facts.st_mtime_ns} {facts.st_ino} {where}{content}"
    return found


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """The paths that are new, gone, or not what they were."""
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
