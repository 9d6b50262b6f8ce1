"""NEFTune: uniform noise on the embeddings of tokens, in training (arXiv:2310.05914)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from raytune_fsdp.base.batch import PADDING, MicroBatch


@contextmanager
def noisy_embeddings(model: PreTrainedModel, batch: MicroBatch, alpha: float | None) -> Iterator[None]:
    """Have the network's embedding add noise to its results in this context, no larger than alpha / sqrt(L * width).

    L is how many tokens a packed sample has, padding left out. The noise is drawn from the random state that every
    micro-batch begins with, before any dropout: the embedding comes first and is never computed again.
    """
    if alpha is None:
        yield
        return
    tokens = (batch.source_ids != PADDING).sum(-1, keepdim=True).clamp(min=1)  # a filler has none
    # The length for each token: kernels that get borders have all samples of a micro-batch in one row.
    lengths = tokens.expand_as(batch.source_ids).reshape(-1)
    part = batch.part
    if part is not None:
        lengths = part.lengths.clamp(min=1)

    def add(_: torch.nn.Module, __: Any, embedded: torch.Tensor) -> torch.Tensor:
        # In fp32, whatever type the network computes in: bf16 is too coarse for such noise.
        members, member = (1, 0) if part is None else (part.members, part.member)
        shape = members, *embedded.shape  # for a part, the noise of the whole micro-batch is drawn
        noise = torch.empty(shape, dtype=torch.float32, device=embedded.device).uniform_(-1, 1)[member]
        largest = alpha * (lengths * embedded.shape[-1]).float().rsqrt()
        return embedded + noise.mul_(largest.view(*embedded.shape[:-1], 1)).to(embedded.dtype)

    with model.get_input_embeddings().register_forward_hook(add):
        yield
