"""A committed checkpoint as a source of weights: to generate from it, to export it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from raytune_fsdp.checkpoint.tensors import read, stored_shapes

_PREFIX = "model."


class CheckpointWeights:
    """The model's tensors in a checkpoint, read by one process without a process group of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stored = stored_shapes(directory, _PREFIX)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(shape) for name, (shape, _) in self._stored.items()}

    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: dtype for name, (_, dtype) in self._stored.items()}

    def read_all(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Several whole tensors at once, on the CPU."""
        tensors = {_PREFIX + n: torch.empty(self._stored[n][0], dtype=self._stored[n][1]) for n in names}
        read(tensors, self._directory, alone=True, whole=False)
        return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
