"""Look into the checkpoints of a run, for tests."""

from __future__ import annotations

from pathlib import Path

import torch

from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, committed
from raytune_fsdp.checkpoint.location import storage_at
from raytune_fsdp.checkpoint.reading import read_index, read_tensors


def checkpoints(run_dir: Path) -> list[CommittedCheckpoint]:
    """All committed ones, oldest first."""
    return committed(str(run_dir / "checkpoints"))


def types_in(found: CommittedCheckpoint, prefix: str = "") -> dict[str, torch.dtype]:
    """Type of every tensor whose name starts so."""
    entries = read_index(storage_at(found.root), found.name).tensors
    return {name: entry.properties.dtype for name, entry in entries.items() if name.startswith(prefix)}


def tensors_in(found: CommittedCheckpoint) -> dict[str, torch.Tensor]:
    """Every tensor, whole."""
    storage = storage_at(found.root)
    index = read_index(storage, found.name)
    tensors = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in index.tensors.items()}
    read_tensors(tensors, storage, found.name, index=index)
    return tensors


def pieces_of(found: CommittedCheckpoint) -> list[Path]:
    """Its files with tensors."""
    return sorted(Path(found.path).glob("*.distcp"))
