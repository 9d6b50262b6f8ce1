"""Look at all micro-batches of a step before it begins: for losses that depend on the whole global batch."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from raytune_fsdp.base.batch import StepBatches
from raytune_fsdp.base.beat import beat
from raytune_fsdp.model.objective.groups import OfMicroBatch
from raytune_fsdp.plan.division import Division
from raytune_fsdp.step.in_order import add_in_order
from raytune_fsdp.step.parallel import evaluating


def sum_over_step(
    model: PreTrainedModel, batches: StepBatches, division: Division, measure: OfMicroBatch
) -> torch.Tensor:
    """Return the sum of a number of each micro-batch, in their order, over all ranks: one pass without gradients, with
    dropout off. Collective."""
    rows = batches.counts.new_zeros(len(division.micro_batch_sizes(batches.step)), 1, dtype=torch.float64)
    with evaluating(model):
        for batch in batches.micro_batches:
            beat()
            found = measure(model, batch)
            if not batch.is_filler:
                rows[batch.index] = found
    return add_in_order(rows)[0]
