"""Where the checkpoints of a run are: a mounted file system or an object store, with one small interface.

A checkpoint is a named directory of files. It is written as a draft, under names that nothing else uses, and others see
it when the draft is published, all of it at once. `PosixStorage` and objects.py implement that.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Protocol, cast

from raytune_fsdp.base.durable import replace_at_once, sync_directory, write_durably
from raytune_fsdp.base.untrusted import MAX_VALUES, MIB, is_hollow, open_regular, read_file

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
XXH3 = re.compile("[0-9a-f]{32}")
"""A hash in a manifest or an index."""
PIECES = ".distcp"
"""Suffix of the files that hold tensors."""

# A piece takes 100 bytes and 4 values in its file's table, up to 200 bytes and 12 values in the index, and in its file
# over 1000 bytes more than its numbers: the zip that torch.save makes. So an index is never half as large as the files
# it describes, nor a table half as large as its file. An index of format 1 has every piece: 70 billion weights with
# their moments on 1000 ranks are 2.2 million, 330 MB of index for files of 840 GB.
_BYTES_PER_INDEX_BYTE = 2
_BYTES_PER_VALUE = 32
_INDEX_BYTES, _INDEX_VALUES = 512 * MIB, 50_000_000
"""The most bytes and values of any index, as the sizes may be those of files without content."""
PIECE_BYTES = 16 << 10
"""What a file may have of a piece besides its numbers: torch.save writes 1 to 2 kB, with its name."""

DAMAGED = ".damaged"
"""Suffix of what was set aside."""
_NAME = re.compile(r"step-([0-9]{8,18})\.a([0-9]{1,18})(\.r)?")


def directory_name(step: int, attempt: int, lasting: bool = True) -> str:
    """Return what a checkpoint is called. `lasting`: see `CommittedCheckpoint`."""
    return f"step-{step:08d}.a{attempt}{'' if lasting else '.r'}"


def parse_directory_name(name: str) -> tuple[int, int, bool] | None:
    """Return step and attempt of the checkpoint of this name, and whether it lasts.

    None for a name that `directory_name` does not give, however near it is: what is under it is somebody else's.
    """
    match = _NAME.fullmatch(name)
    found = (int(match[1]), int(match[2]), match[3] is None) if match else None
    return found if found and directory_name(*found) == name else None


def index_limit(sizes: Mapping[str, int]) -> int:
    """Return the most bytes that the index of these files may have."""
    return max(MIB, min(_INDEX_BYTES, _bytes_of_pieces(sizes) // _BYTES_PER_INDEX_BYTE))


def table_limit(size: int) -> int:
    """Return the most bytes that the table at the end of a file of this size may have."""
    return min(size, max(MIB, min(_INDEX_BYTES, size // _BYTES_PER_INDEX_BYTE)))


def index_values(sizes: Mapping[str, int]) -> int:
    """Return the most values that the index of these files may have."""
    return max(MAX_VALUES, min(_INDEX_VALUES, _bytes_of_pieces(sizes) // _BYTES_PER_VALUE))


def _bytes_of_pieces(sizes: Mapping[str, int]) -> int:
    return sum(size for file, size in sizes.items() if file.endswith(PIECES))


def at_once() -> None:
    """Do nothing: there is nothing to do or to wait for."""


def nobody() -> bool:
    """Say that nobody needs a checkpoint that is being removed."""
    return False


Pinned = Callable[[str], bool]
"""Whether another run needs the checkpoint of this name."""


def not_pinned(name: str) -> bool:
    """Say of every checkpoint that no other run needs it."""
    return False


class Sink(Protocol):
    """A new file. Once it is closed without an exception, its content is safe in the storage."""

    def write(self, piece: memoryview, /) -> object: ...


class StoredFile(Protocol):
    """A file of a checkpoint, read by position."""

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` from `offset` on. Raise OSError if the file ends before that."""


class Draft(Protocol):
    """A checkpoint that is being written by several ranks."""

    def create(self, file: str) -> AbstractContextManager[Sink]:
        """Create a file; the name must not be taken. May be called again after a failure if `again`."""

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
        """Return the checkpoint's path or URL, for messages."""

    def open(self, name: str, file: str) -> AbstractContextManager[StoredFile]:
        """Open a large file. Raise UnsoundError if it is no regular file."""


class Storage(Readable, Protocol):
    """All checkpoints of a run."""

    location: str
    """Directory or URL."""

    def draft(self, name: str, serial: int) -> Draft:
        """Begin a checkpoint that does not exist yet. Every save of an attempt has another `serial`."""

    def names(self) -> list[str]:
        """Return the names of all directories that have a manifest, in no order."""

    def has_damaged(self) -> bool:
        """Return whether something was set aside here."""

    def sizes(self, name: str) -> dict[str, int]:
        """Return the sizes of all files of a checkpoint; empty if it does not exist.

        Links, pipes and directories are no files.
        """

    def read(self, name: str, file: str, limit: int) -> bytes:
        """Read a small file. Raise UnsoundError if it is no regular file, or has more bytes than `limit`."""

    def put(self, name: str, file: str, content: bytes) -> None:
        """Add a small file to a checkpoint, all of it at once."""

    def set_aside(self, name: str) -> str:
        """Rename a damaged checkpoint so that it no longer counts; return its new location, for messages."""

    def remove(self, name: str, needed: Callable[[], bool] = nobody) -> bool:
        """Delete a checkpoint, and return True. At every moment it is either complete or not a checkpoint.

        `needed` is asked when others no longer see it: if it is, it is put back, and not deleted.
        """

    def clean(self, pinned: Pinned = not_pinned) -> None:
        """Remove unfinished drafts, and put back what `remove` has hidden, and not deleted, if it is `pinned`: it may
        have been killed meanwhile. Call this only while nothing is being written here."""


