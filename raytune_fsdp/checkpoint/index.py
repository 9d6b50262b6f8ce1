"""Read `tensors.json`: which tensors a checkpoint has, and where their pieces are.

Whoever could write a checkpoint has written its index, with the right hash in the manifest. So every number in it is
checked against the others and against the sizes of the files before one of them is used. An accepted index says exactly
once where each number of each tensor is.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from raytune_fsdp.base.untrusted import UnsoundError, check_format, is_count, parse_json, shown
from raytune_fsdp.checkpoint.manifest import PIECES, index_values

Place = tuple[str, int, int]
"""Where the numbers of a piece are: a file, the offset in it, and the number of bytes."""

DTYPES = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128",
        "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
    )
}  # fmt: skip
"""The types that a tensor may have, by the names that the index gives them."""
_MAX_DIMENSIONS = 16  # torch prints a tensor of 64; a model has up to 5
_MAX_NAME = 1024


@dataclass(frozen=True, slots=True)
class Index:
    """Which tensors a checkpoint has, and where their pieces are."""

    metadata: Metadata
    places: Mapping[MetadataIndex, Place]

    @property
    def tensors(self) -> Mapping[str, TensorStorageMetadata]:
        return self.metadata.state_dict_metadata  # type: ignore[return-value]


def parse_index(content: bytes, sizes: Mapping[str, int]) -> Index:
    """Parse the `tensors.json` of a checkpoint whose files have these sizes. Raise ValueError if it is not one."""
    # Its depth need not be measured: below, every level has its type.
    read = parse_json(content, values=index_values(sizes), depth=None)
    if not isinstance(read, dict) or not isinstance(read.get("tensors"), dict):
        raise UnsoundError("has no tensors")
    check_format(read.get("format"))
    places: dict[MetadataIndex, Place] = {}
    tensors: dict[str, Any] = {}
    used: dict[str, tuple[array[int], array[int]]] = defaultdict(lambda: (array("q"), array("q")))
    for name, entry in read["tensors"].items():
        if not (0 < len(name) <= _MAX_NAME and name.isprintable()):
            raise UnsoundError(f"has a tensor of the name {shown(name)}")
        dtype, shape, pieces = _tensor(name, entry)
        chunks = []
        for piece in pieces:
            offset, size, place = _piece(name, piece, dtype, shape, sizes)
            if not place[2]:
                continue  # nothing of it is ever read
            chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(size)))
            places[MetadataIndex(name, chunks[-1].offsets)] = place
            starts, ends = used[place[0]]
            starts.append(place[1])
            ends.append(place[1] + place[2])
        _check_covered(name, shape, [(chunk.offsets, chunk.sizes) for chunk in chunks])
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)
    for file, spans in used.items():
        first, end = map(np.array, spans)
        order = np.argsort(first, kind="stable")
        if (end[order][:-1] > first[order][1:]).any():
            raise UnsoundError(f"has two pieces in the same bytes of {file}")
    return Index(Metadata(tensors), places)


def _tensor(name: str, entry: Any) -> tuple[torch.dtype, list[int], list[Any]]:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "pieces"}:
        raise UnsoundError(f"has an entry {name} without exactly dtype, shape and pieces")
    dtype, shape, pieces = entry["dtype"], entry["shape"], entry["pieces"]
    if not (isinstance(dtype, str) and dtype in DTYPES):
        raise UnsoundError(f"has a tensor {name} of the unknown type {shown(dtype)}")
    sides = shape if _are_integers(shape) and len(shape) <= _MAX_DIMENSIONS else [-1]
    if min(sides, default=0) < 0 or prod(max(1, rows) for rows in sides) >= 1 << 59:
        raise UnsoundError(f"has a tensor {name} of the shape {shown(shape)}")
    if not isinstance(pieces, list):
        raise UnsoundError(f"has a tensor {name} whose pieces are not a list")
    return DTYPES[dtype], shape, pieces


_INTEGER = {int}  # compared by type: True is no integer
_PIECE = {"offset", "shape", "file", "start", "bytes"}


def _piece(
    name: str, piece: Any, dtype: torch.dtype, whole: Sequence[int], sizes: Mapping[str, int]
) -> tuple[list[int], list[int], Place]:
    """Return offset, shape and place of a piece, after checking that it fits the tensor and the file that it names."""
    if not isinstance(piece, dict) or piece.keys() != _PIECE:
        raise UnsoundError(f"has a piece of {name} without exactly {', '.join(sorted(_PIECE))}")
    offset, shape, file = piece["offset"], piece["shape"], piece["file"]
    if not (_are_integers(offset) and _are_integers(shape) and len(offset) == len(shape) == len(whole)):
        raise UnsoundError(f"has a piece of {name} at {shown(offset)} of the shape {shown(shape)}")
    for first, length, rows in zip(offset, shape, whole, strict=True):
        if first < 0 or length < 0 or first + length > rows:
            raise UnsoundError(f"has a piece of {name} at {shown(offset)} of {shown(shape)}, outside of {list(whole)}")
    if not (isinstance(file, str) and file in sizes and file.endswith(PIECES)):
        raise UnsoundError(f"has a piece of {name} in {shown(file)}, which is no file of this checkpoint")
    start, size = piece["start"], piece["bytes"]
    if not is_count(size) or size != prod(shape) * dtype.itemsize:
        raise UnsoundError(f"has a piece of {name} of {shown(size)} bytes, which is not the size of {shape} {dtype}")
    if not is_count(start) or start + size > sizes[file]:
        raise UnsoundError(f"has a piece of {name} from byte {shown(start)} on, outside of {file}")
    return offset, shape, (file, start, size)


def _are_integers(value: Any) -> bool:
    return type(value) is list and _INTEGER.issuperset(map(type, value))


Box = tuple[Sequence[int], Sequence[int]]


def _check_covered(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Refuse boxes that are not the whole tensor, each number once. They are inside of it, and none is empty."""
    # As large as the whole, and without overlaps: then there are no holes either.
    if sum(prod(size) for _, size in boxes) != prod(shape):
        raise UnsoundError(f"has pieces of {name} that do not add up to the whole tensor")
    # Axis by axis, what overlaps on all axes so far stays together. However a tensor is sharded, its pieces are rows,
    # and inside of those columns: sorted once per axis, 2 million of them take seconds, not pairs of 2 million.
    together = [list(boxes)]
    for axis in range(len(shape)):
        together = [part for boxes in together if len(boxes) > 1 for part in _parts(boxes, axis)]
    if any(len(boxes) > 1 for boxes in together):
        raise UnsoundError(f"has pieces of {name} that overlap")


def _parts(boxes: list[Box], axis: int) -> list[list[Box]]:
    """Group boxes by the stretches of an axis that they share."""
    boxes.sort(key=lambda box: box[0][axis])
    parts: list[list[Box]] = []
    end = -1
    for box in boxes:
        if box[0][axis] >= end:
            parts.append([])
        parts[-1].append(box)
        end = max(end, box[0][axis] + box[1][axis])
    return parts
