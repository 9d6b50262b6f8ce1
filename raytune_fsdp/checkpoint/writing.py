"""Write one rank's file of a checkpoint: its pieces one after another, hashed as they are written."""

from __future__ import annotations

import json
import logging
import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import IO, Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from raytune_fsdp.base.beat import beat
from raytune_fsdp.base.row_hashes import HashedRows, TensorRows
from raytune_fsdp.checkpoint.objects import patiently
from raytune_fsdp.checkpoint.storage import Draft, Sink
from raytune_fsdp.model.pieces.pieces import local_piece, piece_of
from raytune_fsdp.model.weights.source import all_finite
from raytune_fsdp.step.optim.update import Optimizer

logger = logging.getLogger(__name__)

# Which rank writes which piece of which tensor, and the index that says where each piece is. index.py reads that.
#
# Both follow from how the tensors are sharded, which does not change during an attempt, so they are worked out once,
# with the planner of torch.distributed.checkpoint. Two indexes are written. `tensors.json` is the one that is read
# here: JSON, which cannot execute anything. `.metadata` says the same as a pickle, for
# `torch.distributed.checkpoint.load`.

METADATA_FILE = ".metadata"

Span = tuple[int, int, int, int]
"""A piece in its rank's file: offset and length of what torch.save wrote, offset and length of the numbers in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceLayout:
    mine: tuple[str, ...]
    """The tensors whose piece this rank writes, in the order of its file. Replicated ones are shared out."""
    rows: Mapping[str, tuple[TensorRows, int]]
    """The rows of each tensor, and the first of this rank's piece."""
    everyone: tuple[tuple[MetadataIndex, ...], ...] = ()
    """On rank 0: the pieces of every rank, in the same order."""
    metadata: Metadata | None = None
    """On rank 0: shapes, types and pieces of all tensors."""

    def index(self, files: Sequence[str], spans: Sequence[Sequence[Span]]) -> bytes:
        """On rank 0: return `tensors.json` of a checkpoint whose ranks wrote these files, the pieces in order."""
        assert self.metadata is not None, "only rank 0 knows all ranks' pieces"
        where = {
            (index.fqn, index.offset): (file, start, size)
            for file, pieces, places in zip(files, self.everyone, spans, strict=True)
            for index, (_, _, start, size) in zip(pieces, places, strict=True)
        }
        tensors = {}
        for name, entry in self.metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata), f"{name} is not a tensor"
            places = {chunk.offsets: (chunk.sizes, where[name, chunk.offsets]) for chunk in entry.chunks}
            tensors[name] = {
                "dtype": str(entry.properties.dtype).removeprefix("torch."),
                "shape": list(entry.size),
                "pieces": [
                    {"offset": list(offset), "shape": list(shape), "file": file, "start": start, "bytes": size}
                    for offset, (shape, (file, start, size)) in places.items()
                ],
            }
        return json.dumps({"format": 1, "tensors": tensors}).encode()

    def metadata_file(self, files: Sequence[str], spans: Sequence[Sequence[Span]], checkpoint: str) -> bytes:
        """Return `.metadata` of the same checkpoint. Only on rank 0."""
        assert self.metadata is not None, "only rank 0 knows all ranks' pieces"
        entries = {
            index: _StorageInfo(file, offset, length)
            for file, pieces, places in zip(files, self.everyone, spans, strict=True)
            for index, (offset, length, _, _) in zip(pieces, places, strict=True)
        }
        whole = replace(
            self.metadata, storage_data=entries, storage_meta=StorageMeta(checkpoint_id=checkpoint), version="1.0.0"
        )
        return pickle.dumps(whole)


def chunk_of(tensor: torch.Tensor) -> ChunkStorageMetadata:
    """Return where this rank's piece is in the whole tensor.

    A DTensor is not asked as torch.distributed.checkpoint asks it: for rows that ranks which share a layer have cut
    unevenly, and that are sharded then, it says other offsets than the shards have (torch 2.13).
    """
    piece, size = piece_of(tensor), local_piece(tensor).size()
    # A piece without numbers is behind all others: where it begins another one may, too.
    first = piece.rows[0] if size.numel() or not tensor.ndim else tensor.shape[0]
    offsets = [first, piece.first_column, *[0] * tensor.ndim][: tensor.ndim]
    return ChunkStorageMetadata(torch.Size(offsets), size)


