"""Writes that a crash cannot undo (durably), or that nobody sees half done (at once); and whose turn it is to write."""

from __future__ import annotations

import fcntl
import os
import stat
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyarrow import Buffer


# The group may read and write, if the umask allows it: runs are on storage that people share.
_PRIVATE = 0o660


def open_private(name: str, flags: int) -> int:
    """Open a file, as an opener for `open`: nobody but owner and group may use a new file."""
    return os.open(name, flags, _PRIVATE)


def make_private(directory: Path) -> None:
    """Make a directory that only its owner and group can look into, unless it exists."""
    directory.mkdir(mode=0o770, parents=True, exist_ok=True)


def take_from_others(path: Path) -> None:
    """Remove everybody's permissions but the owner's and group's from a file or directory, if it exists and is ours."""
    with suppress(OSError):  # another user's, or storage has no permissions
        mode = path.lstat().st_mode
        if mode & 0o007 and not stat.S_ISLNK(mode):
            path.chmod(stat.S_IMODE(mode) & ~0o007)  # the bit that gives files the directory's group stays


def write_durably(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Write a small file, and wait until storage has its content. `private`: a new file is owner's and group's only."""
    with open(path, "wb", opener=open_private if private else None) as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Replace a small file: a crash leaves the old content or the new. `private`: only owner and group may read it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # a file left by a crash keeps its own permissions; a link leads elsewhere
    write_durably(temporary, content, private=private)
    temporary.replace(path)
    sync_directory(path.parent)  # without this the new content is safe, but perhaps not under its name


def update_durably(path: Path, content: bytes) -> None:
    """Replace a file, unless it has this content: at any time others read the old content or the new, never a part."""
    with suppress(OSError):
        if path.stat().st_size == len(content) and path.read_bytes() == content:
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_durably(path, content)


def keep_private(path: Path) -> None:
    """Make sure that a file exists, and that only its owner and group can read it, where storage has permissions."""
    with suppress(OSError):  # the file is another user's, or storage has no permissions
        handle = os.open(path, os.O_RDWR | os.O_CREAT, _PRIVATE)
        try:
            os.fchmod(handle, os.fstat(handle).st_mode & 0o770)
        finally:
            os.close(handle)


def replace_at_once(path: Path, *parts: bytes | Buffer, private: bool = False) -> None:
    """Replace a file, even if others do so at the same time; readers see one whole version. Does not wait for storage.

    `private`: only owner and group may read it."""
    # A name of its own: writers on several nodes may have the same process id.
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with open(temporary, "wb", opener=open_private if private else None) as file:
            for part in parts:
                file.write(part)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def take_turn(handle: int, seconds: float, look_seconds: float) -> None:
    """Wait for the lock of an open file, and keep it until the file is closed.

    Go on without it if the storage has no locks, or if another process keeps this one for longer than `seconds`.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(look_seconds)
        except OSError:
            return


def sync_directory(directory: Path) -> None:
    """Wait until storage has the directory's entries: a rename is not durable before."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
