"""Attention that gets the borders of documents, as functions that transformers calls by name.

A micro-batch is laid out as one row, document after document, and each kernel here gets the borders. No kernel looks
across a border, so no mask is built: a mask for 8,192 tokens is 64 MiB of booleans, and 128 MiB more in every layer
once it is a bf16 bias; it makes a kernel compute the whole square, and it rules out the flash kernels.

`choose.py` decides which kernel a network gets.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from transformers import AttentionInterface

from raytune_fsdp.model.attention.calls import (
    PREFIX,
    Call,
    Kernel,
    attend,
    gradient_of_sinks,
    with_sinks,
    without_softcap,
)
from raytune_fsdp.model.attention.flash import FLASH, flash, varlen


def sdpa_by_document(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
    """Compute attention with torch's flash attention for CPUs, document by document."""
    without_softcap(call)
    borders = call.borders
    groups = q.shape[1] // k.shape[1]
    if groups > 1:  # it does not support grouped heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    out, _ = _by_document(q, k, v, borders.starts, call.scale, call.window or 0, call.sinks)
    return cast(torch.Tensor, out)


def _pieces(starts: list[int], window: int) -> Iterator[tuple[slice, slice]]:
    """Yield queries and the keys that they see.

    A document longer than the window comes in pieces of the window's size: its scores would otherwise be a square that
    is mostly masked.
    """
    for start, end in zip(starts, starts[1:], strict=False):
        step = window if 0 < window < end - start else end - start
        for first in range(start, end, max(1, step)):
            yield slice(first, min(first + step, end)), slice(max(start, first - step + 1), min(first + step, end))


def _band(queries: slice, keys: slice, window: int, like: torch.Tensor) -> torch.Tensor | None:
    """Return the mask of a piece; None if it is the causal mask."""
    if queries.start == keys.start and not 0 < window < queries.stop - queries.start:
        return None
    rows = torch.arange(queries.start, queries.stop)[:, None]
    columns = torch.arange(keys.start, keys.stop)[None]
    seen = (columns <= rows) & (columns > rows - window)
    return torch.zeros(seen.shape, dtype=like.dtype).masked_fill_(~seen, float("-inf"))


def _row(tensor: torch.Tensor, part: slice) -> torch.Tensor:
    return tensor[part].transpose(0, 1)[None]


# One operation for torch.compile, and one for its backward, so that no graph depends on the number of documents.
@torch.library.custom_op("raytune_fsdp::sdpa_by_document", mutates_args=())
def _by_document(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    scale: float,
    window: int,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty(q.shape, dtype=q.dtype)
    sums = torch.empty(q.shape[:2], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    for queries, keys in _pieces(starts.tolist(), window):
        mask = _band(queries, keys, window, q)
        piece, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _row(q, queries), _row(k, keys), _row(v, keys), 0.0, mask is None, attn_mask=mask, scale=scale
        )
        out[queries] = piece[0].transpose(0, 1)
        sums[queries] = logsumexp[0].transpose(0, 1)
    return (out, sums) if sinks is None else with_sinks(out, sums, sinks)


@_by_document.register_fake
def _(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=wide)


@torch.library.custom_op("raytune_fsdp::sdpa_by_document_backward", mutates_args=())
def _by_document_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    starts: torch.Tensor,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # Zeros, because pieces of one document share keys.
    grads = tuple(torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in (q, k, v))
    for queries, keys in _pieces(starts.tolist(), window):
        mask = _band(queries, keys, window, q)
        pieces = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _row(grad, queries), _row(q, queries), _row(k, keys), _row(v, keys), _row(out, queries),
            _row(sums, queries), 0.0, mask is None, attn_mask=mask, scale=scale,
        )  # fmt: skip
        for whole, piece, part in zip(grads, pieces, (queries, keys, keys), strict=True):
            whole[part] += piece[0].transpose(0, 1)
    return grads  # type: ignore[return-value]


@_by_document_backward.register_fake
def _(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, starts, ctx.scale, ctx.window, sinks = inputs
    ctx.save_for_backward(q, k, v, *output, starts, sinks)


def _backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    q, k, v, out, sums, starts, sinks = ctx.saved_tensors
    of_sinks = None if sinks is None else gradient_of_sinks(grad, out, sums, sinks)
    grads = _by_document_backward(grad, q, k, v, out, sums, starts, ctx.scale, ctx.window)
    return (*grads, None, None, None, of_sinks)


_by_document.register_autograd(_backward, setup_context=_remember)


KERNELS: dict[str, Kernel] = {
    f"{PREFIX}cpu": sdpa_by_document,
    f"{PREFIX}varlen": varlen,
    **{name: partial(flash, name) for name in FLASH},
}
"""All kernels, by their names in transformers and in checkpoints."""


for _name, _kernel in KERNELS.items():
    AttentionInterface.register(_name, partial(attend, _kernel))
