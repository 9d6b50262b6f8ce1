"""Micro-batches that several ranks share: each has the same number of tokens, and knows where all documents begin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from raytune_fsdp.base.batch import IGNORE, PADDING, Borders, MicroBatch, MicroBatchPart, StepBatches, Targets
from raytune_fsdp.data.to_device import map_tensors
from raytune_fsdp.plan.plan import Layout


def from_first(steps: Iterable[StepBatches | None], group: dist.ProcessGroup) -> Iterator[StepBatches]:
    """Yield the batches of the group's first rank on all its ranks. Each is a collective of the group, on hosts."""
    for step in steps:
        box = [step]
        dist.broadcast_object_list(box, group=group, group_src=0, device=torch.device("cpu"))
        assert box[0] is not None
        yield box[0]


def own_parts(steps: Iterable[StepBatches], layout: Layout, rank: int) -> Iterator[StepBatches]:
    """Yield a data rank's batches as one of its members computes them."""
    first = rank % layout.together == 0
    for step in steps:
        if layout.together == 1:
            yield step
            continue
        # Counted once for all members: a sum over all ranks is to be the global batch's.
        yield replace(
            step,
            micro_batches=tuple(own_part(each, layout, rank) for each in step.micro_batches),
            counts=step.counts if first else torch.zeros_like(step.counts),
            windows_built=step.windows_built if first else 0,
        )


def own_part(micro_batch: MicroBatch, layout: Layout, rank: int) -> MicroBatch:
    """Return the part of a micro-batch that this rank computes, of those that share it."""
    part = part_of(micro_batch, layout.member(rank), layout.sequence)
    return part if layout.counts(rank) else replace(part, counts=False)


def part_of(micro_batch: MicroBatch, member: int, members: int) -> MicroBatch:
    """Return a member's tokens of a micro-batch whose samples are laid out one after another.

    If they cannot be cut evenly (in an evaluation; those of a run can), padding is added at the end, as a document of
    its own.
    """
    if members == 1:
        return micro_batch
    tokens, missing = micro_batch.input_ids.numel(), -micro_batch.input_ids.numel() % members
    size = (tokens + missing) // members
    first, end = member * size, (member + 1) * size

    def own(tensor: torch.Tensor, fill: int) -> torch.Tensor:
        return F.pad(tensor.reshape(-1), (0, missing), value=fill)[first:end][None]

    real = micro_batch.source_ids != PADDING
    lengths = real.sum(-1, keepdim=True).expand_as(real)
    positions = own(micro_batch.position_ids, 0)
    if end > tokens:
        here = max(0, tokens - first)
        positions[0, here:] = torch.arange(size - here) + max(0, first - tokens)
    source_ids = own(micro_batch.source_ids, PADDING)
    targets = micro_batch.targets
    inside = (targets.places >= first) & (targets.places < end)
    datasets = targets.datasets[inside]
    return replace(
        micro_batch,
        input_ids=own(micro_batch.input_ids, int(micro_batch.input_ids[-1, -1])),
        labels=own(micro_batch.labels, IGNORE),
        position_ids=positions,
        source_ids=source_ids,
        borders=_with_padding(micro_batch.borders, tokens, missing),
        targets=Targets(
            places=targets.places[inside] - first,
            ids=targets.ids[inside],
            datasets=datasets,
            by_dataset=tuple(torch.bincount(datasets).tolist()),
            by_document=targets.by_document,
            columns=targets.columns,
            before=int((targets.places < first).sum()),
            teacher=map_tensors(targets.teacher, lambda tensor: tensor[inside]),
        ),
        tokens=int((source_ids != PADDING).sum()),
        target_tokens=int(inside.sum()),
        attended_pairs=int((positions[source_ids != PADDING] + 1).sum()),
        part=MicroBatchPart(member=member, members=members, lengths=own(lengths, 0)[0]),
    )


def _with_padding(borders: Borders, row: int, missing: int) -> Borders:
    if not missing:
        return borders
    starts = torch.cat([borders.starts, borders.starts.new_tensor([row + missing])])
    return Borders(starts=starts, longest=max(borders.longest, missing))
