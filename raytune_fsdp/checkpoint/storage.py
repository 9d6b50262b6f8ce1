"""Where the checkpoints of a run lie: a mounted file system or an object store, behind one small interface.

A checkpoint is a directory of files with a name. It is written as a draft, under names nobody else uses, and is there
for others when the draft is published, all of it at once. `posix.py` and `objects.py` tell how.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

MANIFEST_FILE = "manifest.json"
"""The last file of a checkpoint to be written; a directory without it is none."""
STATE_FILE = "state.json"
"""Everything that is not a tensor."""
INDEX_FILE = "tensors.json"
"""Which tensors there are, and where."""
DAMAGED = ".damaged"
"""Behind the name of what was set aside."""


class Sink(Protocol):
    """A new file. When it is closed without an exception, its content is with the storage for good."""

    def write(self, piece: memoryview, /) -> object: ...


class StoredFile(Protocol):
    """A file of a checkpoint, read by position."""

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` from `offset` on. OSError where the file ends before."""


class Draft(Protocol):
    """A checkpoint that is being written, by several ranks at once."""

    def create(self, file: str) -> AbstractContextManager[Sink]:
        """A new file. It is an error if there is one of this name. May be called again after a failure, if `again`."""

    @property
    def again(self) -> bool:
        """Whether a file that could not be written may be tried again: the storage is of the kind that says no and
        means later."""

    def publish(self, sizes: Mapping[str, int], manifest: str) -> None:
        """Make it visible: rank 0, when all files are there. OSError if they are not, with these sizes."""

    def discard(self) -> None:
        """Remove what was written, as far as that is possible now. Never fails."""


class Readable(Protocol):
    """Where the large files of checkpoints are read from."""

    def where(self, name: str) -> str:
        """For people."""

    def open(self, name: str, file: str) -> AbstractContextManager[StoredFile]:
        """A large file."""


class Storage(Readable, Protocol):
    """All checkpoints of a run."""

    location: str
    """For people, and to open it again."""

    def draft(self, name: str, serial: int) -> Draft:
        """A checkpoint that is not there yet. `serial` is another one at every try."""

    def names(self) -> list[str]:
        """Of all directories that have a manifest, in no order."""

    def has_damaged(self) -> bool:
        """Whether something was set aside here."""

    def sizes(self, name: str) -> dict[str, int]:
        """Of all its files; empty if there is no such checkpoint."""

    def read(self, name: str, file: str) -> bytes:
        """A small file, whole."""

    def set_aside(self, name: str) -> str:
        """Take a damaged checkpoint out of the way, so that it is none; where it is now, for people."""

    def remove(self, name: str) -> None:
        """Delete a checkpoint. At every moment it is whole, or none."""

    def clean(self) -> None:
        """Remove what others have left unfinished. Only while nobody writes here."""
