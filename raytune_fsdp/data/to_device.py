"""Copy batches to the device ahead of time, so that neither the host nor the device waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from raytune_fsdp.base.beat import beat

T = TypeVar("T")


def to_device(items: Iterable[T], device: torch.device) -> Iterator[T]:
    """Yield these batches with their tensors on the device.

    The host is ahead of a GPU: while the GPU computes a step, the batch of the next step is copied on a stream of its
    own. The copy is from pinned memory, or the host would wait for it. What computes with a batch waits for its copy
    only.
    """
    if device.type != "cuda":
        for item in items:
            beat()
            yield item
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    for item in items:
        beat()
        with torch.cuda.stream(stream):
            moved = map_tensors(item, lambda tensor: tensor.pin_memory().to(device, non_blocking=True))
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        map_tensors(moved, partial(_used_on, current))
        yield moved


def _used_on(stream: torch.cuda.Stream, tensor: torch.Tensor) -> torch.Tensor:
    tensor.record_stream(stream)  # without this, its memory could be reused before that stream is done with it
    return tensor


def map_tensors(value: T, function: Callable[[torch.Tensor], torch.Tensor]) -> T:
    """Return a batch with `function` applied to all its tensors."""
    found: Any = value
    if isinstance(value, torch.Tensor):
        found = function(value)
    elif isinstance(value, tuple):
        found = tuple(map_tensors(each, function) for each in value)
    elif is_dataclass(value) and not isinstance(value, type):
        found = replace(
            value, **{each.name: map_tensors(getattr(value, each.name), function) for each in fields(value)}
        )
    return found  # type: ignore[no-any-return]
