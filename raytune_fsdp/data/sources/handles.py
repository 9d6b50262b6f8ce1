"""What a process holds open: files, maps, decoded tables. They are bounded, shared by all sources, never pickled."""

from __future__ import annotations

import io
import os
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from raytune_fsdp.base.bounded import Bounded
from raytune_fsdp.base.errors import DataError
from raytune_fsdp.data.sources.source import CACHE_GONE, File, reading

_HASH_BYTES = 8 << 20


# A process may usually open 1024 files, and other code needs some of them.
OPEN = Bounded(256)
DECODED = Bounded(256 << 20)


# Hashes that this process has computed, by path, time and size, so that each is computed once.
_HASHES: dict[tuple[str, int, int], str] = {}


@dataclass(frozen=True, slots=True)
class Stored:
    """A file on this machine, as it was when the dataset was opened."""

    shown: str
    path: str
    size: int
    content: str
    blocks: ChunkHashes | None = None
    """The hashes of what its content must be. None for files in the cache, which are never rewritten."""

    def open(self) -> OpenFile:
        """Return the file, which this process holds open. It is opened again if another file has taken its place."""
        key = ("file", self)
        made: list[OpenFile] = []  # if it is opened now, its place need not be checked

        def make() -> OpenFile:
            made.append(OpenFile(self))
            return made[0]

        opened: OpenFile = OPEN.get(key, make)
        if self.blocks is not None and not made and opened.replaced():
            OPEN.drop(key)
            opened = OPEN.get(key, make)
        return opened

    def map(self) -> pa.Buffer:
        """Map a file of the cache into memory. Never a user's file: reading what was cut off would kill the process."""
        assert self.blocks is None, self.path
        return OPEN.get(("map", self), self._map)

    def _map(self) -> pa.Buffer:
        OpenFile(self)
        with reading(self.shown):
            return pa.memory_map(self.path).read_buffer()


def keep_hashes(file: File, directory: Path, report: Callable[[int], None] | None = None) -> str:
    """Keep the hashes of a local file's chunks in a directory of the cache. Return the hash of the whole file.

    Raises DataError if it was written to since it was listed: what was copied before may be another content.
    """
    if file.remote:
        return ""
    hashing, done = ChunkHashing(), 0
    with reading(file.shown), open(file.url, "rb", buffering=0) as opened:
        while piece := opened.read(_AT_ONCE * CHUNK_BYTES):
            hashing.update(piece)
            done += len(piece)
            if report is not None:
                report(done)
    (directory / BLOCKS).write_bytes(hashing.blocks())
    check_unchanged(file)
    return hashing.content


def check_unchanged(file: File) -> None:
    """Raise DataError if the local file was written to since it was listed."""
    with reading(file.shown):
        now = os.stat(file.url)
    if (now.st_size, str(now.st_mtime_ns)) != (file.size, file.version):
        raise DataError(f"{file.shown}: is being written to; start again with the final file")


