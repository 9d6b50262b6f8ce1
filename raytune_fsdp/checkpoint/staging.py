"""A copy of this rank's part of the state in host memory, so that training goes on while it is written."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch

from raytune_fsdp.step.optim import Optimizer, local_piece

logger = logging.getLogger(__name__)

_ALIGNMENT = 64  # bytes: a multiple of the size of every dtype, and a cache line


class Staging:
    """Memory for the pieces that this rank writes, allocated as one block at the first copy.

    A GPU copies on a stream of its own while the next step computes: whoever reads the pieces waits until they are
    `here`, and the optimizer changes nothing before that (`UpdatesAfterCopies`).
    """

    def __init__(self) -> None:
        self.pieces: dict[str, torch.Tensor] = {}
        """The copies, by name. They do not change until the next `copy`."""
        self._block = torch.empty(0, dtype=torch.uint8)
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        """Memory that is taken."""
        return self._block.nbytes

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, torch.Tensor], mine: Sequence[str]) -> None:
        """Copy the values of `mine` as they are now. On a CPU the caller waits."""
        now = {name: local_piece(tensors[name]) for name in mine}
        if not self.pieces:
            self._allocate(now)
        if self._stream is None:
            for name, piece in self.pieces.items():
                piece.copy_(now[name])
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for name, piece in self.pieces.items():
                piece.copy_(now[name], non_blocking=True)
            self._copied = self._stream.record_event()

    def here(self) -> None:
        """Wait, on the host, for the copies. From any thread."""
        if self._stream is not None and self._copied is not None:
            # A new thread is on the first GPU: the CUDA runtime may make a context there, of some 500 MB for each rank.
            with torch.cuda.device(self._stream.device):
                self._copied.synchronize()

    def hold_updates(self) -> None:
        """Have what the device computes from here on wait for the copies."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def _allocate(self, now: Mapping[str, torch.Tensor]) -> None:
        places, size = {}, 0
        for name, piece in now.items():
            places[name] = size
            size += -(-piece.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._block = torch.empty(size, dtype=torch.uint8)
        device = next((piece.device for piece in now.values() if piece.is_cuda), None)
        if device is not None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            _pin(self, self._block, device)
        self.pieces = {name: self._view(places[name], piece) for name, piece in now.items()}

    def _view(self, start: int, like: torch.Tensor) -> torch.Tensor:
        """A part of the block as a tensor with its own storage: torch.save would write all of a view's storage."""
        if not like.numel():
            return torch.empty(like.shape, dtype=like.dtype)
        memory = memoryview(self._block.numpy())[start : start + like.nbytes]  # type: ignore[arg-type]
        return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)


def _pin(owner: Staging, block: torch.Tensor, device: torch.device) -> None:
    """Let a GPU copy into this memory while the host does something else, as long as its owner lives."""
    if not block.nbytes:
        return
    # Not torch's pinned memory, whose sizes are powers of two: 96 GiB, which an 8B has on one rank, would take 128.
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = runtime.cudaHostRegister(block.data_ptr(), block.nbytes, 0)
    if int(error) == 0:
        weakref.finalize(owner, lambda: runtime.cudaHostUnregister(block.data_ptr()))
        return
    # Copies are then slower, and the host waits for them. The error stays with CUDA until a kernel has reported it.
    logger.warning("%d bytes of host memory could not be pinned (CUDA error %d)", block.nbytes, int(error))
    with suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)


class UpdatesAfterCopies:
    """An optimizer that changes nothing that is still being copied."""

    def __init__(self, optimizer: Optimizer, staging: Staging) -> None:
        self._optimizer = optimizer
        self._staging = staging

    def init_state(self) -> None:
        self._optimizer.init_state()

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return self._optimizer.state_tensors()

    def step(self, lr_factor: float, found_inf: torch.Tensor) -> None:
        self._staging.hold_updates()
        self._optimizer.step(lr_factor, found_inf)
