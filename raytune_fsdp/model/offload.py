"""What blocks keep for backward, in the memory of the host.

A block's tensors leave on a stream of their own while the block computes, and come back while backward is in the block
behind it. With activation checkpointing only the inputs of blocks are kept, so that is all that travels: 32 inputs of
8,192 tokens are 2 GiB for an 8B, which a GPU moves in 80 ms at 25 GB/s and computes for seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

_SMALLEST = 2**20
"""Bytes of a tensor that is worth a transfer."""


@dataclass(slots=True)
class _Away:
    """A tensor that is in the host's memory, or on its way from or to it."""

    host: torch.Tensor
    device: torch.device
    back: torch.Tensor | None = None
    arrived: torch.cuda.Event | None = None


class Offload:
    """The tensors of all blocks that are kept on the host between forward and backward."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._blocks: dict[int, list[_Away]] = {}

    @contextmanager
    def of(self, number: int, block: nn.Module) -> Iterator[None]:
        """In here, `block` computes, the `number`th of a forward pass."""
        # Weights have a place of their own, which FSDP frees and fills again.
        weights = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
        # A tensor that several operations keep goes once. It is held until the block ends, so that none is taken for
        # another one at the same address.
        sent: list[tuple[torch.Tensor, _Away]] = []
        mine = self._blocks.setdefault(number, [])  # a block may run twice in a pass

        def pack(tensor: torch.Tensor) -> torch.Tensor | tuple[int, _Away]:
            elsewhere = self._cuda and not tensor.is_cuda
            if elsewhere or tensor.nbytes < _SMALLEST or tensor.untyped_storage().data_ptr() in weights:
                return tensor
            away = next((away for known, away in sent if _same(known, tensor)), None)
            if away is None:
                host = torch.empty_like(tensor, device="cpu", pin_memory=self._cuda, requires_grad=False)
                if host.stride() != tensor.stride():  # a part of another tensor would come back in another layout
                    return tensor
                away = self._send(tensor, host)
                sent.append((tensor, away))
                mine.append(away)
            return number, away

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            yield
        sent.clear()

    def _send(self, tensor: torch.Tensor, host: torch.Tensor) -> _Away:
        if self._stream is None:
            host.copy_(tensor.detach())
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                host.copy_(tensor.detach(), non_blocking=True)
            tensor.record_stream(self._stream)
        return _Away(host=host, device=tensor.device)

    def _unpack(self, kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        number, away = cast("tuple[int, _Away]", kept)
        # Whole blocks at a time, and the next one that backward will come to as well.
        for needed in (number, number - 1):
            for each in self._blocks.pop(needed, []):
                self._fetch(each)
        # Not there yet if its block began to run again before backward came to it.
        back = away.back if away.back is not None else self._fetch(away)
        if away.arrived is not None:
            torch.cuda.current_stream().wait_event(away.arrived)
            back.record_stream(torch.cuda.current_stream())
        return back

    def _fetch(self, away: _Away) -> torch.Tensor:
        if self._stream is None:
            away.back = away.host
            return away.back
        with torch.cuda.stream(self._stream):
            away.back = torch.empty_like(away.host, device=away.device)
            away.back.copy_(away.host, non_blocking=True)
            away.arrived = self._stream.record_event()
        return away.back


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one._version == other._version
    )
