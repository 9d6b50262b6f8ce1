"""A copy of this rank's part of the state in host memory, so that training goes on while it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

_ALIGNMENT = 64  # bytes: a multiple of the size of every dtype, and a cache line


class Staging:
    """Memory for the pieces that this rank writes, allocated as one block before the first save."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], mine: Sequence[str]) -> None:
        pieces = {name: local_piece(tensors[name]) for name in mine}
        places, size = {}, 0
        for name, piece in pieces.items():
            places[name] = size
            size += -(-piece.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._cuda = any(piece.is_cuda for piece in pieces.values())
        # Pinned memory from torch is rounded up to a power of two: a block of 52 GB takes 64 GiB.
        self._block = torch.empty(size, dtype=torch.uint8, pin_memory=self._cuda)
        self._block.zero_()  # touches every page now; otherwise the first save would wait for the operating system
        self.pieces = {name: self._view(places[name], piece) for name, piece in pieces.items()}
        """The copies, by name. They do not change until the next `copy`."""

    def _view(self, start: int, like: torch.Tensor) -> torch.Tensor:
        """A part of the block as a tensor with its own storage: torch.save would write all of a view's storage."""
        if not like.numel():
            return torch.empty(like.shape, dtype=like.dtype)
        memory = memoryview(self._block.numpy())[start : start + like.nbytes]  # type: ignore[arg-type]
        return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the values as they are now. The caller waits."""
        for name, piece in self.pieces.items():
            piece.copy_(local_piece(tensors[name]), non_blocking=self._cuda)
        if self._cuda:
            torch.cuda.current_stream().synchronize()


def local_piece(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, without a copy."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
