"""What blocks keep for backward, in the memory of the host.

A block's tensors leave on a stream of their own while the block behind it computes, and come back while backward is in
the block behind it. With activation checkpointing only the inputs of blocks are kept, so that is all that travels: 32
inputs of 8,192 tokens are 2 GiB for an 8B, which a GPU moves in 80 ms at 25 GB/s and computes for seconds.

The device holds the tensors of a few blocks at a time, however far the host is ahead. All of its memory here is that of
the computing stream, which waits for a copy before it may have the memory of it for something else; and a copy back
waits until backward has come to the block behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import nn

from raytune_fsdp.model.pieces.pieces import local_piece

_SMALLEST = 2**20
"""Bytes of a tensor that is worth a transfer."""

_BEHIND = 1
"""How many blocks the copies may be behind the computation. The tensors of so many blocks, and of the one that
computes, are on the device at a time."""


class Copies(Protocol):
    """Where copies are made, beside what the device computes."""

    def behind_compute(self) -> AbstractContextManager[None]:
        """What is copied in here begins when everything is done that was to be computed until now."""

    def mark(self) -> Any:
        """The end of all copies until now."""

    def hold_compute(self, mark: Any) -> None:
        """What is computed from now on begins when the copies before the mark are done."""


class _OnStream:
    """Copies on a stream of their own. Never run on a GPU in this form."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def behind_compute(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event:
        return cast(torch.cuda.Event, self._stream.record_event())

    def hold_compute(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)


class _AtOnce:
    """On a CPU, a copy is done when the host goes on."""

    def behind_compute(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self) -> None:
        return None

    def hold_compute(self, mark: None) -> None:
        pass


@dataclass(slots=True)
class _Away:
    """A tensor that is in the host's memory, or on its way from or to it."""

    host: torch.Tensor
    device: torch.device
    back: torch.Tensor | None = None


class Offload:
    """The tensors of all blocks that are kept on the host between forward and backward."""

    def __init__(self, device: torch.device, copies: Copies | None = None) -> None:
        self._cuda = device.type == "cuda"
        self._copies: Copies = copies or (_OnStream(device) if self._cuda else _AtOnce())
        self._blocks: dict[int, list[_Away]] = {}
        # References, so that the memory of what is being copied is not given to something else: what was sent and the
        # end of its copies, block by block, and what was fetched for blocks that backward has not come to.
        self._leaving: deque[tuple[Any, list[torch.Tensor]]] = deque()
        self._coming: dict[int, tuple[Any, list[torch.Tensor]]] = {}

    @contextmanager
    def of(self, number: int, block: nn.Module) -> Iterator[None]:
        """In here, `block` computes, the `number`th of a forward pass."""
        self._give_up_coming()
        # Weights have a place of their own, which FSDP frees and fills again. A DTensor computes with its local tensor.
        weights = {_storage(local_piece(parameter)) for parameter in block.parameters()}
        # A tensor that several operations keep goes once. It is held until the block ends, so that none is taken for
        # another one at the same address.
        sent: list[tuple[torch.Tensor, _Away]] = []
        mine = self._blocks.setdefault(number, [])  # a block may run twice in a pass

        def pack(tensor: torch.Tensor) -> torch.Tensor | tuple[int, _Away]:
            elsewhere = self._cuda and not tensor.is_cuda
            if elsewhere or tensor.nbytes < _SMALLEST or _storage(tensor) in weights:
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
        # Detached: with its graph, a tensor would hold all that was computed before it.
        self._leaving.append((self._copies.mark(), [tensor.detach() for tensor, _ in sent]))
        sent.clear()
        self._let_go(_BEHIND)

    def _send(self, tensor: torch.Tensor, host: torch.Tensor) -> _Away:
        with self._copies.behind_compute():
            host.copy_(tensor.detach(), non_blocking=self._cuda)
        return _Away(host=host, device=tensor.device)

    def _let_go(self, behind: int) -> None:
        """Forget what was sent by all but the latest blocks. What is computed from here on may use its memory."""
        while len(self._leaving) > behind:
            mark, _ = self._leaving.popleft()
            self._copies.hold_compute(mark)

    def _give_up_coming(self) -> None:
        """A backward pass did not come to what was fetched for it: it was left in its middle."""
        for mark, _ in self._coming.values():
            self._copies.hold_compute(mark)
        self._coming.clear()

    def _unpack(self, kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        number, away = cast("tuple[int, _Away]", kept)
        self._let_go(0)
        # Whole blocks at a time, and the next one that backward will come to as well: not before it is in this block,
        # or a host that is ahead would fetch them all.
        for needed in (number, number - 1):
            if needed in self._blocks:
                self._fetch(needed, self._blocks.pop(needed))
        if away.back is None:  # its block began to run again before backward came to it
            self._fetch(number, [away])
        if number in self._coming:
            mark, _ = self._coming.pop(number)
            self._copies.hold_compute(mark)
        return cast(torch.Tensor, away.back)

    def _fetch(self, number: int, kept: list[_Away]) -> None:
        # Allocated outside: memory of the computing stream, which the copies wait for.
        backs = [torch.empty_like(away.host, device=away.device) if self._cuda else away.host for away in kept]
        with self._copies.behind_compute():
            for away, back in zip(kept, backs, strict=True):
                away.back = back.copy_(away.host, non_blocking=True) if self._cuda else back
        _, before = self._coming.get(number, (None, []))
        self._coming[number] = (self._copies.mark(), [*before, *backs])


def _storage(tensor: torch.Tensor) -> int:
    """Whose memory it is. Not the address, which a plan's tensors do not have."""
    return int(tensor.untyped_storage()._cdata)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        _storage(one) == _storage(other)
        and one.storage_offset() == other.storage_offset()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one._version == other._version
    )
