"""Writing to storage so that it is there after a crash."""

from __future__ import annotations

import os
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Write a small file and wait until storage has its content."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, text: str) -> None:
    """Write a small file under its name at once: a crash leaves the old content or the new."""
    temporary = path.with_name(path.name + ".tmp")
    write_durably(temporary, text)
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Wait until storage has the directory's entries: a rename is not durable before that."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