class OpenFile:
    """A file that is read by position (pread), because threads and forked processes share a handle's offset."""

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self._fd = -1
        way_out = CACHE_GONE if stored.blocks is None else f"all nodes must see it as {stored.path} (shared storage)"
        with reading(stored.path if stored.blocks is None else stored.shown, way_out):
            self._fd = os.open(stored.path, os.O_RDONLY)
            self._facts = os.fstat(self._fd)
        self._check_size(self._facts.st_size)

    def replaced(self) -> bool:
        """Return whether another file has taken its place, which must be opened. Raises if the size has changed.

        The time is not compared: it may change without the content, and the content is compared anyway.
        """
        try:
            now = os.stat(self._stored.path)
        except OSError:
            return False  # gone: the open file is still what it was
        self._check_size(now.st_size)
        return (now.st_dev, now.st_ino) != (self._facts.st_dev, self._facts.st_ino)

    def read(self, offset: int, length: int) -> bytes:
        hashes = self._stored.blocks
        if hashes is None:
            return self._read(offset, length)
        first = offset // CHUNK_BYTES
        start = first * CHUNK_BYTES
        end = min(-(-(offset + length) // CHUNK_BYTES) * CHUNK_BYTES, self._stored.size)
        raw = self._read(start, end - start)
        if not hashes.same(first, memoryview(raw)):
            hashes.forget()
            raise DataError(
                f"{self._stored.shown}: has other content than when it was opened; a dataset must not change during a "
                "run: start again with the final file"
            )
        return raw[offset - start : offset - start + length]

    def _read(self, offset: int, length: int) -> bytes:
        with reading(self._stored.shown):
            raw = os.pread(self._fd, length, offset)
            while len(raw) < length and (more := os.pread(self._fd, length - len(raw), offset + len(raw))):
                raw += more
        if len(raw) < length:
            raise DataError(
                f"{self._stored.shown}: ends before byte {offset + length}; a dataset must not change during a run: "
                "start again with the final file"
            )
        return raw

    def _check_size(self, size: int) -> None:
        if size != self._stored.size:
            raise DataError(
                f"{self._stored.shown}: has {size} bytes, had {self._stored.size} when it was opened; "
                "a dataset must not change during a run: start again with the final file"
            )

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class Reader(io.RawIOBase):
    """A Python file object for pyarrow, of which every byte that is read is compared with what it was."""

    def __init__(self, stored: Stored, most: int | None = None) -> None:
        """`most`: a single read of more bytes raises TooLarge."""
        self._stored = stored
        self._most = most
        self._offset = 0

    def read(self, length: int = -1) -> bytes:
        rest = max(0, self._stored.size - self._offset)
        length = rest if length < 0 else min(length, rest)
        if self._most is not None and length > self._most:
            raise TooLarge(length)
        raw = self._stored.open().read(self._offset, length) if length else b""
        self._offset += length
        return raw

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._offset = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._offset, os.SEEK_END: self._stored.size}[whence]
        return self._offset

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True


class TooLarge(MemoryError):
    """A single read would take more memory than is allowed for it."""


def hash_once(fd: int, path: str, progress: Callable[[int], None] | None = None) -> str:
    """Return `content_hash` of the file that is, or will be, at `path`. Each process computes it once."""
    facts = os.fstat(fd)
    key = (path, facts.st_mtime_ns, facts.st_size)
    if key not in _HASHES:
        _HASHES[key] = content_hash(fd, progress)
    return _HASHES[key]


def content_hash(fd: int, progress: Callable[[int], None] | None = None) -> str:
    """Return xxh3_128 of a file's bytes, in hex."""
    # 3.3 GB/s on one core: faster than most storage, so every file is hashed whole and not sampled.
    digest = xxhash.xxh3_128()
    offset = 0
    while chunk := os.pread(fd, _HASH_BYTES, offset):
        digest.update(chunk)
        offset += len(chunk)
        if progress is not None:
            progress(offset)
    return digest.hexdigest()


# Hashes of the chunks of a file, with which everything that is read from it later is compared.
#
# A user's file may be rewritten, truncated or replaced while a run reads it, and only its content can show that: a copy
# on another node has another inode and time, and a tool that restores times hides a change. So the chunks that a row
# lies in are hashed whenever the row is read, and wrong ones are never used.

CHUNK_BYTES = 1 << 14
"""The size of a chunk. For a row of 16 KiB, half of what is read is read in vain on average; the hashes, 8 bytes a
chunk, are 0.05 % of the data."""

BLOCKS = "blocks"
"""The file of hashes in a directory of the cache."""

_AT_ONCE = 512  # chunks: 8 MiB, which one read of a network file system brings
_HASH = np.dtype("<u8")
TABLES = Bounded(64)


@dataclass(frozen=True, slots=True)
class ChunkHashes:
    """The hashes of a file's chunks: from number `first` on in a file in the cache."""

    path: str
    first: int = 0

    def hashes(self) -> Any:
        """Return all hashes in that file."""

        def make() -> Any:
            with reading(self.path, CACHE_GONE):
                return np.memmap(self.path, dtype=_HASH, mode="r").view(np.ndarray)

        return TABLES.get(self.path, make)

    def same(self, number: int, data: memoryview) -> bool:
        """Return whether `data` is what the file had from chunk `number` on."""
        known = self.hashes()[self.first + number :]
        starts = range(0, len(data), CHUNK_BYTES)
        return all(xxhash.xxh3_64_intdigest(data[at : at + CHUNK_BYTES]) == known[i] for i, at in enumerate(starts))

    def hold(self, file: File, every: int) -> bool:
        """Return whether the file still has this content, judged by each `every`-th chunk and the last."""
        last = (file.size - 1) // CHUNK_BYTES
        with reading(file.shown), open(file.url, "rb") as source:
            many = _AT_ONCE if every == 1 else 1
            return all(
                self.same(number, memoryview(os.pread(source.fileno(), many * CHUNK_BYTES, number * CHUNK_BYTES)))
                for number in (*range(0, last, every * many), last)
            )

    def forget(self) -> None:
        """Make the next command that opens the file prepare it again: what was prepared has other content."""
        with suppress(OSError):
            Path(self.path).with_name("meta.json").unlink()


class ChunkHashing:
    """Hashes a file as it is read: the whole, and its chunks."""

    def __init__(self) -> None:
        self._whole = xxhash.xxh3_128()
        self._block = xxhash.xxh3_64()
        self._in_block = 0
        self._blocks = array("Q")

    def update(self, piece: bytes) -> None:
        self._whole.update(piece)
        rest = memoryview(piece)
        while rest:
            part = rest[: CHUNK_BYTES - self._in_block]
            self._block.update(part)
            self._in_block += len(part)
            rest = rest[len(part) :]
            if self._in_block == CHUNK_BYTES:
                self._end_block()

    @property
    def content(self) -> str:
        return self._whole.hexdigest()

    def blocks(self) -> bytes:
        """Return the hashes of the chunks, once all has been read."""
        if self._in_block:
            self._end_block()
        return np.array(self._blocks, dtype=_HASH).tobytes()

    def _end_block(self) -> None:
        self._blocks.append(self._block.intdigest())
        self._block.reset()
        self._in_block = 0
