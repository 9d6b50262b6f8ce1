"""Find this rank's pieces of sharded tensors, and make tensors that are split in the same way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from raytune_fsdp.model.pieces.pieces import local_piece, piece_of, range_of, shard_axis

NUMBERS_AT_ONCE = 1 << 22
"""Numbers of an update that are computed at a time. An update that is written out has up to ten intermediate results:
for this many numbers they take 160 MiB in fp32, for an expert of Mixtral 4.7 GB. It is a multiple of the numbers that
share a scale (moments.py)."""


def at(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Move a number to where weights and gradients are, or back.

    With parallel.cpu_offload that is another device, and the host waits; otherwise nothing is done.
    """
    return tensor if tensor.device == device else tensor.to(device)


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return this rank's shard of every gradient, as plain tensors that share memory with it."""
    return [local_piece(p.grad) for p in parameters if p.grad is not None]


@dataclass(frozen=True, slots=True)
class Split:
    """How the rows of a tensor are spread: over the shards of a mesh, the same in each of its replicas."""

    mesh: DeviceMesh | None = None
    axis: int = 0

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Split:
        if not isinstance(tensor, DTensor):
            return cls()
        return cls(tensor.device_mesh, shard_axis(tensor))

    @property
    def shards(self) -> int:
        return 1 if self.mesh is None else self.mesh.size(self.axis)

    @property
    def shard(self) -> int:
        return 0 if self.mesh is None else self.mesh.get_local_rank(self.axis)

    @property
    def replicas(self) -> int:
        return 1 if self.mesh is None else self.mesh.size() // self.shards

    @property
    def replica(self) -> int:
        return 0 if self.replicas == 1 or self.mesh is None else self.mesh.get_local_rank(1 - self.axis)

    @property
    def over_shards(self) -> dist.ProcessGroup | None:
        """The ranks that have one whole tensor between them. None: this rank has all of it."""
        return None if self.mesh is None or self.shards == 1 else self.mesh.get_group(self.axis)

    @property
    def over_replicas(self) -> dist.ProcessGroup | None:
        """The ranks that have the same rows. None: there are no others."""
        return None if self.mesh is None or self.replicas == 1 else self.mesh.get_group(1 - self.axis)

    def rows_of(self, rows: int, shard: int) -> tuple[int, int]:
        """Return the rows [start, stop) that a shard has."""
        return range_of(rows, self.shards, shard)


def split_like(parameter: torch.Tensor, *columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros of the shape [rows of the parameter, *columns], split as the parameter is."""
    local = local_piece(parameter)
    if not isinstance(parameter, DTensor):
        return torch.zeros((local.shape[0], *columns), dtype=dtype, device=local.device)
    whole = torch.empty((parameter.shape[0], *columns), device="meta")
    # On the meta device, because `from_local` moves what has memory to the mesh's device: a GPU, with
    # parallel.cpu_offload.
    rows = torch.empty((local.shape[0], *columns), device="meta")
    shape = DTensor.from_local(
        rows, parameter.device_mesh, parameter.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return torch.zeros_like(shape, dtype=dtype, device=local.device)


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a parameter on this rank, or some columns of one row, to work on at once."""

    start: int
    stop: int
    """The end of the rows [start, stop) among this rank's rows."""
    first: int
    """The place of `start` in the whole parameter."""
    left: int
    right: int
    """The end of the columns [left, right) among this rank's: all, unless one row has too many. A row of experts is an
    expert."""
    first_column: int = 0
    """The place of `left` in the whole parameter."""

    def of(self, tensor: torch.Tensor, each: int = 1) -> torch.Tensor:
        """Return these numbers of the parameter, or of a tensor split like it, as a matrix that shares its memory.

        `each`: the tensor has one number for this many columns of the parameter.
        """
        local = local_piece(tensor)
        if not local.ndim:
            return local.view(1, 1)
        rows = local[self.start : self.stop].view(self.stop - self.start, columns_of(local))
        return rows[:, self.left // each : -(-self.right // each)]


def columns_of(tensor: torch.Tensor) -> int:
    """Return how many numbers a row has."""
    return tensor.shape[1:].numel()


def rows_at_once(tensor: torch.Tensor, numbers: int = NUMBERS_AT_ONCE) -> int:
    """Return how many rows are computed at a time: as many on every rank, but for those that come last."""
    return max(1, numbers // max(1, columns_of(tensor)))


def in_parts(
    parameter: torch.Tensor, *, at_once: int | None = None, whole_rows: bool = False, group: int = 1
) -> Iterator[Rows]:
    """Yield this rank's rows of a parameter, some at a time. A row that is too long comes in parts itself.

    `at_once`: the most numbers of a part; None: `NUMBERS_AT_ONCE`. `group`: each part has whole groups of so many
    columns, or the columns that are left at the end of rows.
    """
    local, numbers = local_piece(parameter), NUMBERS_AT_ONCE if at_once is None else at_once
    rows, piece, columns = local.shape[0] if local.ndim else 1, piece_of(parameter), columns_of(local)
    height = rows_at_once(local, numbers)
    width = columns if whole_rows else min(columns, numbers)
    edges = sorted({*range(0, columns, max(1, width)), columns - columns % group, columns})
    for start in range(0, rows, height):
        for left, right in pairwise(edges):
            yield Rows(start, min(rows, start + height), piece.rows[0] + start, left, right, piece.first_column + left)