def _placed(item: WriteItem, tensor: torch.Tensor) -> WriteItem:
    if item.tensor_data is None or not isinstance(tensor, DTensor):
        return item
    chunk = chunk_of(tensor)
    return replace(
        item,
        index=MetadataIndex(item.index.fqn, chunk.offsets),
        tensor_data=replace(item.tensor_data, chunk=chunk),
    )


def make_layout(tensors: Mapping[str, torch.Tensor]) -> PieceLayout:
    """Return the layout of tensors sharded like these. Collective."""
    planner = DefaultSavePlanner()  # it also decides which rank writes a tensor that several ranks hold
    planner.set_up_planner(dict(tensors), is_coordinator=dist.get_rank() == 0)
    local = planner.create_local_plan()
    local = replace(local, items=[_placed(item, tensors[item.index.fqn]) for item in local.items])
    world = dist.get_world_size()
    plans: list[Any] = [None] * world
    dist.gather_object(local, plans if dist.get_rank() == 0 else None)
    names: list[Any] = [None] * world
    everyone: tuple[tuple[MetadataIndex, ...], ...] = ()
    metadata = None
    if dist.get_rank() == 0:
        plans, metadata = planner.create_global_plan(plans)
        everyone = tuple(tuple(item.index for item in plan.items) for plan in plans)
        names = [tuple(index.fqn for index in pieces) for pieces in everyone]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, names if dist.get_rank() == 0 else None)
    rows = {
        name: (TensorRows.of(name, tensor.dtype, tensor.shape), piece_of(tensor).rows[0])
        for name, tensor in tensors.items()
    }
    return PieceLayout(mine=mine[0], rows=rows, everyone=everyone, metadata=metadata)


# A copy of this rank's part of the state in host memory, so that training goes on while it is written.


_ALIGNMENT = 64  # bytes: a multiple of the size of every dtype, and a cache line


class Staging:
    """Memory for the pieces that this rank writes, allocated as one buffer at the first copy.

    A GPU copies on a stream of its own while the next step computes: whoever reads the pieces waits until they are
    `here`, and the optimizer changes nothing before that (`UpdatesAfterCopies`).
    """

    def __init__(self) -> None:
        self.pieces: dict[str, torch.Tensor] = {}
        """The copies, by name. They do not change until the next `copy`."""
        self._block = torch.empty(0, dtype=torch.uint8)
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, torch.Tensor], mine: Sequence[str]) -> None:
        """Copy the values of `mine` as they are now. On a CPU the caller waits."""
        now = {name: local_piece(tensors[name]) for name in mine}
        if not self.pieces:
            places, size = {}, 0
            for name, piece in now.items():
                places[name] = size
                size += -(-piece.nbytes // _ALIGNMENT) * _ALIGNMENT
            self._block = torch.empty(size, dtype=torch.uint8)
            device = next((piece.device for piece in now.values() if piece.is_cuda), None)
            if device is not None:
                self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                _pin(self, self._block, device)
            self.pieces = {name: self._view(places[name], piece) for name, piece in now.items()}
        if self._stream is None:
            for name, piece in self.pieces.items():
                piece.copy_(now[name])
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for name, piece in self.pieces.items():
                piece.copy_(now[name], non_blocking=True)
            self._copied = self._stream.record_event()

    def here(self) -> None:
        """Wait, on the host, for the copies. May be called from any thread."""
        if self._stream is not None and self._copied is not None:
            # A new thread is on the first GPU: the CUDA runtime may make a context there, of some 500 MB for each rank.
            with torch.cuda.device(self._stream.device):
                self._copied.synchronize()

    def hold_updates(self) -> None:
        """Make what the device computes from here on wait for the copies."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def _view(self, start: int, like: torch.Tensor) -> torch.Tensor:
        """Return a part of the buffer as a tensor with storage of its own: torch.save writes a view's whole storage."""
        if not like.numel():
            return torch.empty(like.shape, dtype=like.dtype)
        memory = memoryview(self._block.numpy())[start : start + like.nbytes]  # type: ignore[arg-type]
        return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)


