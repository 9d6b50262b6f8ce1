"""Read the tensors of a committed checkpoint; each rank reads what it needs.

Nothing in a checkpoint is ever executed: the index is JSON, and only the numbers of the pieces are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from transformers import PreTrainedModel

from raytune_fsdp.base.beat import beat
from raytune_fsdp.base.collectives import on_all_ranks
from raytune_fsdp.base.errors import ResumeError, TransientError
from raytune_fsdp.base.untrusted import UnsoundError, reason
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, verify
from raytune_fsdp.checkpoint.contents import tensors_of
from raytune_fsdp.checkpoint.index import Index, Place, parse_index
from raytune_fsdp.checkpoint.location import storage_at
from raytune_fsdp.checkpoint.manifest import index_limit, read_manifest
from raytune_fsdp.checkpoint.storage import INDEX_FILE, MANIFEST_FILE, Readable, Storage, StoredFile
from raytune_fsdp.checkpoint.writing import chunk_of
from raytune_fsdp.model.pieces.pieces import local_piece
from raytune_fsdp.step.optim.update import Optimizer


def read_index(storage: Storage, name: str) -> Index:
    """Return the index of a checkpoint, checked against the sizes in its manifest."""
    file, kind = MANIFEST_FILE, "a manifest"
    try:
        sizes = {each: size for each, (size, _) in read_manifest(storage, name).items()}
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
        if entry is not None and (entry.size, entry.properties.dtype) != (tensor.shape, tensor.dtype):
            problems.append(
                f"{name} is {list(entry.size)} {entry.properties.dtype} there, {list(tensor.shape)} {tensor.dtype} here"
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
    items = [
        item
        for each, tensor in tensors.items()
        for item in create_read_items_for_chunk_list(each, index.tensors[each], [chunk_of(tensor)])
    ]
    _read_items(items, tensors, storage, name, index)


@torch.no_grad()
def read_rows(target: torch.Tensor, start: int, storage: Readable, name: str, tensor: str, index: Index) -> None:
    """Fill `target` with the rows of a tensor from `start` on; a tensor without dimensions is read whole."""
    offset = torch.Size([start, *[0] * (target.ndim - 1)][: target.ndim])
    items = create_read_items_for_chunk_list(
        tensor, index.tensors[tensor], [ChunkStorageMetadata(offset, target.size())]
    )
    _read_items(items, {tensor: target}, storage, name, index)


def _read_items(
    found: Sequence[ReadItem], tensors: Mapping[str, torch.Tensor], storage: Readable, name: str, index: Index
) -> None:
    """Read file by file, each from its beginning to its end."""
    by_file: dict[str, list[tuple[Place, ReadItem]]] = {}
    for item in found:
        place = index.places[item.storage_index]
        by_file.setdefault(place[0], []).append((place, item))
    room = _Room()
    file = ""
    try:
        for file, items in by_file.items():
            items.sort(key=lambda each: each[0][1])
            with storage.open(name, file) as source:
                for place, item in items:
                    beat()
                    _read(source, place, index, item, tensors[item.dest_index.fqn], room)
    except OSError as error:
        raise TransientError(f"checkpoint {storage.where(name)} could not be read: {error}") from error
    except UnsoundError as error:
        raise ResumeError(f"checkpoint {storage.where(name)}: {file} {error}; use another checkpoint") from error


class _Room:
    """Memory that is used again for one piece after another."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def of(self, size: int) -> torch.Tensor:
        if self._memory.numel() < size:
            self._memory = torch.empty(0, dtype=torch.uint8)  # frees the old memory before new is allocated
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory[:size]


def _read(source: StoredFile, place: Place, index: Index, item: ReadItem, tensor: torch.Tensor, room: _Room) -> None:
    """Read what a tensor needs of a stored piece; straight into its memory, if that is contiguous."""
    target = local_piece(tensor)
    for axis, length in enumerate(item.lengths):
        target = target.narrow(axis, item.dest_offsets[axis], length)
    if not target.numel():
        return
    chunks = index.tensors[item.storage_index.fqn].chunks
    shape = next(chunk.sizes for chunk in chunks if chunk.offsets == item.storage_index.offset)
    _, start, size = place
    first, lengths = item.storage_offsets, item.lengths
    if shape and lengths[1:] == shape[1:]:  # whole rows: they are contiguous in the file, so nothing else is read
        row = size // shape[0]
        start, size, shape = start + first[0] * row, lengths[0] * row, torch.Size(lengths)
        first = torch.Size([0] * len(shape))
    if target.device.type == "cpu" and target.is_contiguous() and shape == target.shape:
        source.read_into(start, _memory_of(target))
        return
    raw = room.of(size)
    source.read_into(start, _memory_of(raw))
    stored = raw.view(target.dtype).view(shape)
    for axis, length in enumerate(lengths):
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
