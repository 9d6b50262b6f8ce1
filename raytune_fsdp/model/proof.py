"""Measure, at every start, whether attention keeps documents apart, and attention and loss compute what they should.

The bounds are in run/trials/computation.py:check_computation, which refuses what exceeds them.

Two samples of several documents are needed: transformers' flash attention finds the borders in a batch of one sample,
and silently lets the documents of two see each other.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from transformers import AttentionInterface, PreTrainedModel

from raytune_fsdp.base.batch import IGNORE, Cursor, MicroBatch, PackedSample
from raytune_fsdp.data.batches import to_batch
from raytune_fsdp.data.shared_batches import part_of
from raytune_fsdp.data.to_device import map_tensors
from raytune_fsdp.model.attention.calls import PREFIX, Call, attend, reference
from raytune_fsdp.model.attention.choose import logits_of
from raytune_fsdp.model.attention.kernels import KERNELS
from raytune_fsdp.model.objective.chunked_head import LossHead
from raytune_fsdp.model.objective.loss import micro_batch_loss, plain_losses
from raytune_fsdp.model.objective.score_head import ScoreHead
from raytune_fsdp.model.score_head import head_of

LENGTHS = ((7, 3, 9), (11, 8))
"""Lengths of the documents of each sample."""

WINDOW = 5
"""The attention window, in a check, of layers that have one: shorter than most of these documents."""

_CHECKED = f"{PREFIX}checked"

CPU = torch.device("cpu")


def documents(model: PreTrainedModel, device: torch.device) -> MicroBatch:
    """Return two samples of documents. No two tokens are equal unless the vocabulary is small."""
    vocabulary = model.config.get_text_config().vocab_size
    samples, first = [], 0
    for row in LENGTHS:
        ids = (np.arange(sum(row), dtype=np.int32) + first) % vocabulary
        positions = np.concatenate([np.arange(length, dtype=np.int32) for length in row])
        labels = np.where(positions == 0, IGNORE, ids).astype(np.int32)
        samples.append(
            PackedSample(input_ids=ids, labels=labels, position_ids=positions, source_ids=np.zeros_like(ids), id=0)
        )
        first += sum(row)
    return map_tensors(to_batch(samples, index=0, after=Cursor()), lambda tensor: tensor.to(device))


def leak_between_documents(model: PreTrainedModel, device: torch.device) -> float:
    """Return how much documents' logits change, relatively, when the document packed before them changes. Collective.

    Not every architecture that takes position_ids takes the borders of documents from them (state spaces and
    convolutions run on, some masks ignore them), so it is tried. Needs evaluation mode, without gradients.
    """
    batch, first = documents(model, device), LENGTHS[0][0]
    other = batch.input_ids.clone()
    other[0, :first] = (other[0, :first] + 1 + first) % model.config.get_text_config().vocab_size
    seen = [
        logits_of(model, ids, batch.position_ids, batch.borders).flatten(0, 1)[first:].double()
        for ids in (batch.input_ids, other)
    ]
    return float((seen[0] - seen[1]).abs().max() / seen[0].abs().max().clamp(min=1e-30))


def error_of_kernel(model: PreTrainedModel, device: torch.device) -> float:
    """Return the largest relative error of a network's attention against `reference`, over one forward pass.

    NaN if a result is. It runs on the run's device, with the run's scale and shapes. Windows are made shorter than the
    documents. 0 if the network's attention is transformers' own. Collective. Needs evaluation mode, without gradients.
    """
    name = model.config._attn_implementation
    if name not in KERNELS:
        return 0.0
    worst: list[torch.Tensor] = []

    def compared(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
        call = call if call.window is None else replace(call, window=min(call.window, WINDOW))
        out, right = KERNELS[name](q, k, v, call), reference(q.double(), k.double(), v.double(), call)
        worst.append((out.double() - right).abs().max() / right.abs().max().clamp(min=1e-30))
        return out

    AttentionInterface.register(_CHECKED, partial(attend, compared))
    model.set_attn_implementation(_CHECKED)
    try:
        batch = documents(model, device)
        logits_of(model, batch.input_ids, batch.position_ids, batch.borders)
    finally:
        model.set_attn_implementation(name)
    return float(torch.stack(worst).max()) if worst else 0.0  # Python's max would lose a NaN


def error_of_loss(model: PreTrainedModel, device: torch.device) -> float:
    """Return the relative error of the loss without logits against the loss of the network's logits. Collective.

    Needs evaluation mode, without gradients. 0 if there is no `LossHead`.
    """
    if (scores := head_of(model)) is not None:
        return _error_of_scores(model, scores, device)
    if not isinstance(model.get_output_embeddings(), LossHead):
        return 0.0
    batch = documents(model, device)
    right = plain_losses(logits_of(model, batch.input_ids, batch.position_ids, batch.borders), batch).each.double()
    found = micro_batch_loss(model, batch).each.double()
    return float((found - right).abs().max() / right.abs().max())


def _error_of_scores(model: PreTrainedModel, head: ScoreHead, device: torch.device) -> float:
    """Return the relative error of the scores of targets against those of all tokens, before the network does anything
    else to them."""
    batch, every = documents(model, device), list[torch.Tensor]()
    with head.register_forward_hook(lambda _, __, output: every.append(output)):
        logits_of(model, batch.input_ids, batch.position_ids, batch.borders)
    found = micro_batch_loss(model, batch).scores
    assert found is not None
    right = every[0].flatten(0, 1)[batch.targets.places].double()
    return float((found.double() - right).abs().max() / right.abs().max().clamp(min=1e-30))


def error_of_parts(
    model: PreTrainedModel, group: dist.ProcessGroup, whole: torch.Tensor, device: torch.device
) -> float:
    """Return the relative error of logits that ranks compute, each for its part of the tokens, against `whole`.

    Collective. Needs evaluation mode, without gradients, and attention in parts.
    """
    part = part_of(documents(model, CPU), group.rank(), group.size())
    part = map_tensors(part, lambda tensor: tensor.to(device))
    mine = logits_of(model, part.input_ids, part.position_ids, part.borders)[0]
    every = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(every, mine.contiguous(), group=group)
    found = torch.cat(every)[: len(whole)]
    return float((found.double() - whole.double()).abs().max() / whole.double().abs().max().clamp(min=1e-30))
