"""A copy of this rank's part of the state in host memory, so that training goes on while it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

_ALIGNMENT = 64


class Staging:
    """Memory for the pieces that this rank writes, in one block that is there before the first save needs it."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], mine: Sequence[str]) -> None:
        pieces = {name: local_piece(tensors[name]) for name in mine}
        places, size = {}, 0
        for name, piece in pieces.items():
            places[name] = size
            size += -(-piece.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._cuda = any(piece.is_cuda for piece in pieces.values())
        self._block = torch.empty(size, dtype=torch.uint8, pin_memory=self._cuda)
        self._block.zero_()  # or the first save would wait for the operating system to find the memory
        self.pieces = {name: self._view(places[name], piece) for name, piece in pieces.items()}
        """The copy, by name. Whoever writes it reads it until the next `copy`."""

    def _view(self, start: int, like: torch.Tensor) -> torch.Tensor:
        """A part of the block as a tensor that knows of no other part: torch.save would write the block."""
        if not like.numel():
            return torch.empty(like.shape, dtype=like.dtype)
        memory = memoryview(self._block.numpy())[start : start + like.nbytes]  # type: ignore[arg-type]
        return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the values as they are now. The caller waits."""
        for name, piece in self.pieces.items():
            piece.copy_(local_piece(tensors[name]), non_blocking=self._cuda)
        if self._cuda:
            torch.cuda.current_stream().synchronize()


def local_piece(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor. No copy."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
