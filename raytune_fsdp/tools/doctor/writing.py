"""Write to storage, and time it, here and on nodes. Imports little: a node imports this while a clock runs."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from raytune_fsdp.base.errors import ConfigError, in_one_line
from raytune_fsdp.launch.shared_storage import Token, check_seen

PREFIX = ".doctor-"
_FIRST_BYTES, _MOST_BYTES, _WRITING_SECONDS = 4 << 20, 128 << 20, 1.0
_PIECE = 4 << 20
_NODE_PATIENCE = 4.0
"""Seconds that a network file system may take to show a new file; a start allows 10."""


def write_speed(directory: Path, prefix: str, answered: Callable[[], None] = lambda: None) -> float:
    """Return the bytes a second that this directory takes: written and synced, so that no cache counts.

    `prefix`: of the names of the written files. `answered` is called after the first file.
    """
    seconds = _write(directory, prefix, _FIRST_BYTES)
    answered()
    if seconds > _WRITING_SECONDS:
        return _FIRST_BYTES / seconds
    # Enough that the start does not count, but never more than a second's worth at the first file's speed.
    size = min(_MOST_BYTES, max(_FIRST_BYTES, int(_FIRST_BYTES / seconds * _WRITING_SECONDS)))
    return size / _write(directory, prefix, size)


def _write(directory: Path, prefix: str, size: int) -> float:
    piece = os.urandom(_PIECE)  # zeros would be compressed, or never stored
    file = directory / f"{prefix}{uuid.uuid4().hex}"
    began = time.monotonic()
    try:
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as written:
            for _ in range(0, size, _PIECE):
                written.write(piece)
            os.fsync(written.fileno())
        return max(1e-6, time.monotonic() - began)
    finally:
        with suppress(OSError):
            file.unlink()


def own_prefix(token: Token) -> str:
    """Return the prefix of the names of files that this command writes, here and on nodes."""
    return f"{PREFIX}{token.text}-"


def as_text(token: Token) -> tuple[str, ...]:
    """Return a token as texts, for nodes, which may not have its class."""
    return str(token.path), token.text, token.who, token.node


def from_node(path: str, text: str, who: str, node: str, *, seen: Callable[[], None]) -> tuple[str | None, float]:
    """Return why this node does not see the token in the run's storage (None if it does), and how fast it writes there.

    `seen` is called once the token was read.
    """
    token = Token(Path(path), text, who, node, ())
    try:
        check_seen(token, by="a task", patience_seconds=_NODE_PATIENCE)
        seen()
        return None, write_speed(token.path.parent, own_prefix(token))
    except ConfigError as error:
        return str(error), 0.0
    except OSError as error:
        return f"run.storage={token.path.parent.parent}: it cannot be written there ({in_one_line(error)})", 0.0
