"""Write one rank's file of a checkpoint: its pieces one after another, hashed as they are written."""

from __future__ import annotations

import json
import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import IO, Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray

from raytune_fsdp.base.beat import beat
from raytune_fsdp.base.row_hashes import Hashes, TensorRows
from raytune_fsdp.checkpoint.index import Box, PieceRun, Place, check_covered
from raytune_fsdp.checkpoint.manifest import FORMAT
from raytune_fsdp.checkpoint.objects import patiently
from raytune_fsdp.checkpoint.storage import Draft, Sink
from raytune_fsdp.model.pieces.pieces import local_piece, piece_of
from raytune_fsdp.model.weights.source import all_finite

logger = logging.getLogger(__name__)

# Which rank writes which piece of which tensor. index.py reads the index that says so.
#
# It follows from how the tensors are sharded, which does not change during an attempt, so it is worked out once, with
# the index: a save adds only the names of the files. Where its pieces are in its file, each rank writes behind them. So
# what rank 0 does in a save grows with the number of files, not with that of pieces. For a 70B with its moments on 512
# ranks these are 1.1 million: as JSON, and as a pickle for torch.distributed.checkpoint, they would keep Python's lock
# from training for many seconds (benchmarks/checkpoint_index.py).


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceLayout:
    mine: tuple[str, ...]
    """The tensors whose piece this rank writes, in the order of its file. Replicated ones are shared out."""
    rows: Mapping[str, tuple[TensorRows, int]]
    """The rows of each tensor, and the first of this rank's piece."""
    tensors: str = ""
    """On rank 0: what the index says of all tensors, in JSON."""

    @property
    def each_row(self) -> dict[str, TensorRows]:
        """The rows of each tensor."""
        return {name: rows for name, (rows, _) in self.rows.items()}

    def index(self, files: Sequence[tuple[str, int, str]]) -> bytes:
        """On rank 0: return `tensors.json` of a checkpoint with these files, each with bytes and hash of its table."""
        assert self.tensors, "only rank 0 knows all ranks' pieces"
        return f'{{"format": {FORMAT}, "files": {json.dumps(files)}, "tensors": {self.tensors}}}'.encode()


def box_of(tensor: torch.Tensor) -> Box:
    """Return where this rank's piece is in the whole tensor.

    A DTensor is not asked as torch.distributed.checkpoint asks it: for rows that ranks which share a layer have cut
    unevenly, and that are sharded then, it says other offsets than the shards have (torch 2.13).
    """
    piece, shape = piece_of(tensor), local_piece(tensor).shape
    return [piece.rows[0], piece.first_column, *[0] * tensor.ndim][: tensor.ndim], shape


_SMALL_BYTES = 4 << 10


def make_layout(tensors: Mapping[str, torch.Tensor]) -> PieceLayout:
    """Return the layout of tensors sharded like these. Collective."""
    boxes = np.array([_cut_of(*box_of(tensor)) for tensor in tensors.values()], np.int64).reshape(-1, 4)
    world, rank = dist.get_world_size(), dist.get_rank()
    everyone: list[Any] = [None] * world
    hashed = xxhash.xxh3_128_hexdigest("\n".join(tensors).encode())
    dist.gather_object((hashed, boxes), everyone if rank == 0 else None)
    mine: list[Any] = [None] * world
    index = ""
    if rank == 0:
        assert len({names for names, _ in everyone}) == 1, "all ranks have a part of the same tensors"
        shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        index, mine = arrange(shapes, np.stack([each for _, each in everyone]))
    own: list[Any] = [None]
    dist.scatter_object_list(own, mine if rank == 0 else None)
    rows = {
        name: (TensorRows.of(name, tensor.dtype, tensor.shape), piece_of(tensor).rows[0])
        for name, tensor in tensors.items()
    }
    names = [*tensors]
    return PieceLayout(mine=tuple(names[number] for number in own[0]), rows=rows, tensors=index)