# Checkpoints on a file system that all nodes mount: NFS, Lustre, a local disk.
#
# A draft is a directory with another name, and publishing is its rename, the only operation of a file system that is
# atomic. Everything in the directory is on the disk before the rename.

STAGING = ".tmp"
"""Suffix of directories that are unfinished or being deleted."""
_LEFT = re.compile(rf"(.+?)(?:\.[0-9]+)?{re.escape(STAGING)}", re.DOTALL)
_ASIDE = re.compile(rf"(.+?)(?:\.[0-9]+)?{re.escape(DAMAGED)}", re.DOTALL)
_BUFFER_BYTES = 1 << 20
_SEEN_SECONDS, _LOOK_SECONDS = 30.0, 0.2
"""How long files that other nodes have written may be missing where rank 0 lists them: NFS keeps a directory's listing
for 30 s by default (acdirmin)."""


@dataclass(frozen=True, slots=True)
class PosixDraft:
    staging: Path
    final: Path
    again: bool = False
    """A full or broken disk is still full or broken a second later."""

    @contextmanager
    def create(self, file: str) -> Iterator[Sink]:
        self.staging.mkdir(parents=True, exist_ok=True)  # made by whichever rank comes first
        # x: never into a file that exists, as another writer might have it.
        with open(self.staging / file, "xb", buffering=_BUFFER_BYTES) as sink:
            yield cast(Sink, sink)
            sink.flush()
            os.fsync(sink.fileno())

    def publish(self, sizes: Mapping[str, int], manifest: str, before: Callable[[], None] = at_once) -> None:
        deadline = time.monotonic() + _SEEN_SECONDS
        while (present := {entry.name: entry.stat().st_size for entry in os.scandir(self.staging)}) != sizes:
            if time.monotonic() > deadline:
                raise OSError(f"{self.staging} holds {present}, but what was written there is {dict(sizes)}")
            time.sleep(_LOOK_SECONDS)
        write_durably(self.staging / MANIFEST_FILE, manifest)
        sync_directory(self.staging)
        before()  # not earlier: listing may take 30 s, and so may writing, on storage that is slow
        self.staging.rename(self.final)
        sync_directory(self.final.parent)

    def discard(self) -> None:
        shutil.rmtree(self.staging, ignore_errors=True)


class PosixStorage:
    def __init__(self, location: str) -> None:
        self.location = location
        self._root = Path(location)

    def draft(self, name: str, serial: int) -> PosixDraft:
        return PosixDraft(self._root / f"{name}.{serial}{STAGING}", self._root / name)

    def names(self) -> list[str]:
        try:
            entries = os.listdir(self._root)
        except FileNotFoundError:
            return []
        return [name for name in entries if os.path.exists(os.path.join(self.location, name, MANIFEST_FILE))]

    def has_damaged(self) -> bool:
        return self._root.is_dir() and any(_made_of_ours(_ASIDE, name) for name in os.listdir(self._root))

    def where(self, name: str) -> str:
        return str(self._root / name)

    def sizes(self, name: str) -> dict[str, int]:
        try:
            return {
                entry.name: facts.st_size
                for entry in os.scandir(self._root / name)
                if entry.is_file(follow_symlinks=False)
                and not is_hollow(entry, facts := entry.stat(follow_symlinks=False))
            }
        except FileNotFoundError:
            return {}

    def read(self, name: str, file: str, limit: int) -> bytes:
        return read_file(self._root / name / file, limit=limit)

    @contextmanager
    def open(self, name: str, file: str) -> Iterator[StoredFile]:
        with os.fdopen(open_regular(self._root / name / file), "rb", buffering=0) as source:
            yield _PosixSource(source)

    def put(self, name: str, file: str, content: bytes) -> None:
        replace_at_once(self._root / name / file, content)

    def set_aside(self, name: str) -> str:
        target, number = self._root / f"{name}{DAMAGED}", 1
        while target.exists():  # an attempt of this number has set this step aside before
            number += 1
            target = self._root / f"{name}.{number}{DAMAGED}"
        (self._root / name).rename(target)
        return str(target)

    def remove(self, name: str, needed: Callable[[], bool] = nobody) -> bool:
        doomed = self._root / f"{name}{STAGING}"
        (self._root / name).rename(doomed)  # first, so that half of a checkpoint is never taken for one
        if needed():
            doomed.rename(self._root / name)
            return False
        with suppress(OSError):
            (doomed / MANIFEST_FILE).unlink()  # before the others: what has one is whole
        shutil.rmtree(doomed, ignore_errors=True)  # `clean` removes what is left
        return True

    def clean(self, pinned: Pinned = not_pinned) -> None:
        for entry in sorted(self._root.iterdir()) if self._root.is_dir() else ():
            name = entry.name.removesuffix(STAGING)
            hidden = name != entry.name and parse_directory_name(name) is not None and (entry / MANIFEST_FILE).exists()
            if hidden and pinned(name) and not (self._root / name).exists():
                entry.rename(self._root / name)
            elif _made_of_ours(_LEFT, entry.name):
                shutil.rmtree(entry, ignore_errors=True)


def _made_of_ours(pattern: re.Pattern[str], name: str) -> bool:
    """Return whether this is the name of a checkpoint with an ending that is given here."""
    match = pattern.fullmatch(name)
    return match is not None and parse_directory_name(match[1]) is not None


class _PosixSource:
    def __init__(self, file: FileIO) -> None:
        self._handle = file.fileno()

    def read_into(self, offset: int, target: memoryview) -> None:
        done = 0
        while done < len(target):
            count = os.preadv(self._handle, [target[done:]], offset + done)
            if not count:
                raise OSError(f"the file ends at byte {offset + done}, before byte {offset + len(target)}")
            done += count
