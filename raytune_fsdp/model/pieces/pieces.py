"""Find the piece of a whole tensor that a rank has: some rows, and some columns of a weight that is cut by columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

TENSOR = "tensor"
"""The axis of a mesh along which each rank has a piece of every layer."""


def local_piece(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's piece of a tensor, without a copy."""
    with torch.no_grad():  # without gradients to_local is a look-up; with them it is an operation of autograd
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def is_cut(tensor: torch.Tensor) -> bool:
    """Return whether ranks that compute a layer together each have another piece of this weight."""
    return isinstance(tensor, DTensor) and TENSOR in (tensor.device_mesh.mesh_dim_names or ())


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [start, stop), and columns [start, stop); None: all columns."""

    rows: tuple[int, int]
    columns: tuple[int, int] | None = None

    @property
    def first_column(self) -> int:
        return 0 if self.columns is None else self.columns[0]

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Take the piece's columns of whole rows."""
        return rows if self.columns is None else rows[:, self.columns[0] : self.columns[1]]


def shard_axis(tensor: DTensor) -> int:
    """Return the axis of a mesh that fully_shard has split along."""
    cut = _tensor_axis(tensor)
    # If the weight's rows are cut, too, torch has another placement for it, so look for `dim` and not for Shard.
    axis = next(i for i, placement in enumerate(tensor.placements) if i != cut and hasattr(placement, "dim"))
    assert tensor.placements[axis].dim == 0, "fully_shard splits by rows"  # type: ignore[attr-defined]
    return axis


def piece_of(tensor: torch.Tensor, rank: int | None = None) -> Piece:
    """Return a rank's piece, by default this rank's, of a tensor that is sharded unless one rank has all of it."""
    if not isinstance(tensor, DTensor):
        return Piece((0, tensor.shape[0] if tensor.ndim else 1))
    mesh, cut = tensor.device_mesh, _tensor_axis(tensor)
    # The tensor axis is the last: a weight that is not cut has a mesh without it, and the same piece on as many
    # neighbouring ranks as that axis has.
    place = (dist.get_rank() if rank is None else rank) // (dist.get_world_size() // mesh.size())
    at = _coordinates(place, mesh.shape)
    rows, columns = (0, tensor.shape[0]), None
    if cut is not None:
        axis = tensor.placements[cut].dim  # type: ignore[attr-defined]
        found = range_of(tensor.shape[axis], mesh.size(cut), at[cut])
        rows, columns = (found, None) if axis == 0 else (rows, found)
    shard = shard_axis(tensor)
    start, stop = range_of(rows[1] - rows[0], mesh.size(shard), at[shard])
    return Piece((rows[0] + start, rows[0] + stop), columns)


def _coordinates(place: int, shape: Sequence[int]) -> list[int]:
    """Return the coordinates of a place as plain numbers: torch's own would be slow to ask for in every step."""
    found = []
    for size in reversed(shape):
        place, at = divmod(place, size)
        found.append(at)
    return found[::-1]


def cut_piece(whole: torch.Tensor, like: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Cut from a whole tensor the piece that this rank has of `like`, which is cut by tensor but not sharded."""
    if not isinstance(like, DTensor):
        return whole
    axis = like.placements[0].dim  # type: ignore[attr-defined]
    start, stop = range_of(whole.shape[axis], mesh.size(), mesh.get_local_rank())
    return whole.narrow(axis, start, stop - start)


def range_of(size: int, parts: int, part: int) -> tuple[int, int]:
    """Return the range of one part: ceil(size / parts) each, the last ones fewer or none, as fully_shard splits."""
    chunk = -(-size // parts)
    return min(size, chunk * part), min(size, chunk * (part + 1))


def _tensor_axis(tensor: DTensor) -> int | None:
    names = tensor.device_mesh.mesh_dim_names or ()
    return names.index(TENSOR) if TENSOR in names else None
