"""Which numbers of a whole tensor a rank has: some of its rows, and some columns of a weight that is cut by those."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

TENSOR = "tensor"
"""The axis of a mesh along which ranks have each a part of every layer."""


def local_piece(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, without a copy."""
    with torch.no_grad():  # without gradients to_local looks it up; with them it is an operation of autograd
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def is_cut(tensor: torch.Tensor) -> bool:
    """Whether ranks that compute a layer together have each another part of this weight."""
    return isinstance(tensor, DTensor) and TENSOR in (tensor.device_mesh.mesh_dim_names or ())


@dataclass(frozen=True, slots=True)
class Piece:
    """[start, stop) of rows, and of columns; None: all of these."""

    rows: tuple[int, int]
    columns: tuple[int, int] | None = None

    @property
    def first_column(self) -> int:
        return 0 if self.columns is None else self.columns[0]

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Of whole rows, the columns."""
        return rows if self.columns is None else rows[:, self.columns[0] : self.columns[1]]


def shard_axis(tensor: DTensor) -> int:
    """The axis of a mesh that fully_shard has split along."""
    cut = _tensor_axis(tensor)
    # Of a weight whose rows are cut, too, torch calls it another kind of shards.
    axis = next(i for i, placement in enumerate(tensor.placements) if i != cut and hasattr(placement, "dim"))
    assert tensor.placements[axis].dim == 0, "fully_shard splits by rows"  # type: ignore[attr-defined]
    return axis


def piece_of(tensor: torch.Tensor, rank: int | None = None) -> Piece:
    """What a rank has, by default this one. The tensor is sharded, unless one rank has all of it."""
    if not isinstance(tensor, DTensor):
        return Piece((0, tensor.shape[0] if tensor.ndim else 1))
    mesh, cut = tensor.device_mesh, _tensor_axis(tensor)
    # Parts of layers are the last axis: what is not cut is on every so many ranks of the world.
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
    """In plain numbers: torch's own would be asked for in every step."""
    found = []
    for size in reversed(shape):
        place, at = divmod(place, size)
        found.append(at)
    return found[::-1]


def cut_piece(whole: torch.Tensor, like: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Of a whole tensor, what ranks that compute a layer together have of `like`, which is not sharded."""
    if not isinstance(like, DTensor):
        return whole
    axis = like.placements[0].dim  # type: ignore[attr-defined]
    start, stop = range_of(whole.shape[axis], mesh.size(), mesh.get_local_rank())
    return whole.narrow(axis, start, stop - start)


def range_of(size: int, parts: int, part: int) -> tuple[int, int]:
    """ceil(size / parts) each, so that the last ones have fewer or none, as fully_shard has it."""
    chunk = -(-size // parts)
    return min(size, chunk * part), min(size, chunk * (part + 1))


def _tensor_axis(tensor: DTensor) -> int | None:
    names = tensor.device_mesh.mesh_dim_names or ()
    return names.index(TENSOR) if TENSOR in names else None
