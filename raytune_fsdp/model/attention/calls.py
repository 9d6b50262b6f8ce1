"""What a kernel is called with, the function that transformers calls, and attention by the book."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from raytune_fsdp.base.batch import Borders


class Unfit(Exception):
    """This kernel cannot compute what the network asks for."""


class AttentionDropout(Unfit):
    """The network drops attention weights, and kernels here never hold such weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a layer passes to its attention besides queries, keys and values."""

    borders: Borders
    scale: float
    window: int | None = None
    """How many tokens a token sees, itself included; None: all before it."""
    softcap: float | None = None
    """Scores are squeezed into (-softcap, softcap) before the softmax."""
    sinks: torch.Tensor | None = None
    """One more score per head (heads,) in each softmax, as of a token whose value is zero."""


class Kernel(Protocol):
    """Computes attention from queries (tokens, heads, width), keys and values (tokens, key heads, width).

    The tokens are a micro-batch laid out as one row of documents.
    """

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor: ...


PREFIX = "documents_"
"""Prefix of the names under which the kernels are registered. No name has "sdpa" or "flash" in it: transformers looks
for these words, and would ask whether the network supports its own kernel."""


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
    """Call the kernel for transformers: (1, heads, tokens, width) in, (1, tokens, heads, width) out."""
    if cu_seq_lens_q is None or max_length_q is None or query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise Unfit("it does not pass on where documents begin")
    for present, what in (
        (attention_mask is not None or position_bias is not None, "a mask or bias of its own"),
        (not (getattr(module, "is_causal", True) if is_causal is None else is_causal), "attention to later tokens"),
    ):
        if present:
            raise Unfit(f"it has {what}")
    if dropout > 0:
        raise AttentionDropout("it has attention dropout")
    call = Call(
        borders=Borders(starts=cu_seq_lens_q, longest=max_length_q),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    width = value.shape[-1]
    if width != query.shape[-1]:  # multi-head latent attention (DeepSeek): kernels want one width
        value = F.pad(value, (0, query.shape[-1] - width))
    out = kernel(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), call)
    return out[..., :width].unsqueeze(0), None


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
    """Compute attention by the book, with a mask: the kernels are compared with it."""
    groups, tokens = q.shape[1] // k.shape[1], torch.arange(len(q), device=q.device)
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    document = torch.bucketize(tokens, call.borders.starts[1:], right=True)
    seen = (document[:, None] == document) & (tokens[:, None] >= tokens)
    if call.window is not None:
        seen &= tokens[:, None] - tokens < call.window
    scores = scores.masked_fill(~seen, float("-inf"))
    if call.sinks is not None:
        scores = torch.cat([scores, call.sinks.to(scores.dtype)[:, None, None].expand(-1, len(q), 1)], -1)
    weights = scores.softmax(-1)[..., : len(q)]
    return torch.einsum("hqk,khd->qhd", weights, v)


def without_softcap(call: Call) -> None:
    if call.softcap is not None:
        raise Unfit("it has a soft cap on its scores")


def with_sinks(out: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Change results and log-sum-exps (tokens, heads) of attention as if the sinks had been among the scores.

    The backward of a flash kernel recomputes its weights from scores and sums, and the rest from the results: from the
    changed ones it returns the gradients of attention with sinks.
    """
    sunk = torch.logaddexp(sums, sinks.to(sums.dtype))
    return (out * (sums - sunk).exp()[..., None]).to(out.dtype), sunk


def gradient_of_sinks(grad: torch.Tensor, out: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the sinks, from the results and sums of `with_sinks`."""
    share = (sinks.to(sums.dtype) - sums).exp()
    return -(share * (grad.to(sums.dtype) * out.to(sums.dtype)).sum(-1)).sum(0).to(sinks.dtype)
