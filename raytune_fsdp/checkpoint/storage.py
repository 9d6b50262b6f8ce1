"""Where the checkpoints of a run are: a mounted file system or an object store, with one small interface.

A checkpoint is a named directory of files. It is written as a draft, under names that nothing else uses, and others see
it when the draft is published, all of it at once. `posix.py` and `objects.py` implement that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

MANIFEST_FILE = "manifest.json"
"""The last file to be written; a directory without it is not a checkpoint."""
STATE_FILE = "state.json"
"""Everything that is not a tensor."""
INDEX_FILE = "tensors.json"
"""Which tensors there are, and in which files."""
MANIFEST_BYTES = 16 << 20
"""The largest manifest that is read: a file of a rank takes 100 bytes in it, and a hundred thousand ranks 10 MB."""
STATE_BYTES = 64 << 20
"""The largest state: that of a run over a hundred thousand files, with names and hashes, takes 20 MB; most, 5 kB."""
DAMAGED = ".damaged"
"""Suffix of what was set aside."""
_NAME = re.compile(r"step-([0-9]{8,18})\.a([0-9]{1,18})(\.r)?")


def directory_name(step: int, attempt: int, lasting: bool = True) -> str:
    """What a checkpoint is called. `lasting`: see `CommittedCheckpoint`."""
    return f"step-{step:08d}.a{attempt}{'' if lasting else '.r'}"


def named(name: str) -> tuple[int, int, bool] | None:
    """Step and attempt of the checkpoint of this name, and whether it lasts. None for a name that `directory_name` does
    not give, however near it is: what is under it is somebody else's."""
    match = _NAME.fullmatch(name)
    found = (int(match[1]), int(match[2]), match[3] is None) if match else None
    return found if found and directory_name(*found) == name else None


def at_once() -> None:
    """Nothing has to be done or waited for."""


class Sink(Protocol):
    """A new file. Once it is closed without an exception, its content is safe in the storage."""

    def write(self, piece: memoryview, /) -> object: ...


class StoredFile(Protocol):
    """A file of a checkpoint, read by position."""

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` from `offset` on. OSError if the file ends before that."""


class Draft(Protocol):
    """A checkpoint that is being written by several ranks."""

    def create(self, file: str) -> AbstractContextManager[Sink]:
        """A new file; the name must not be taken. May be called again after a failure if `again`."""

    @property
    def again(self) -> bool:
        """Whether writing a file may be tried again: true for storage with transient failures."""

    def publish(self, sizes: Mapping[str, int], manifest: str, before: Callable[[], None] = at_once) -> None:
        """Make it visible. Rank 0 calls this when all files are written; OSError unless they have these sizes.

        `before` is called at the last moment: what it raises keeps the checkpoint from becoming visible.
        """

    def discard(self) -> None:
        """Remove what was written, as far as possible. Never fails."""


class Readable(Protocol):
    """Where the large files of checkpoints are read from."""

    def where(self, name: str) -> str:
        """The checkpoint's path or URL, for messages."""

    def open(self, name: str, file: str) -> AbstractContextManager[StoredFile]:
        """Open a large file. UnsoundError if it is no regular file."""


class Storage(Readable, Protocol):
    """All checkpoints of a run."""

    location: str
    """Directory or URL."""

    def draft(self, name: str, serial: int) -> Draft:
        """A checkpoint that does not exist yet. Every save of an attempt has another `serial`."""

    def names(self) -> list[str]:
        """Names of all directories that have a manifest, in no order."""

    def has_damaged(self) -> bool:
        """Whether something was set aside here."""

    def sizes(self, name: str) -> dict[str, int]:
        """Sizes of all files of a checkpoint; empty if it does not exist. Links, pipes and directories are no files."""

    def read(self, name: str, file: str, limit: int) -> bytes:
        """Read a small file. UnsoundError if it is no regular file, or has more bytes than `limit`."""

    def set_aside(self, name: str) -> str:
        """Rename a damaged checkpoint so that it no longer counts; return its new location, for messages."""

    def remove(self, name: str) -> None:
        """Delete a checkpoint. At every moment it is either complete or not a checkpoint."""

    def clean(self) -> None:
        """Remove unfinished drafts. Only while nothing is being written here."""
