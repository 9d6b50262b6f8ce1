"""Writes that a crash cannot undo (durably), or that nobody sees half done (at once)."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyarrow import Buffer


# A group may read and write, if the umask lets it: runs live on storage that people share.
_PRIVATE = 0o660


def write_durably(path: Path, text: str, *, private: bool = False) -> None:
    """Write a small file, and wait until storage has its content. `private`: a new file is not for everybody."""
    opener = (lambda name, flags: os.open(name, flags, _PRIVATE)) if private else None
    with open(path, "w", encoding="utf-8", opener=opener) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, text: str, *, private: bool = False) -> None:
    """Replace a small file: a crash leaves the old content or the new. `private`: only owner and group may read it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # one that a crash left keeps its own permissions; a link leads elsewhere
    write_durably(temporary, text, private=private)
    temporary.replace(path)
    sync_directory(path.parent)  # without this the new content is safe, but perhaps not under its name


def keep_private(path: Path) -> None:
    """Make sure that a file exists, and that only its owner and group can read it, where storage has permissions."""
    with suppress(OSError):  # the file is another user's, or storage has no permissions
        handle = os.open(path, os.O_RDWR | os.O_CREAT, _PRIVATE)
        try:
            os.fchmod(handle, os.fstat(handle).st_mode & 0o770)
        finally:
            os.close(handle)


def replace_at_once(path: Path, *parts: bytes | Buffer) -> None:
    """Replace a file, even if others do the same; readers see one whole version. Does not wait for storage."""
    # A name of its own: writers on several nodes may have the same process id.
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with open(temporary, "wb") as file:
            for part in parts:
                file.write(part)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_directory(directory: Path) -> None:
    """Wait until storage has the directory's entries: a rename is not durable before that."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
