"""Hashes of the blocks of a file, by which everything that is read of it later is compared with what it was.

A file of the user's may be rewritten, truncated or replaced while a run reads it, and nothing but its content can tell:
a copy on another node has another inode and time, and a tool that restores times hides a change. So the blocks that a
row lies in are hashed whenever it is read, and wrong ones are never used.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from raytune_fsdp.base.bounded import Bounded
from raytune_fsdp.data.sources.source import CACHE_GONE, File, reading

BLOCK_BYTES = 1 << 14
"""Half a row of 16 KiB is read in vain on average, and 8 bytes a block are 0.05 % of the data."""

NAME = "blocks"
"""The file of hashes in a directory of the cache."""

_AT_ONCE = 512  # blocks: 8 MiB, which one read of a network file system brings
_HASH = np.dtype("<u8")
TABLES = Bounded(64)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Where the hashes of a file's blocks are: from number `first` on in a file in the cache."""

    path: str
    first: int = 0

    def hashes(self) -> Any:
        """All hashes in that file."""

        def make() -> Any:
            with reading(self.path, CACHE_GONE):
                return np.memmap(self.path, dtype=_HASH, mode="r").view(np.ndarray)

        return TABLES.get(self.path, make)

    def same(self, number: int, data: memoryview) -> bool:
        """Whether this is what was there, from block `number` on."""
        known = self.hashes()[self.first + number :]
        starts = range(0, len(data), BLOCK_BYTES)
        return all(xxhash.xxh3_64_intdigest(data[at : at + BLOCK_BYTES]) == known[i] for i, at in enumerate(starts))

    def hold(self, file: File, every: int) -> bool:
        """Whether the file still has this content, by every `every`-th block and the last."""
        last = (file.size - 1) // BLOCK_BYTES
        with reading(file.shown):
            fd = os.open(file.url, os.O_RDONLY)
            try:
                many = _AT_ONCE if every == 1 else 1
                return all(
                    self.same(number, memoryview(os.pread(fd, many * BLOCK_BYTES, number * BLOCK_BYTES)))
                    for number in (*range(0, last, every * many), last)
                )
            finally:
                os.close(fd)

    def forget(self) -> None:
        """Have the file prepared anew by the next command that opens it: what was prepared is of other content."""
        with suppress(OSError):
            Path(self.path).with_name("meta.json").unlink()


class BlockHashing:
    """Hashes a file as it is read: the whole, and its blocks."""

    def __init__(self) -> None:
        self._whole = xxhash.xxh3_128()
        self._block = xxhash.xxh3_64()
        self._in_block = 0
        self._blocks = array("Q")

    def update(self, piece: bytes) -> None:
        self._whole.update(piece)
        rest = memoryview(piece)
        while rest:
            part = rest[: BLOCK_BYTES - self._in_block]
            self._block.update(part)
            self._in_block += len(part)
            rest = rest[len(part) :]
            if self._in_block == BLOCK_BYTES:
                self._end_block()

    @property
    def content(self) -> str:
        return self._whole.hexdigest()

    def blocks(self) -> bytes:
        """The hashes of the blocks, once all has been read."""
        if self._in_block:
            self._end_block()
        return np.array(self._blocks, dtype=_HASH).tobytes()

    def _end_block(self) -> None:
        self._blocks.append(self._block.intdigest())
        self._block.reset()
        self._in_block = 0


def hash_blocks(read: Callable[[int], bytes], report: Callable[[int], None] | None = None) -> BlockHashing:
    """Read a file from its start to its end."""
    hashing, done = BlockHashing(), 0
    while piece := read(_AT_ONCE * BLOCK_BYTES):
        hashing.update(piece)
        done += len(piece)
        if report is not None:
            report(done)
    return hashing
