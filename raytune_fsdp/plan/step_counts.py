"""What a step counts, laid out so that one sum over all ranks gives the global batch's counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from raytune_fsdp.base.batch import Cursor, MicroBatch, Role
from raytune_fsdp.plan.division import Division

_FIRST_ID = 7
"""Seven numbers come before the sample ids: target tokens, tokens, attended pairs, windows built, and the cursor after
the step (epoch, window, index). After the ids come the target tokens of each dataset, and with an objective of groups
their number and the targets of chosen documents."""

TARGETS, GROUPS, TERM_TOKENS = 0, -2, -1
"""Where there is what losses are divided by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """The counts of one global batch. Only `pack` and `unpack` know the layout."""

    target_tokens: int
    tokens: int
    attended_pairs: int
    windows_built: int
    cursor: Cursor
    """The place of the sample after the step's last one."""
    sample_ids: tuple[int, ...]
    by_dataset: tuple[int, ...]
    """The target tokens of each dataset."""

    @staticmethod
    def pack(
        step: int,
        micro_batches: Sequence[MicroBatch],
        windows_built: int,
        division: Division,
        datasets: int,
        *,
        grouped: bool = False,
    ) -> list[int]:
        """Pack this rank's share: the sum over all ranks is the global batch's. `grouped`: documents make groups.

        Each rank writes the ids of its own micro-batches in their places and leaves zeros elsewhere; the cursor comes
        from the rank that has the step's last micro-batch.
        """
        first_dataset = _FIRST_ID + division.global_batch
        counts = [0] * (first_dataset + datasets)
        counts[3] = windows_built
        last = len(division.micro_batch_sizes(step)) - 1
        for each in micro_batches:
            counts[0] += each.target_tokens
            counts[1] += each.tokens
            counts[2] += each.attended_pairs
            for dataset, many in enumerate(each.targets.by_dataset):
                counts[first_dataset + dataset] += many
            if each.index == last:
                counts[4:_FIRST_ID] = [each.after.epoch, each.after.window, each.after.index]
            if not each.is_filler:
                first = _FIRST_ID + each.index * division.micro_batch
                counts[first : first + len(each.sample_ids)] = each.sample_ids
        return counts + _of_groups(micro_batches) if grouped else counts

    @classmethod
    def unpack(cls, counts: Sequence[int], step: int, division: Division, datasets: int) -> StepCounts:
        """Return the global batch's counts, from the sum over all ranks."""
        first_dataset = _FIRST_ID + division.global_batch
        targets, tokens, pairs, built, epoch, window, index = counts[:_FIRST_ID]
        return cls(
            target_tokens=targets,
            tokens=tokens,
            attended_pairs=pairs,
            windows_built=built,
            cursor=Cursor(epoch=epoch, window=window, index=index),
            sample_ids=tuple(counts[_FIRST_ID : _FIRST_ID + division.samples_of(step)]),
            by_dataset=tuple(counts[first_dataset : first_dataset + datasets]),
        )


def _of_groups(micro_batches: Sequence[MicroBatch]) -> list[int]:
    """Return the number of groups, and of the targets of chosen documents."""
    each = [
        (Role(int(told[0])), many)
        for m in micro_batches
        for told, many in zip(m.targets.columns, m.targets.by_document, strict=True)
    ]
    groups = sum(role in (Role.CHOSEN, Role.DESIRABLE, Role.UNDESIRABLE, Role.SCORED) for role, _ in each)
    return [groups, sum(many for role, many in each if role == Role.CHOSEN)]


def digest_of(sample_ids: Sequence[int]) -> str:
    """Return the samples of a step as one hash: steps with the same hash have the same samples in the same order."""
    return xxhash.xxh3_64_hexdigest(np.array(sample_ids, dtype="<i8").tobytes())
