"""Checkpoints on a file system that all nodes mount: NFS, Lustre, a local disk.

A draft is a directory with another name, and publishing is its rename, the only operation of a file system that is
atomic. Everything in the directory is on the disk before the rename.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import cast

from raytune_fsdp.base.durable import sync_directory, write_durably
from raytune_fsdp.base.untrusted import is_hollow, open_regular, read_file
from raytune_fsdp.checkpoint.storage import DAMAGED, MANIFEST_FILE, Sink, StoredFile, at_once, named

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

    def set_aside(self, name: str) -> str:
        target, number = self._root / f"{name}{DAMAGED}", 1
        while target.exists():  # an attempt of this number has set this step aside before
            number += 1
            target = self._root / f"{name}.{number}{DAMAGED}"
        (self._root / name).rename(target)
        return str(target)

    def remove(self, name: str) -> None:
        doomed = self._root / f"{name}{STAGING}"
        (self._root / name).rename(doomed)  # first, so that half of a checkpoint is never taken for one
        shutil.rmtree(doomed, ignore_errors=True)  # `clean` removes what is left

    def clean(self) -> None:
        if self._root.is_dir():
            for entry in self._root.iterdir():
                if _made_of_ours(_LEFT, entry.name):
                    shutil.rmtree(entry, ignore_errors=True)


def _made_of_ours(pattern: re.Pattern[str], name: str) -> bool:
    """Whether this is the name of a checkpoint with an ending that is given here."""
    match = pattern.fullmatch(name)
    return match is not None and named(match[1]) is not None


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
