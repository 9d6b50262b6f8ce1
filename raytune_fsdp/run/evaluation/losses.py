"""Measure a model without changing it: the loss on each evaluation dataset.

All ranks must call these together: a sharded model needs every rank for a forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from raytune_fsdp.base.batch import PADDING, Cursor, PackedSample
from raytune_fsdp.data.batches import eval_batches, to_batch
from raytune_fsdp.data.shared_batches import own_part
from raytune_fsdp.data.to_device import to_device
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.model.objective.loss import micro_batch_loss
from raytune_fsdp.plan.plan import Layout
from raytune_fsdp.record.names import evaluation_accuracy, evaluation_loss
from raytune_fsdp.step.in_order import sum_in_order
from raytune_fsdp.step.parallel import evaluating
from raytune_fsdp.step.train_step import eval_step


def losses(
    model: PreTrainedModel,
    datasets: Mapping[str, Windows],
    *,
    micro_batch: int,
    layout: Layout,
    device: torch.device,
    exact: bool = False,
) -> dict[str, float]:
    """Return loss per target token and accuracy of each dataset, by the names of metrics, over all ranks. Collective.

    `exact`: with the same bits at any number of ranks.
    """
    results: dict[str, float] = {}
    rank = dist.get_rank()
    data_rank = layout.data_rank(rank)
    with evaluating(model):
        for name, windows in datasets.items():
            sums = torch.zeros(3, dtype=torch.float64, device=device)
            each: dict[int, torch.Tensor] = {}
            batches = eval_batches(windows, micro_batch=micro_batch, data_ranks=layout.data_ranks, data_rank=data_rank)
            for batch in to_device((own_part(batch, layout, rank) for batch in batches), device):
                found = eval_step(model, batch)
                if exact and not batch.is_filler:
                    each[batch.index] = found
                else:
                    sums += found
            if exact:
                sums = sum_in_order(each, sums)
            else:
                dist.all_reduce(sums)
            total, right, targets = sums.tolist()
            results |= {evaluation_loss(name): total / targets, evaluation_accuracy(name): right / targets}
    return results


def document_losses(
    model: PreTrainedModel, samples: Sequence[PackedSample], *, micro_batch: int, device: torch.device
) -> list[list[tuple[float, int]]]:
    """Return the summed loss and the number of target tokens for each document of each packed sample. Collective."""
    found: list[list[tuple[float, int]]] = []
    with evaluating(model):
        for first in range(0, len(samples), micro_batch):
            some = samples[first : first + micro_batch]
            (batch,) = to_device([to_batch(some, index=0, after=Cursor())], device)
            each = micro_batch_loss(model, batch).each.double().cpu().numpy()
            starts = batch.borders.starts.cpu().numpy()
            # The segment that each target is in: a document or, without targets, the padding of a sample.
            segment = np.searchsorted(starts, batch.targets.places.cpu().numpy(), side="right") - 1
            sums = np.bincount(segment, weights=each, minlength=len(starts))
            targets = np.bincount(segment, minlength=len(starts))
            real = np.stack([sample.source_ids for sample in some]) != PADDING
            for row in range(len(some)):
                here = (starts // real.shape[1] == row) & np.append(real.reshape(-1)[starts[:-1]], False)
                found.append(list(zip(sums[here].tolist(), targets[here].tolist(), strict=True)))
    return found
