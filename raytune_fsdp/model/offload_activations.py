"""Keep what layers need for backward in the host's memory.

A layer's tensors are copied out on a separate stream while the next layer computes, and come back while backward is in
the next layer. With activation checkpointing only the inputs of layers are kept, so only these travel: 32 inputs of
8,192 tokens are 2 GiB for an 8B, which a GPU moves in 80 ms at 25 GB/s and computes for seconds.

The device holds the tensors of a few layers at a time, however far the host is ahead. All device memory used here
belongs to the computing stream, which waits for a copy before it reuses the copied memory; and a copy back waits until
backward has come to the next layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from raytune_fsdp.model.pieces.pieces import local_piece

_SMALLEST = 2**20
"""Bytes of the smallest tensor that is worth a transfer."""

_BEHIND = 1
"""How many layers the copies may lag behind the computation. The tensors of this many layers, and of the one that
computes, are on the device at a time."""


class Copies:
    """Makes copies while the device computes. On a CPU, as here, a copy is done before the host goes on."""

    def behind_compute(self) -> AbstractContextManager[None]:
        """Copy, in this context, only after everything that was queued for computation until now is done."""
        return nullcontext()

    def mark(self) -> Any:
        """Mark the end of all copies until now."""
        return None

    def hold_compute(self, mark: Any) -> None:
        """Hold what is computed from now on until the copies before the mark are done."""


class _OnStream(Copies):
    """Copies on a separate stream. Never run on a GPU in this form."""

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


@dataclass(slots=True)
class _Away:
    """A tensor that is in the host's memory, or on its way there or back."""

    host: torch.Tensor
    device: torch.device
    back: torch.Tensor | None = None


class Offload:
    """Keeps tensors of all layers on the host between forward and backward."""

    def __init__(self, device: torch.device, copies: Copies | None = None) -> None:
        self._cuda = device.type == "cuda"
        self._copies = copies or (_OnStream(device) if self._cuda else Copies())
        self._layers: dict[int, list[_Away]] = {}
        # References, so that memory that is being copied is not given to something else: what was sent and the mark
        # after its copies, layer by layer, and what was fetched for layers that backward has not come to.
        self._leaving: deque[tuple[Any, list[torch.Tensor]]] = deque()
        self._coming: dict[int, tuple[Any, list[torch.Tensor]]] = {}

    @contextmanager
    def of(self, number: int, layer: nn.Module) -> Iterator[None]:
        """Move what `layer` keeps in this context to the host. It is layer `number` of a forward pass."""
        # What was fetched for a backward pass that was abandoned halfway is dropped.
        for mark, _ in self._coming.values():
            self._copies.hold_compute(mark)
        self._coming.clear()
        # Weights stay: FSDP frees and refills their memory itself. A DTensor computes with its local tensor.
        weights = {_storage(local_piece(parameter)) for parameter in layer.parameters()}
        # A tensor that several operations keep is sent once. It is held until the layer ends, so that none is taken for
        # another one at the same address.
        sent: list[tuple[torch.Tensor, _Away]] = []
        mine = self._layers.setdefault(number, [])  # a layer may run twice in a pass

        def pack(tensor: torch.Tensor) -> torch.Tensor | tuple[int, _Away]:
            elsewhere = self._cuda and not tensor.is_cuda
            if elsewhere or tensor.nbytes < _SMALLEST or _storage(tensor) in weights:
                return tensor
            away = next((away for known, away in sent if _same(known, tensor)), None)
            if away is None:
                host = torch.empty_like(tensor, device="cpu", pin_memory=self._cuda, requires_grad=False)
                if host.stride() != tensor.stride():  # a view into another tensor would come back with other strides
                    return tensor
                away = self._send(tensor, host)
                sent.append((tensor, away))
                mine.append(away)
            return number, away

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            yield
        # Detached: with its graph, a tensor would hold everything that was computed before it.
        self._leaving.append((self._copies.mark(), [tensor.detach() for tensor, _ in sent]))
        sent.clear()
        self._let_go(_BEHIND)

    def _send(self, tensor: torch.Tensor, host: torch.Tensor) -> _Away:
        with self._copies.behind_compute():
            host.copy_(tensor.detach(), non_blocking=self._cuda)
        return _Away(host=host, device=tensor.device)

    def _let_go(self, behind: int) -> None:
        """Forget what all but the latest `behind` layers sent. What is computed from here on may use its memory."""
        while len(self._leaving) > behind:
            mark, _ = self._leaving.popleft()
            self._copies.hold_compute(mark)

    def _unpack(self, kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        number, away = cast("tuple[int, _Away]", kept)
        self._let_go(0)
        # Fetch whole layers, this one and the next that backward will come to. No earlier than when backward is in this
        # layer, or a host that is ahead would fetch them all.
        for needed in (number, number - 1):
            if needed in self._layers:
                self._fetch(needed, self._layers.pop(needed))
        if away.back is None:  # its layer began to run again before backward came to it
            self._fetch(number, [away])
        if number in self._coming:
            mark, _ = self._coming.pop(number)
            self._copies.hold_compute(mark)
        return cast(torch.Tensor, away.back)

    def _fetch(self, number: int, kept: list[_Away]) -> None:
        # Allocated outside of the copies' context, so that the memory is the computing stream's, which the copies wait
        # for.
        backs = [torch.empty_like(away.host, device=away.device) if self._cuda else away.host for away in kept]
        with self._copies.behind_compute():
            for away, back in zip(kept, backs, strict=True):
                away.back = back.copy_(away.host, non_blocking=True) if self._cuda else back
        _, before = self._coming.get(number, (None, []))
        self._coming[number] = (self._copies.mark(), [*before, *backs])


def _storage(tensor: torch.Tensor) -> int:
    """Identify a tensor's memory. Not by its address, which a plan's tensors do not have."""
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
