"""Checkpoints in an object store: S3, GCS, and whatever else pyarrow or fsspec open.

An object becomes visible only when it is complete, and cannot be renamed. So the files of each save have names of their
own, and the manifest, written last, makes a directory a checkpoint. Every rank reads and writes its own part.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import pyarrow.fs

from raytune_fsdp.base.file_systems import file_system
from raytune_fsdp.base.untrusted import UnsoundError, check_size
from raytune_fsdp.checkpoint.storage import (
    DAMAGED,
    INDEX_FILE,
    MANIFEST_BYTES,
    MANIFEST_FILE,
    PIECES,
    STAGING,
    STATE_FILE,
    Pinned,
    Sink,
    StoredFile,
    at_once,
    nobody,
    not_pinned,
    parse_directory_name,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
TRIES = 8
"""Tries of an operation. The pauses between them add up to 25 s on average; in each, the library below retries too."""
_TOGETHER_BYTES, _LEAST_TOGETHER_BYTES = 4 << 20, 1 << 16  # a request takes as long for a kilobyte as for a megabyte
_AHEAD_BYTES = 512 << 20
"""What is fetched ahead of all files together that are read in turn."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 20.0


def patiently(what: str, work: Callable[[], T]) -> T:
    """Repeat work that a store may refuse for a while: throttling, a lost node, a lost connection."""
    for attempt in range(TRIES):
        try:
            return work()
        except (FileNotFoundError, PermissionError):  # not transient
            raise
        except OSError as error:
            if attempt + 1 == TRIES:
                raise
            # Random by a factor of 0.5 to 1.5: ranks that were throttled together must not come back together.
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**attempt) * (0.5 + random.random())
            logger.info("%s: %s; again in %.1f s", what, error, pause)
            time.sleep(pause)
    raise AssertionError("unreachable")


