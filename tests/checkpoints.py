"""Look into the checkpoints of a run, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raytune_fsdp.base.row_hashes import TensorRows
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, as_checkpoint, committed
from raytune_fsdp.checkpoint.location import storage_at
from raytune_fsdp.checkpoint.manifest import make_manifest
from raytune_fsdp.checkpoint.reading import read_index, read_tensors
from raytune_fsdp.checkpoint.storage import INDEX_FILE, STATE_FILE, PosixStorage
from raytune_fsdp.checkpoint.writing import PieceLayout, arrange, write_pieces, write_small


def checkpoints(run_dir: Path) -> list[CommittedCheckpoint]:
    """All committed ones, oldest first."""
    return committed(str(run_dir / "checkpoints"))


def types_in(found: CommittedCheckpoint, prefix: str = "") -> dict[str, torch.dtype]:
    """Type of every tensor whose name starts so."""
    entries = read_index(storage_at(found.root), found.name).tensors
    return {name: entry.dtype for name, entry in entries.items() if name.startswith(prefix)}


def tensors_in(found: CommittedCheckpoint) -> dict[str, torch.Tensor]:
    """Every tensor, whole."""
    storage = storage_at(found.root)
    index = read_index(storage, found.name)
    tensors = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in index.tensors.items()}
    read_tensors(tensors, storage, found.name, index=index)
    return tensors


def pieces_of(found: CommittedCheckpoint) -> list[Path]:
    """Its files with tensors."""
    return sorted(Path(found.path).glob("*.distcp"))


def place_of(found: CommittedCheckpoint, name: str) -> tuple[Path, int]:
    """File and first byte of the first piece of a tensor."""
    storage = storage_at(found.root)
    index = read_index(storage, found.name)
    run = index.tensors[name].runs[0]
    file = index.files[run.file].name
    with storage.open(found.name, file) as source:
        return Path(found.path, file), index.places_in(run.file, source)[name, run.offset][0]


def write_as_ranks(
    root: Path, name: str, tensors: Mapping[str, torch.Tensor], boxes: Any, state: bytes = b"{}"
) -> CommittedCheckpoint:
    """A checkpoint that ranks would write; `boxes`: see `arrange`."""
    typed = {each: (tensor.dtype, tensor.shape) for each, tensor in tensors.items()}
    index, mine = arrange(typed, np.asarray(boxes, np.int64))
    rows = {each: (TensorRows.of(each, tensor.dtype, tensor.shape), 0) for each, tensor in tensors.items()}
    draft, names, files, sums = PosixStorage(str(root)).draft(name, 1), [*tensors], [], {}
    for rank, numbers in enumerate(mine):
        pieces = {}
        for number in numbers:
            piece = tensors[names[number]]
            for axis in range(min(2, piece.ndim)):
                piece = piece.narrow(axis, *map(int, boxes[rank][number][2 * axis : 2 * axis + 2]))
            pieces[names[number]] = piece
        if pieces:
            layout = PieceLayout(mine=tuple(pieces), rows=rows)
            written = write_pieces(draft, f"__{rank}_1.distcp", pieces, layout, hashes=False)
            files.append((f"__{rank}_1.distcp", *written.table))
            sums[files[-1][0]] = written.sum
    content = PieceLayout(mine=(), rows=rows, tensors=index).index(files)
    sums |= {file: write_small(draft, file, each) for file, each in ((INDEX_FILE, content), (STATE_FILE, state))}
    draft.publish({file: each.bytes for file, each in sums.items()}, make_manifest(sums))
    found = as_checkpoint(str(root / name))
    assert found is not None
    return found


def rows_of_ranks(tensors: Mapping[str, torch.Tensor], ranks: int) -> list[list[list[int]]]:
    """The boxes of ranks that have so many rows each of all tensors."""
    from raytune_fsdp.model.pieces.pieces import range_of

    def box(shape: torch.Size, rank: int) -> list[int]:
        start, stop = range_of(shape[0], ranks, rank) if shape else (0, 1)
        return [start, stop - start, 0, shape[1] if len(shape) > 1 else 1]

    return [[box(tensor.shape, rank) for tensor in tensors.values()] for rank in range(ranks)]
