"""Attention that is told where documents begin, as functions that transformers calls by name.

A micro-batch is laid out as one row, document after document, and each kernel here gets the borders. None can look
across one, so no mask is built: a mask for 8,192 tokens is 64 MiB of booleans, and 128 MiB more in every layer once it
is a bf16 bias; it makes a kernel compute the whole square, and it rules out the flash kernels.

`attention.py` decides which one a network gets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from raytune_fsdp.types import Borders


class Unfit(Exception):
    """This kernel cannot compute what the network asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a layer asks of its attention, besides queries, keys and values."""

    borders: Borders
    scale: float
    window: int | None = None
    """How many tokens a token sees, itself included; None: all before it."""
    softcap: float | None = None
    """Scores are squeezed into (-softcap, softcap) before the softmax."""


class Kernel(Protocol):
    """Queries (tokens, heads, width), keys and values (tokens, key heads, width) of one row of documents."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor: ...


PREFIX = "documents_"
"""Of the names under which the kernels are registered. None has "sdpa" or "flash" in it: transformers looks for those
words, and would ask whether the network supports its own."""


def attend(
    kernel: Kernel,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: (1, heads, tokens, width) in, (1, tokens, heads, width) out."""
    if cu_seq_lens_q is None or max_length_q is None or query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise Unfit("it does not pass on where documents begin")
    for present, what in (
        (attention_mask is not None or position_bias is not None, "a mask or bias of its own"),
        (s_aux is not None, "attention sinks"),
        (dropout > 0, "attention dropout"),
        (not (getattr(module, "is_causal", True) if is_causal is None else is_causal), "attention to later tokens"),
    ):
        if present:
            raise Unfit(f"it has {what}")
    call = Call(
        borders=Borders(starts=cu_seq_lens_q, longest=max_length_q),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    width = value.shape[-1]
    if width != query.shape[-1]:  # multi-head latent attention (DeepSeek): kernels want one width
        value = F.pad(value, (0, query.shape[-1] - width))
    out = kernel(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), call)
    return out[..., :width].unsqueeze(0), None


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
    """Attention by the book, with a mask: what the kernels are measured against."""
    groups, tokens = q.shape[1] // k.shape[1], torch.arange(len(q), device=q.device)
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    document = torch.bucketize(tokens, call.borders.starts[1:], right=True)
    seen = (document[:, None] == document) & (tokens[:, None] >= tokens)
    if call.window is not None:
        seen &= tokens[:, None] - tokens < call.window
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


# --- On a CPU ---------------------------------------------------------------------------------------------------------


def sdpa_by_document(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
    """torch's flash attention for CPUs, document by document."""
    _without_softcap(call)
    borders = call.borders
    groups = q.shape[1] // k.shape[1]
    if groups > 1:  # it has no grouped heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    out, _ = _by_document(q, k, v, borders.starts, call.scale, call.window or 0)
    return cast(torch.Tensor, out)


def _without_softcap(call: Call) -> None:
    if call.softcap is not None:
        raise Unfit("it has a soft cap on its scores")


def _pieces(starts: list[int], window: int) -> Iterator[tuple[slice, slice]]:
    """Queries and the keys that they see. A document longer than the window comes in pieces of it, or its scores would
    be a square of which most is masked."""
    for start, end in zip(starts, starts[1:], strict=False):
        step = window if 0 < window < end - start else end - start
        for first in range(start, end, max(1, step)):
            yield slice(first, min(first + step, end)), slice(max(start, first - step + 1), min(first + step, end))


def _band(queries: slice, keys: slice, window: int, like: torch.Tensor) -> torch.Tensor | None:
    """The mask of a piece; None where it is the causal one."""
    if queries.start == keys.start and not 0 < window < queries.stop - queries.start:
        return None
    rows = torch.arange(queries.start, queries.stop)[:, None]
    columns = torch.arange(keys.start, keys.stop)[None]
    seen = (columns <= rows) & (columns > rows - window)
    return torch.zeros(seen.shape, dtype=like.dtype).masked_fill_(~seen, float("-inf"))


def _row(tensor: torch.Tensor, part: slice) -> torch.Tensor:
    return tensor[part].transpose(0, 1)[None]


# One operation for torch.compile, with its backward as another, so that no graph depends on how many documents came.
@torch.library.custom_op("raytune_fsdp::sdpa_by_document", mutates_args=())
def _by_document(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, scale: float, window: int
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
    return out, sums


@_by_document.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, scale: float, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
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
    q, k, v, starts, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output, starts)


def _backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    q, k, v, out, sums, starts = ctx.saved_tensors
    return (*_by_document_backward(grad, q, k, v, out, sums, starts, ctx.scale, ctx.window), None, None, None)


_by_document.register_autograd(_backward, setup_context=_remember)

# --- On a GPU ---------------------------------------------------------------------------------------------------------


def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
    """torch's own flash attention over documents."""
    from torch.nn.attention.varlen import varlen_attn

    _without_softcap(call)
    starts, longest = call.borders.starts, call.borders.longest
    # torch 2.11 has grouped heads without this flag.
    grouped: dict[str, Any] = {}
    if "enable_gqa" in _parameters(varlen_attn) and q.shape[1] != k.shape[1]:
        grouped["enable_gqa"] = True
    out: Any = varlen_attn(
        q, k, v, starts, starts, longest, longest, scale=call.scale, window_size=_before(call.window), **grouped
    )
    return cast(torch.Tensor, out)


def flash(package: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
    """The flash-attn packages; they agree on these arguments, and the newer ones return a tuple."""
    from importlib import import_module

    kernel = import_module(package).flash_attn_varlen_func
    starts, longest = call.borders.starts, call.borders.longest
    repeatable: dict[str, Any] = {}
    if "deterministic" in _parameters(kernel):  # torch's setting does not reach it
        repeatable["deterministic"] = torch.are_deterministic_algorithms_enabled()
    out = kernel(
        q, k, v,
        cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest, max_seqlen_k=longest,
        softmax_scale=call.scale, causal=True, window_size=_before(call.window), softcap=call.softcap or 0.0,
        **repeatable,
    )  # fmt: skip
    return cast(torch.Tensor, out[0] if isinstance(out, tuple) else out)


def _before(window: int | None) -> tuple[int, int]:
    """A window as flash kernels count it: how many tokens before a token it sees, and how many after it."""
    return (-1 if window is None else window - 1, 0)


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


FLASH = {"4": "flash_attn.cute", "3": "flash_attn_interface", "2": "flash_attn"}
"""The modules of flash-attn by version, the fastest first."""

KERNELS: dict[str, Kernel] = {
    f"{PREFIX}cpu": sdpa_by_document,
    f"{PREFIX}varlen": varlen,
    **{f"{PREFIX}fa{version}": partial(flash, package) for version, package in FLASH.items()},
}
"""All kernels, by the names that transformers and checkpoints know them by."""


def is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ImportError:  # of the package around it
        return False


for _name, _kernel in KERNELS.items():
    AttentionInterface.register(_name, partial(attend, _kernel))