class ObjectStorage:
    def __init__(self, location: str, files: int = 1) -> None:
        """`files`: how many are open at the same time; the more, the less is fetched ahead of each."""
        self.location = location.rstrip("/")
        self._ahead = max(_LEAST_TOGETHER_BYTES, min(_TOGETHER_BYTES, _AHEAD_BYTES // max(1, files)))

    def draft(self, name: str, serial: int) -> ObjectDraft:
        return ObjectDraft(self, name, serial)

    def names(self) -> list[str]:
        return [path.split("/")[0] for path in self.sizes("") if path.count("/") == 1 and path.endswith(_MANIFEST)]

    def has_damaged(self) -> bool:
        return any(path.endswith(DAMAGED) and parse_directory_name(path.split("/")[0]) for path in self.sizes(""))

    def where(self, name: str) -> str:
        return f"{self.location}/{name}"

    def sizes(self, name: str) -> dict[str, int]:
        """Return the size of every object below a directory, by its path from there. "": below the root."""
        top, system = self._path(name), self._system()
        if isinstance(system, pyarrow.fs.PyFileSystem):
            system.handler.fs.invalidate_cache()  # of what fsspec has listed before: other processes write, too
        selector = pyarrow.fs.FileSelector(top, allow_not_found=True, recursive=True)
        found = patiently(f"listing {self.where(name)}", lambda: system.get_file_info(selector))
        return {info.path[len(top) :].lstrip("/"): info.size for info in found if info.type == pyarrow.fs.FileType.File}

    def read(self, name: str, file: str, limit: int) -> bytes:
        def read() -> bytes:
            with self._system().open_input_file(self._path(name, file)) as source:
                check_size(source.size(), limit)
                content: bytes = source.read()
                return content

        return patiently(f"reading {self.where(name)}/{file}", read)

    @contextmanager
    def open(self, name: str, file: str) -> Iterator[StoredFile]:
        what = f"reading {self.where(name)}/{file}"
        with patiently(what, lambda: self._system().open_input_file(self._path(name, file))) as source:
            yield _ObjectSource(source, what, self._ahead)

    def set_aside(self, name: str) -> str:
        content = b""
        with suppress(UnsoundError):  # only a name to find it by; one that is too large to be a manifest is left out
            content = self.read(name, MANIFEST_FILE, MANIFEST_BYTES)
        self.put(name, MANIFEST_FILE + DAMAGED, content)
        self._delete(name, MANIFEST_FILE)
        return f"{self.where(name)}, whose manifest is now {MANIFEST_FILE}{DAMAGED}"

    def remove(self, name: str, needed: Callable[[], bool] = nobody) -> bool:
        manifest = None
        with suppress(UnsoundError):  # too large to be a manifest: nobody can use that checkpoint
            manifest = self.read(name, MANIFEST_FILE, MANIFEST_BYTES)
            self.put(name, _HIDDEN, manifest)  # nothing can be renamed, and this process may be killed before it ends
        self._delete(name, MANIFEST_FILE)  # first: from here on it is not a checkpoint
        if manifest is not None and needed():
            self.put(name, MANIFEST_FILE, manifest)
            self._delete(name, _HIDDEN)
            return False
        self._delete(name, _HIDDEN)  # before the others: what has it is whole
        self._delete_all(name)
        return True

    def clean(self, pinned: Pinned = not_pinned) -> None:
        below = self.sizes("")
        whole = {path.split("/")[0] for path in below if path.endswith((_MANIFEST, _MANIFEST + DAMAGED))}
        for name in {path.split("/")[0] for path in below if path.endswith(f"/{_HIDDEN}")}:
            if parse_directory_name(name) is None:
                continue
            if name not in whole and pinned(name):
                with suppress(UnsoundError):
                    self.put(name, MANIFEST_FILE, self.read(name, _HIDDEN, MANIFEST_BYTES))
                    whole.add(name)
            self._delete(name, _HIDDEN)
        for name in {path.split("/")[0] for path in below if "/" in path} - whole:
            if parse_directory_name(name):
                self._delete_all(name)

    @contextmanager
    def create(self, name: str, file: str) -> Iterator[Sink]:
        """Write a new object. It is complete once the `with` statement ends without an exception."""
        stream = self._system().open_output_stream(self._path(name, file))
        try:
            yield cast(Sink, stream)
        except BaseException:
            # fsspec's files close themselves when they are collected, which makes an object of what they have got. That
            # must not be after the next try has written the whole one.
            with suppress(Exception):
                stream.close()
            raise
        stream.close()

    def put(self, name: str, file: str, content: bytes) -> None:
        def put() -> None:
            with self.create(name, file) as sink:
                sink.write(memoryview(content))

        patiently(f"writing {self.where(name)}/{file}", put)

    def _delete(self, name: str, file: str) -> None:
        def delete() -> None:
            with suppress(FileNotFoundError):  # an earlier try did it, but its answer was lost
                self._system().delete_file(self._path(name, file))

        patiently(f"removing {self.where(name)}/{file}", delete)

    def _delete_all(self, name: str) -> None:
        patiently(f"removing {self.where(name)}", lambda: self._system().delete_dir(self._path(name)))

    def _system(self) -> Any:
        return file_system(self.location)[0]

    def _path(self, *parts: str) -> str:
        return "/".join(part for part in (file_system(self.location)[1].rstrip("/"), *parts) if part)


_MANIFEST = f"/{MANIFEST_FILE}"
_HIDDEN = f"{MANIFEST_FILE}{STAGING}"
"""The name of the manifest of a checkpoint while it is being removed: all other files are still there."""


@dataclass(frozen=True, slots=True)
class ObjectDraft:
    storage: ObjectStorage
    name: str
    serial: int
    again: bool = field(default=True, init=False)

    def create(self, file: str) -> Any:
        return self.storage.create(self.name, file)

    def publish(self, sizes: Mapping[str, int], manifest: str, before: Callable[[], None] = at_once) -> None:
        present = self.storage.sizes(self.name)
        lacking = {file: size for file, size in sizes.items() if present.get(file) != size}
        if lacking or MANIFEST_FILE in present:
            raise OSError(f"{self.storage.where(self.name)} holds {present}, but should hold {lacking}")
        before()
        self.storage.put(self.name, MANIFEST_FILE, manifest.encode())

    def discard(self) -> None:
        """Remove what was written, as far as possible.

        A later save of the same step has the same directory, and other ranks may be writing for it already. Index and
        state are rank 0's, which calls this before it writes those.
        """
        try:
            present = self.storage.sizes(self.name)
            if MANIFEST_FILE in present:  # it may exist although the store did not confirm it
                return
            for file in present:
                if file in (INDEX_FILE, STATE_FILE) or file.endswith(f"_{self.serial}{PIECES}"):
                    self.storage._delete(self.name, file)
        except Exception as error:  # each library below fsspec has errors of its own
            logger.warning("%s is left unfinished: %s", self.storage.where(self.name), error)


class _ObjectSource:
    """A file read by position. Small pieces are fetched together, `together` bytes at a time."""

    def __init__(self, file: Any, what: str, together: int) -> None:
        self._file = file
        self._what = what
        self._together = together
        self._ahead, self._ahead_from = b"", 0

    def read_into(self, offset: int, target: memoryview) -> None:
        if len(target) >= self._together:
            patiently(self._what, lambda: self._read(offset, target))
            return
        start = offset - self._ahead_from
        if not 0 <= start <= len(self._ahead) - len(target):
            self._ahead, self._ahead_from, start = patiently(self._what, lambda: self._read_ahead(offset)), offset, 0
            if len(self._ahead) < len(target):
                raise OSError(f"{self._what}: it ends at byte {offset + len(self._ahead)}")
        target[:] = self._ahead[start : start + len(target)]

    def _read(self, offset: int, target: memoryview) -> None:
        self._file.seek(offset)
        count = self._file.readinto(target)
        if count != len(target):
            raise OSError(f"{self._what}: it ends at byte {offset + count}")

    def _read_ahead(self, offset: int) -> bytes:
        self._file.seek(offset)
        content: bytes = self._file.read(self._together)
        return content
