"""What a process holds open: files, maps, decoded tables. Bounded, shared by all sources, never pickled."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import xxhash

from raytune_fsdp.bounded import Bounded
from raytune_fsdp.data.sources.source import CACHE_GONE, File, reading, unreadable
from raytune_fsdp.errors import DataError

_HASH_BYTES = 8 << 20


# A process usually may open 1024 files, and the rest of it needs some.
OPEN = Bounded(256)
DECODED = Bounded(256 << 20)


# Hashes that this process has computed, by path, time and size, however often a file is opened.
_HASHES: dict[tuple[str, int, int], str] = {}


@dataclass(frozen=True, slots=True)
class Stored:
    """A file on this machine, as it was when the dataset was opened."""

    shown: str
    path: str
    size: int
    mtime_ns: int | None
    """None for files in the cache, which are never rewritten."""
    content: str

    def check(self, fd: int) -> None:
        """Raise DataError if the file has changed since."""
        now = os.fstat(fd)
        if now.st_size != self.size:
            raise DataError(
                f"{self.shown}: has {now.st_size} bytes, had {self.size} when it was opened; "
                "a dataset must not change during a run: start again with the final file"
            )
        # Another node may have a copy with the same content but another mtime, so only the content can tell.
        if self.mtime_ns not in (None, now.st_mtime_ns) and self.content != hash_once(fd, self.path):
            raise DataError(
                f"{self.shown}: has other content than when it was opened; "
                "a dataset must not change during a run: start again with the final file"
            )

    def open(self) -> OpenFile:
        """The file, held open by this process."""
        opened: OpenFile = OPEN.get(("file", self), lambda: OpenFile(self))
        return opened

    def map(self) -> pa.Buffer:
        """The file, mapped into memory."""
        return OPEN.get(("map", self), self._map)

    def _map(self) -> pa.Buffer:
        OpenFile(self)
        with reading(self.shown):
            return pa.memory_map(self.path).read_buffer()


def local_file(file: File, content: str) -> Stored:
    """A local file that is read in place."""
    return Stored(file.shown, file.url, file.size, int(file.version), content)


def check_unchanged(file: File) -> None:
    """Raise DataError if the local file was written to since it was listed."""
    with reading(file.shown):
        now = os.stat(file.url)
    if (now.st_size, str(now.st_mtime_ns)) != (file.size, file.version):
        raise DataError(f"{file.shown}: is being written to; start again with the final file")


class OpenFile:
    """A file read by position (pread), because threads and forked processes share a handle's offset."""

    def __init__(self, stored: Stored) -> None:
        self._shown = stored.shown
        self._fd = -1
        in_cache = stored.mtime_ns is None
        way_out = CACHE_GONE if in_cache else f"all nodes must see it as {stored.path} (shared storage)"
        with reading(stored.path if in_cache else stored.shown, way_out):
            self._fd = os.open(stored.path, os.O_RDONLY)
            stored.check(self._fd)

    def read(self, offset: int, length: int) -> bytes:
        try:
            raw = os.pread(self._fd, length, offset)
            while len(raw) < length and (more := os.pread(self._fd, length - len(raw), offset + len(raw))):
                raw += more
        except OSError as error:
            raise unreadable(self._shown, error) from error
        if len(raw) < length:
            raise DataError(
                f"{self._shown}: ends before byte {offset + length}; a dataset must not change during a run: "
                "start again with the final file"
            )
        return raw

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def hash_once(fd: int, path: str, progress: Callable[[int], None] | None = None) -> str:
    """`content_hash` of the file that is, or will be, at `path`. Each process computes it once."""
    facts = os.fstat(fd)
    key = (path, facts.st_mtime_ns, facts.st_size)
    if key not in _HASHES:
        _HASHES[key] = content_hash(fd, progress)
    return _HASHES[key]


def content_hash(fd: int, progress: Callable[[int], None] | None = None) -> str:
    """xxh3_128 of a file's bytes, in hex."""
    # 3.3 GB/s on one core: faster than most storage, so every file is hashed whole and not sampled.
    digest = xxhash.xxh3_128()
    offset = 0
    while chunk := os.pread(fd, _HASH_BYTES, offset):
        digest.update(chunk)
        offset += len(chunk)
        if progress is not None:
            progress(offset)
    return digest.hexdigest()
