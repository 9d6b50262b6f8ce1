"""Writes that a crash cannot undo (durably), or that nobody sees half done (at once)."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyarrow import Buffer


def write_durably(path: Path, text: str) -> None:
    """Write a small file, and wait until storage has its content."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, text: str) -> None:
    """Replace a small file: a crash leaves the old content or the new."""
    temporary = path.with_name(path.name + ".tmp")
    write_durably(temporary, text)
    temporary.replace(path)
    sync_directory(path.parent)  # without this the new content is safe, but perhaps not under its name


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
