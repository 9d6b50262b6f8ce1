"""Measure a model without changing it: the loss on each evaluation dataset.

All ranks must call these together: a sharded model needs every rank for a forward pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from raytune_fsdp.base.batch import PADDING, Cursor, MicroBatch, PackedSample
from raytune_fsdp.data.batches import FILLER_INDEX, eval_batches, to_batch
from raytune_fsdp.data.shared_batches import own_part
from raytune_fsdp.data.to_device import to_device
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.model.objective.figures import group_values
from raytune_fsdp.model.objective.groups import Formula, GroupObjective
from raytune_fsdp.model.objective.judged import KINDS, SCORE_KINDS, GroupDocuments
from raytune_fsdp.model.objective.kto import KtoLoss
from raytune_fsdp.model.objective.loss import micro_batch_loss
from raytune_fsdp.model.objective.scores import LossOfGroups, ScoreObjective
from raytune_fsdp.plan.plan import Layout
from raytune_fsdp.record.names import evaluation_on
from raytune_fsdp.run.evaluation.score_figures import figures_of
from raytune_fsdp.step.in_order import sum_in_order
from raytune_fsdp.step.parallel import evaluating
from raytune_fsdp.step.train_step import eval_step

logger = logging.getLogger(__name__)


def losses(
    model: PreTrainedModel,
    datasets: Mapping[str, Windows],
    *,
    micro_batch: int,
    layout: Layout,
    device: torch.device,
    exact: bool = False,
    groups: LossOfGroups | None = None,
    told: Callable[[MicroBatch], MicroBatch] | None = None,
) -> dict[str, float]:
    """Return loss per target token and accuracy of each dataset, by the names of metrics, over all ranks. Collective.

    `exact`: with the same bits at any number of ranks. `groups`: the loss of datasets of groups. `told`: gives
    micro-batches what the reference says of their documents, if that is known.
    """
    results: dict[str, float] = {}
    rank = dist.get_rank()
    data_rank = layout.data_rank(rank)
    with evaluating(model):
        for name, windows in datasets.items():
            whole = eval_batches(windows, micro_batch=micro_batch, data_ranks=layout.data_ranks, data_rank=data_rank)
            if told is not None:
                whole = map(told, whole)
            batches = to_device((own_part(batch, layout, rank) for batch in whole), device)
            if isinstance(groups, ScoreObjective):
                # A few numbers of each document.
                scored = [(batch.index, groups.own(model, batch)) for batch in batches]
                each = ((index, groups.judge(documents)[1].sum(1)) for index, documents in scored)
                values = figures_of(groups, scored)
                values |= group_values(_summed(each, len(SCORE_KINDS), device, exact=exact).tolist(), groups.config)
            elif groups is not None and windows.kind is not None:
                compared = not groups.config.compares or (groups.reference or told) is not None
                if not compared and rank == 0:
                    logger.warning(
                        "%s: the run that compares with a reference is not at hand, so log-probabilities are all that "
                        "is measured; evaluate the run or one of its checkpoints", name,
                    )  # fmt: skip
                values = _of_groups(model, batches, groups, device, compared=compared, exact=exact)
            else:
                each = ((batch.index, eval_step(model, batch)) for batch in batches)
                total, right, targets = _summed(each, 3, device, exact=exact).tolist()
                values = {"loss": total / targets, "accuracy": right / targets}
            results |= {evaluation_on(name, kind): value for kind, value in values.items()}
    return results


def _of_groups(
    model: PreTrainedModel,
    batches: Iterable[MicroBatch],
    groups: GroupObjective,
    device: torch.device,
    *,
    compared: bool,
    exact: bool,
) -> dict[str, float]:
    """Return what is measured of groups, by its name in training. Without a reference only log-probabilities are.

    Where the loss of each depends on all, these are all groups of the dataset.
    """
    kept = [(batch.index, groups.own(model, batch)) for batch in batches]  # a few numbers of each document
    formula, kl = groups.formula, None
    if isinstance(formula, KtoLoss) and compared:
        known = ((index, torch.cat([formula.ahead(each).sum()[None], _figures(formula, each)])) for index, each in kept)
        ahead, *counts = _summed(known, 1 + len(KINDS), device, exact=exact)
        of = dict(zip(KINDS, counts, strict=True))
        formula = formula.counted(float(of["chosen"]), float(of["rejected"]))
        kl = formula.estimate(ahead, of["groups"].clamp(min=1))
    sums = _summed(((index, _figures(formula, each, kl)) for index, each in kept), len(KINDS), device, exact=exact)
    return group_values(sums.tolist(), groups.config, compared=compared)


def _figures(formula: Formula, documents: GroupDocuments, kl: torch.Tensor | None = None) -> torch.Tensor:
    return formula.judge(documents, kl).figures.sum(1)


def _summed(each: Iterable[tuple[int, torch.Tensor]], many: int, device: torch.device, *, exact: bool) -> torch.Tensor:
    """Return the sum of the numbers of all micro-batches, by their indices, over all ranks. Collective."""
    sums = torch.zeros(many, dtype=torch.float64, device=device)
    by_index: dict[int, torch.Tensor] = {}
    for index, found in each:
        if exact and index != FILLER_INDEX:
            by_index[index] = found
        else:
            sums += found
    if exact:
        return sum_in_order(by_index, sums)
    dist.all_reduce(sums)
    return sums


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
