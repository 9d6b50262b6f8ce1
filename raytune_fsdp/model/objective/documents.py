"""Collect the losses of documents while a run trains on them (`tracking.documents`), on the device until fetched."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from raytune_fsdp.base.batch import MicroBatch
from raytune_fsdp.base.beat import pulse
from raytune_fsdp.model.objective.losses import Losses


class DocumentLosses:
    """The sum of losses of every segment (a document, or a sample's padding) in each micro-batch that this rank trained
    on."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[int, torch.Tensor]] = {}

    @torch.no_grad()
    def add(self, losses: Losses, batch: MicroBatch) -> None:
        if not batch.is_filler:
            sums = sums_by_segment(losses.each, batch)
            if sums.is_cuda:  # queued now: the step's metrics, which the host waits for, are queued after it
                sums = torch.empty_like(sums, device="cpu", pin_memory=True).copy_(sums, non_blocking=True)
            self._steps.setdefault(pulse().step, {})[batch.index] = sums

    def take(self, steps: Iterable[int]) -> dict[int, dict[int, list[float]]]:
        """Take out the sums of steps whose metrics the host has, by step and micro-batch."""
        found = {step: self._steps.pop(step, {}) for step in steps}
        return {step: {index: sums.tolist() for index, sums in batches.items()} for step, batches in found.items()}


def sums_by_segment(each: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Sum the losses of a micro-batch's targets, in float64, by the segments between its borders."""
    places, starts, part = batch.targets.places, batch.borders.starts, batch.part
    if part is not None:
        places = places + part.member * batch.input_ids.numel()
    starts = starts.to(places.dtype)
    # Then index_add adds in order, and a GPU has no deterministic running sums.
    if torch.are_deterministic_algorithms_enabled():
        segments = torch.searchsorted(starts, places, right=True) - 1
        return each.new_zeros(len(starts) - 1, dtype=torch.float64).index_add_(0, segments, each.double())
    # Differences of running sums, since index_add on a GPU adds in any order.
    edges = torch.searchsorted(places, starts)
    sums = torch.cat([each.new_zeros(1, dtype=torch.float64), each.double().cumsum(0)])
    return sums[edges[1:]] - sums[edges[:-1]]
