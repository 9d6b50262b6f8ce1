"""Which rank writes which piece of which tensor, and the index that says where each piece is. index.py reads that.

Both follow from how the tensors are sharded, which does not change during an attempt, so they are worked out once, with
the planner of torch.distributed.checkpoint. Two indexes are written. `tensors.json` is the one that is read here: JSON,
which cannot execute anything. `.metadata` says the same as a pickle, for `torch.distributed.checkpoint.load`.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
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

from raytune_fsdp.model.pieces.pieces import local_piece, piece_of

METADATA_FILE = ".metadata"

Span = tuple[int, int, int, int]
"""A piece in its rank's file: offset and length of what torch.save wrote, offset and length of the numbers in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceLayout:
    mine: tuple[str, ...]
    """The tensors whose piece this rank writes, in the order of its file. Replicated ones are shared out."""
    everyone: tuple[tuple[MetadataIndex, ...], ...] = ()
    """On rank 0: the pieces of every rank, in the same order."""
    metadata: Metadata | None = None
    """On rank 0: shapes, types and pieces of all tensors."""

    def index(self, files: Sequence[str], spans: Sequence[Sequence[Span]]) -> bytes:
        """`tensors.json` of a checkpoint whose ranks have written these files, the pieces in order. Rank 0."""
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
        """`.metadata` of the same checkpoint."""
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
    """Where this rank's piece is in the whole tensor.

    Not as torch.distributed.checkpoint asks a DTensor: of rows that ranks which share a layer have cut unevenly, and
    that are sharded then, it says other offsets than the shards have (torch 2.13)."""
    piece, size = piece_of(tensor), local_piece(tensor).size()
    # One without numbers is behind all others: where it begins another one may, too.
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
    """The layout of tensors sharded like these. Collective."""
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
    return PieceLayout(mine=mine[0], everyone=everyone, metadata=metadata)
