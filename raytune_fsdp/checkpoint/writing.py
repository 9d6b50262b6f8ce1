"""One rank's file of a checkpoint: its pieces one after another, hashed as they are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeVar, cast

import numpy as np
import torch
import xxhash

from raytune_fsdp.checkpoint.layout import Span
from raytune_fsdp.checkpoint.objects import patiently
from raytune_fsdp.checkpoint.storage import Draft, Sink
from raytune_fsdp.model.weights.source import all_finite

T = TypeVar("T")
_CHUNK_BYTES = 8 << 20  # hashed and written in turn; hashing takes 0.045 s of a save of 1.1 s (491 MB)


@dataclass(frozen=True, slots=True)
class Sum:
    """Size and hash of a file, to compare with what is read later."""

    bytes: int
    xxh3: str


@dataclass(frozen=True, slots=True)
class WrittenFile:
    sum: Sum
    spans: tuple[Span, ...]


class NotFiniteError(Exception):
    """The state has an infinity or a NaN, so it is not worth a checkpoint."""


class Hashing:
    """A file that hashes what is written to it."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._digest = xxhash.xxh3_128()
        self.size = 0
        self.awaited = 0
        """An address in memory. `found` is the offset in the file at which the bytes at that address were written."""
        self.found: int | None = None
        self.failure: BaseException | None = None
        """The error of a write that failed: torch.save hides it in a RuntimeError."""

    def write(self, piece: Any) -> int:
        view = memoryview(piece).cast("B")
        # torch.save writes a zip, and passes the numbers of a piece uncopied: their address tells where they end up.
        if len(view) and np.frombuffer(view, dtype=np.uint8).ctypes.data == self.awaited:
            self.found = self.size
        try:
            for start in range(0, len(view), _CHUNK_BYTES):
                chunk = view[start : start + _CHUNK_BYTES]
                self._digest.update(chunk)
                self._sink.write(chunk)
        except BaseException as error:
            self.failure = error
            raise
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        """torch.save requires this."""

    @property
    def sum(self) -> Sum:
        return Sum(self.size, self._digest.hexdigest())


def write_pieces(draft: Draft, file: str, pieces: Mapping[str, torch.Tensor], order: Sequence[str]) -> WrittenFile:
    """Write a file of tensors, each by torch.save, which is what torch.distributed.checkpoint reads."""

    def write() -> WrittenFile:
        spans = []
        with draft.create(file) as sink:
            target = Hashing(sink)
            for name in order:
                spans.append(_write_piece(target, pieces[name].cpu(), name))
        return WrittenFile(target.sum, tuple(spans))

    return _tried(draft, file, write)


def _write_piece(target: Hashing, piece: torch.Tensor, name: str) -> Span:
    if not all_finite(piece):
        raise NotFiniteError(name)
    piece = piece.contiguous()
    if piece.untyped_storage().nbytes() != piece.nbytes:  # torch.save would write its whole storage
        piece = piece.clone()
    start, target.awaited, target.found = target.size, piece.data_ptr(), None
    try:
        torch.save(piece, cast(IO[bytes], target))
    except RuntimeError as error:
        raise target.failure or error from error
    if target.found is None and piece.nbytes:
        raise OSError(f"torch {torch.__version__} saves {name} in another way than this version expects")
    return start, target.size - start, target.found or start, piece.nbytes


def write_small(draft: Draft, file: str, content: bytes) -> Sum:
    """Write a small file."""

    def write() -> Sum:
        with draft.create(file) as sink:
            target = Hashing(sink)
            target.write(content)
        return target.sum

    return _tried(draft, file, write)


def _tried(draft: Draft, file: str, write: Callable[[], T]) -> T:
    return patiently(f"writing {file}", write) if draft.again else write()
