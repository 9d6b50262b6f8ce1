"""Read the tensors of a committed checkpoint; each rank reads what it needs.

Nothing in a checkpoint is ever executed: the index is JSON, and only the numbers of the pieces are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from raytune_fsdp.base.beat import beat
from raytune_fsdp.base.collectives import on_all_ranks
from raytune_fsdp.base.errors import ResumeError, TransientError
from raytune_fsdp.base.untrusted import reason
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, verify
from raytune_fsdp.checkpoint.contents import tensors_of
from raytune_fsdp.checkpoint.index import Box, Index, parse_index
from raytune_fsdp.checkpoint.location import storage_at
from raytune_fsdp.checkpoint.manifest import read_manifest
from raytune_fsdp.checkpoint.storage import INDEX_FILE, MANIFEST_FILE, Readable, Storage, StoredFile, index_limit
from raytune_fsdp.checkpoint.writing import box_of
from raytune_fsdp.model.pieces.pieces import local_piece
from raytune_fsdp.step.optim.update import Optimizer


def read_index(storage: Storage, name: str) -> Index:
    """Return the index of a checkpoint, checked against the sizes in its manifest."""
    file, kind = MANIFEST_FILE, "a manifest"
    try:
        sizes = read_manifest(storage, name).sizes
        file, kind = INDEX_FILE, "an index"
        return parse_index(storage.read(name, file, index_limit(sizes)), sizes)
    except OSError as error:
        raise TransientError(f"{storage.where(name)}/{file} could not be read: {error}") from error
    except ValueError as error:
        raise ResumeError(
            f"{storage.where(name)}/{file} is not {kind} of a checkpoint ({reason(error)}); use another checkpoint, or "
            "the version that wrote this one"
        ) from error


def compare(tensors: Mapping[str, torch.Tensor], index: Index, where: str, *, whole: bool) -> None:
    """Refuse a checkpoint if one of these tensors is missing or differs there; if `whole`, also if it has others."""
    problems = [f"{name} is missing" for name in tensors if name not in index.tensors]
    if whole:
        problems += [f"{name} is not part of this model" for name in index.tensors if name not in tensors]
    for name, tensor in tensors.items():
        entry = index.tensors.get(name)
        if entry is not None and (entry.shape, entry.dtype) != (tensor.shape, tensor.dtype):
            problems.append(
                f"{name} is {list(entry.shape)} {entry.dtype} there, {list(tensor.shape)} {tensor.dtype} here"
            )
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ResumeError(f"checkpoint {where} does not fit this model and optimizer: {problems[0]}{more}")


@torch.no_grad()
def read_tensors(
    tensors: Mapping[str, torch.Tensor],
    storage: Readable,
    name: str,
    *,
    index: Index,
    whole: bool = True,
) -> None:
    """Fill `tensors`; of DTensors, this rank's part. Nothing is cast or missing; if `whole`, nothing is left over."""
    compare(tensors, index, storage.where(name), whole=whole)
    _read_items([(each, local_piece(tensor), box_of(tensor)) for each, tensor in tensors.items()], storage, name, index)


@torch.no_grad()
def read_rows(target: torch.Tensor, start: int, storage: Readable, name: str, tensor: str, index: Index) -> None:
    """Fill `target` with the rows of a tensor from `start` on; a tensor without dimensions is read whole."""
    offset = [start, *[0] * (target.ndim - 1)][: target.ndim]
    _read_items([(tensor, target, (offset, target.shape))], storage, name, index)


@dataclass(slots=True, kw_only=True)
class _ReadItem:
    """What is read of one stored piece, and into which part of which tensor."""

    tensor: str
    piece: Box
    target: torch.Tensor
    first: list[int]
    """Where it begins in the stored piece; it has the shape of `target`."""


def _read_items(wanted: Sequence[tuple[str, torch.Tensor, Box]], storage: Readable, name: str, index: Index) -> None:
    """Fill local tensors, each of which is a box of a stored one. File by file, each from its beginning to its end."""
    by_file: dict[int, list[_ReadItem]] = {}
    for tensor, target, box in wanted:
        if target.numel():
            for number, piece in index.tensors[tensor].overlapping(*box):
                by_file.setdefault(number, []).append(_item(tensor, piece, target, box))
    room = _Room()
    file = ""
    try:
        for number, items in sorted(by_file.items()):
            file = index.files[number].name
            with storage.open(name, file) as source:
                places = index.places_in(number, source)
                starts = [places[item.tensor, tuple(item.piece[0])][0] for item in items]
                for start, item in sorted(zip(starts, items, strict=True), key=lambda each: each[0]):
                    beat()
                    _read(source, start, item, room)
    except OSError as error:
        raise TransientError(f"checkpoint {storage.where(name)} could not be read: {error}") from error
    except ValueError as error:
        raise ResumeError(
            f"checkpoint {storage.where(name)}: {file} is not what was written ({reason(error)}); use another one"
        ) from error


def _item(tensor: str, piece: Box, target: torch.Tensor, box: Box) -> _ReadItem:
    """Cut what a stored piece and a box have in common out of both."""
    first = []
    for axis, (stored, side, mine, length) in enumerate(zip(*piece, *box, strict=True)):
        begin, end = max(stored, mine), min(stored + side, mine + length)
        target = target.narrow(axis, begin - mine, end - begin)
        first.append(begin - stored)
    return _ReadItem(tensor=tensor, piece=piece, target=target, first=first)


class _Room:
    """Memory that is used again for one piece after another."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def of(self, size: int) -> torch.Tensor:
        if self._memory.numel() < size:
            self._memory = torch.empty(0, dtype=torch.uint8)  # frees the old memory before new is allocated
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory[:size]


def _read(source: StoredFile, start: int, item: _ReadItem, room: _Room) -> None:
    """Read what a tensor needs of a stored piece; straight into its memory, if that is contiguous."""
    target, first, shape = item.target, item.first, torch.Size(item.piece[1])
    if shape and target.shape[1:] == shape[1:]:  # whole rows: contiguous in the file, so nothing else is read
        start, shape = start + first[0] * (shape[1:].numel() * target.element_size()), target.shape
        first = [0] * len(shape)
    if target.device.type == "cpu" and target.is_contiguous() and shape == target.shape:
        source.read_into(start, _memory_of(target))
        return
    raw = room.of(shape.numel() * target.element_size())
    source.read_into(start, _memory_of(raw))
    stored = raw.view(target.dtype).view(shape)
    for axis, length in enumerate(target.shape):
        stored = stored.narrow(axis, first[axis], length)
    target.copy_(stored)


def _memory_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


# Load a committed checkpoint into model and optimizer, verified and read by all ranks together.


def load_into(model: PreTrainedModel, optimizer: Optimizer, checkpoint: CommittedCheckpoint) -> None:
    """Read the tensors of a committed checkpoint into model and optimizer. Collective."""
    optimizer.init_state()
    storage = storage_at(checkpoint.root)
    tensors = tensors_of(model, optimizer)
    on_all_ranks(lambda: read_tensors(tensors, storage, checkpoint.name, index=read_index(storage, checkpoint.name)))


def verify_together(checkpoint: CommittedCheckpoint, *, hashes: bool, only_rank0: bool = False) -> str | None:
    """Return the problem with a committed checkpoint, the same on all ranks; each hashes a part of the files.
    Collective."""
    share = (0, 1) if only_rank0 else (dist.get_rank(), dist.get_world_size())

    def look() -> str | None:
        return verify(checkpoint, hashes=hashes, share=share) if dist.get_rank() == 0 or not only_rank0 else None

    return next(filter(None, on_all_ranks(look)), None)