def _pin(owner: Staging, block: torch.Tensor, device: torch.device) -> None:
    """Let a GPU copy into this memory while the host does something else, as long as its owner lives."""
    if not block.nbytes:
        return
    # Not torch's pinned memory, whose sizes are powers of two: 96 GiB, which an 8B has on one rank, would take 128.
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = runtime.cudaHostRegister(block.data_ptr(), block.nbytes, 0)
    if int(error) == 0:
        weakref.finalize(owner, lambda: runtime.cudaHostUnregister(block.data_ptr()))
        return
    # Copies are then slower, and the host waits for them. The error stays with CUDA until a kernel has reported it.
    logger.warning("%d bytes of host memory could not be pinned (CUDA error %d)", block.nbytes, int(error))
    with suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)


class UpdatesAfterCopies:
    """An optimizer that changes nothing that is still being copied."""

    def __init__(self, optimizer: Optimizer, staging: Staging) -> None:
        self._optimizer = optimizer
        self._staging = staging

    def init_state(self) -> None:
        self._optimizer.init_state()

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return self._optimizer.state_tensors()

    def step(self, lr_factor: float, found_inf: torch.Tensor) -> None:
        self._staging.hold_updates()
        self._optimizer.step(lr_factor, found_inf)


T = TypeVar("T")
_CHUNK_BYTES = 8 << 20  # hashed and written in turn; hashing takes 0.045 s of a save of 1.1 s (491 MB)


@dataclass(frozen=True, slots=True)
class Sum:
    """Size and hash of a file, to compare with what is read later."""

    bytes: int
    xxh3: str


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
        """Do nothing: torch.save requires this method."""

    @property
    def sum(self) -> Sum:
        return Sum(self.size, self._digest.hexdigest())


_HASHERS = 2
"""Threads that hash rows while a file is written: each about 1.3 GB/s, which few storages take from a rank."""

Hashes = dict[str, list[HashedRows]]
"""The hashed rows of each tensor."""


def write_pieces(
    draft: Draft, file: str, pieces: Mapping[str, torch.Tensor], layout: PieceLayout, *, hashes: bool
) -> tuple[Sum, list[Span], Hashes]:
    """Write this rank's file, each piece by torch.save, which is what torch.distributed.checkpoint reads.

    With `hashes`, the rows are hashed as well.
    """

    def write() -> tuple[Sum, list[Span], Hashes]:
        spans, found = [], {}
        with draft.create(file) as sink, ThreadPoolExecutor(_HASHERS) as threads:
            target = Hashing(sink)
            for name in layout.mine:
                piece, (rows, first) = pieces[name].cpu(), layout.rows[name]
                hashed = rows.hashed(first, piece, threads) if hashes else ()
                spans.append(_write_piece(target, piece, name))
                found[name] = [*hashed]  # before the next one: each may be a copy of what a GPU has
        return target.sum, spans, found

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


def hash_pieces(pieces: Mapping[str, torch.Tensor], layout: PieceLayout) -> dict[str, list[HashedRows]]:
    """Hash the rows of this rank's pieces as `write_pieces` does, without writing them."""
    found = {}
    with ThreadPoolExecutor(_HASHERS) as threads:
        for name in layout.mine:
            rows, first = layout.rows[name]
            found[name] = [*rows.hashed(first, pieces[name].cpu(), threads)]
            beat()
    return found


def joined_digests(layout: PieceLayout, hashes: Sequence[Mapping[str, Sequence[HashedRows]]]) -> dict[str, str]:
    """Return the digest of every tensor from what each rank has hashed of it."""
    return {
        name: rows.digest(part for each in hashes for part in each.get(name, ()))
        for name, (rows, _) in layout.rows.items()
    }