def _cut_of(offset: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Return first row, rows, first column and columns of a box: along other axes nothing is cut."""
    (row, column), (rows, columns) = [*offset, 0, 0][:2], [*shape, 1, 1][:2]
    return [row, rows, column, columns]


def arrange(
    shapes: Mapping[str, tuple[torch.dtype, Sequence[int]]], boxes: NDArray[np.int64]
) -> tuple[str, list[list[int]]]:
    """Decide who writes which piece. Return the index of all tensors, in JSON, and the tensors of each rank, by number.

    `boxes`: first row, rows, first column and columns that each rank has of each tensor. Pieces without numbers are
    written by nobody.
    """
    load = np.zeros(len(boxes), np.int64)
    found: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
    later = []
    for number, (dtype, shape) in enumerate(shapes.values()):
        held = boxes[:, number]
        ranks = np.flatnonzero(held[:, 1] * held[:, 3])
        pieces, which, copies = np.unique(held[ranks], axis=0, return_inverse=True, return_counts=True)
        each = pieces[:, 1] * pieces[:, 3] * (math.prod(shape[2:]) * dtype.itemsize)
        # As many sets of ranks as there are of the rarest piece, each of which has all pieces.
        holders = ranks[np.argsort(which.reshape(-1), kind="stable")]
        sets = holders[np.cumsum(copies)[:, None] - copies[:, None] + np.arange(copies.min() if len(copies) else 1)]
        if sets.shape[1] == 1:
            found[number] = pieces, sets[:, 0]
            load[sets[:, 0]] += each
        else:
            later.append((int(each.sum()), number, pieces, sets, each))
    # What several ranks hold is written by those that have least to write, the largest first. All pieces of a tensor by
    # one set: then the index needs few entries. What is small, such as each parameter's count of steps, by the first:
    # every rank reads it, and would else read some of every file.
    for size, number, pieces, sets, each in sorted(later, key=lambda one: -one[0]):
        owners = sets[:, 0 if size < _SMALL_BYTES else int(np.argmin(load[sets].max(axis=0, initial=0)))]
        found[number] = pieces, owners
        load[owners] += each
    mine: list[list[int]] = [[] for _ in boxes]
    # What is small first, together: in an object store each part that is read costs a request, and 4 MiB.
    sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in shapes.values()]
    for number in sorted(range(len(shapes)), key=lambda each: sizes[each] >= _SMALL_BYTES):
        for rank in found[number][1].tolist():
            mine[rank].append(number)
    file_of = np.cumsum([bool(each) for each in mine]) - 1  # ranks that write nothing have no file
    index = {
        name: {
            "dtype": str(dtype).removeprefix("torch."),
            "shape": [*shape],
            "pieces": [asdict(run) for run in _runs(name, shape, found[number][0], file_of[found[number][1]])],
        }
        for number, (name, (dtype, shape)) in enumerate(shapes.items())
    }
    return json.dumps(index), mine


def _runs(name: str, shape: Sequence[int], pieces: NDArray[np.int64], files: NDArray[np.int64]) -> list[PieceRun]:
    """Join pieces that follow each other, of one shape, in files whose numbers grow by the same step."""
    order = np.lexsort((pieces[:, 0], pieces[:, 2]))
    pieces, files = pieces[order], files[order]
    row, rows, column, columns = pieces.T
    follows = (row[1:] == row[:-1] + rows[:-1]) & (rows[1:] == rows[:-1])
    follows &= (column[1:] == column[:-1]) & (columns[1:] == columns[:-1])
    steps = np.where(follows, np.diff(files), 0)
    runs, first = [], 0
    while first < len(pieces):
        count, step = 1, 1
        if first < len(steps) and steps[first] > 0:
            step = int(steps[first])
            others = np.flatnonzero(steps[first:] != step)
            count = 1 + (int(others[0]) if len(others) else len(steps) - first)
        offset = (int(row[first]), int(column[first]), *[0] * len(shape))[: len(shape)]
        sides = (int(rows[first]), int(columns[first]), *shape[2:])[: len(shape)]
        runs.append(PieceRun(offset, sides, count, int(files[first]), step))
        first += count
    check_covered(name, shape, [run.box for run in runs])
    return runs


# A copy of this rank's part of the state in host memory, so that training goes on while it is written.


_ALIGNMENT = 64  # bytes: a multiple of the size of every dtype, and a cache line


class Staging:
    """Memory for the pieces that this rank writes, allocated as one buffer at the first copy.

    A GPU copies on a stream of its own while the next step computes: whoever reads the pieces waits until they are
    `here`, and the optimizer changes nothing before that (`hold_updates`).
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPieces:
    """A rank's file."""

    sum: Sum
    table: tuple[int, str]
    """How many bytes at its end say where its pieces are, and their hash."""
    hashes: Hashes


def write_pieces(
    draft: Draft, file: str, pieces: Mapping[str, torch.Tensor], layout: PieceLayout, *, hashes: bool
) -> WrittenPieces:
    """Write this rank's file, each piece by torch.save, which is what torch.distributed.checkpoint reads.

    With `hashes`, the rows are hashed as well.
    """

    def write() -> WrittenPieces:
        places, found = {}, {}
        with draft.create(file) as sink, ThreadPoolExecutor(_HASHERS) as threads:
            target = Hashing(sink)
            for name in layout.mine:
                piece, (rows, first) = pieces[name].cpu(), layout.rows[name]
                hashed = rows.hashed(first, piece, threads) if hashes else ()
                places[name] = _write_piece(target, piece, name)
                found[name] = [*hashed]  # before the next one: each may be a copy of what a GPU has
            table = json.dumps(places).encode()
            target.write(table)
        return WrittenPieces(sum=target.sum, table=(len(table), xxhash.xxh3_128_hexdigest(table)), hashes=found)

    return _tried(draft, file, write)


def _write_piece(target: Hashing, piece: torch.Tensor, name: str) -> Place:
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
    if target.found is None:
        raise OSError(f"torch {torch.__version__} saves {name} in another way than this version expects")
    return target.found, start, target.size - start


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


def hash_pieces(pieces: Mapping[str, torch.Tensor], layout: PieceLayout) -> Hashes:
    """Hash the rows of this rank's pieces as `write_pieces` does, without writing them."""
    found = {}
    with ThreadPoolExecutor(_HASHERS) as threads:
        for name in layout.mine:
            rows, first = layout.rows[name]
            found[name] = [*rows.hashed(first, pieces[name].cpu(), threads)]
            beat()
    return found
