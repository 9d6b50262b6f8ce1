"""Each rank's share of the stream, as tensors.

A rank with fewer micro-batches in a step than another runs fillers after them, so that all ranks run the same
collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice

import numpy as np
import torch

from raytune_fsdp.base.batch import IGNORE, PADDING, Cursor, MicroBatch, PackedSample, StepBatches
from raytune_fsdp.data.stream import Stream, StreamSample
from raytune_fsdp.data.targets import borders_of, columns_of, targets_of
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.plan.division import Division
from raytune_fsdp.plan.step_counts import StepCounts

FILLER_INDEX = -1
"""`MicroBatch.index` of a filler, which is none of the step's own micro-batches."""


def rank_batches(
    stream: Stream,
    division: Division,
    steps: range,
    *,
    cursor: Cursor,
    data_rank: int,
) -> Iterator[StepBatches]:
    """Yield a rank's micro-batches, step by step; the first step begins at `cursor`. Reads the samples of all ranks."""
    assert 0 <= data_rank < division.data_ranks, (data_rank, division.data_ranks)
    with closing(stream.samples(cursor)) as samples:
        for step in steps:
            own: list[MicroBatch] = []
            built = 0
            for index, size in enumerate(division.micro_batch_sizes(step)):
                taken = list(islice(samples, size))
                built += sum(each.built for each in taken)
                if division.owner(step, index) == data_rank:
                    own.append(stream_batch(taken, index=index))
            yield fill_up(step, own, division, stream.windows, windows_built=built)


def fill_up(
    step: int,
    own: list[MicroBatch],
    division: Division,
    windows: Windows,
    *,
    windows_built: int,
) -> StepBatches:
    """Add fillers to a rank's own micro-batches of a step until it has as many as every other rank."""
    while len(own) < division.rounds(step):
        own.append(filler(division.micro_batch, seq_len=windows.seq_len, pad_id=windows.pad_id))
    grouped = windows.kind is not None
    counts = StepCounts.pack(step, own, windows_built, division, len(windows.names), grouped=grouped)
    return StepBatches(
        step=step, micro_batches=tuple(own), counts=torch.tensor(counts, dtype=torch.int64), windows_built=windows_built
    )


def eval_batches(windows: Windows, *, micro_batch: int, data_ranks: int, data_rank: int) -> Iterator[MicroBatch]:
    """Yield a rank's share of all samples, each once, in the order of the windows.

    Micro-batch i belongs to rank i mod data_ranks. Fillers give all ranks the same number.
    """
    assert 0 <= data_rank < data_ranks, (data_rank, data_ranks)
    samples = (sample for k in range(windows.count(0)) for sample in windows.get(0, k)[0].samples)
    index = 0
    while taken := list(islice(samples, micro_batch)):
        if index % data_ranks == data_rank:
            yield to_batch(taken, index=index, after=Cursor())
        index += 1
    # The ranks after the owner of the last micro-batch have one micro-batch fewer than it does.
    if index % data_ranks and data_rank >= index % data_ranks:
        yield filler(micro_batch, seq_len=windows.seq_len, pad_id=windows.pad_id)


def stream_batch(taken: Sequence[StreamSample], *, index: int) -> MicroBatch:
    return to_batch(
        [each.sample for each in taken],
        index=index,
        after=taken[-1].after,
    )


def to_batch(
    samples: Sequence[PackedSample],
    *,
    index: int,
    after: Cursor,
) -> MicroBatch:
    """Stack samples into int64 tensors, and count what is cheap to count before they leave the host."""
    input_ids = np.stack([sample.input_ids for sample in samples])
    labels = np.stack([sample.labels for sample in samples])
    position_ids = np.stack([sample.position_ids for sample in samples])
    source_ids = np.stack([sample.source_ids for sample in samples])
    real, borders = source_ids != PADDING, borders_of(position_ids)
    tensors = [torch.from_numpy(values.astype(np.int64)) for values in (input_ids, labels, position_ids, source_ids)]
    return MicroBatch(
        index=index,
        input_ids=tensors[0],
        labels=tensors[1],
        position_ids=tensors[2],
        source_ids=tensors[3],
        borders=borders,
        targets=targets_of(labels, source_ids, borders, columns_of(samples)),
        sample_ids=tuple(sample.id for sample in samples),
        tokens=int(real.sum()),
        target_tokens=int((labels[:, 1:] != IGNORE).sum()),
        # The token at position p of its document attends to p + 1 tokens.
        attended_pairs=int((position_ids[real].astype(np.int64) + 1).sum()),
        after=after,
    )


def filler(micro_batch: int, *, seq_len: int, pad_id: int) -> MicroBatch:
    """Return a micro-batch of padding: the shape of a full one, nothing trained on, nothing counted."""
    shape = (micro_batch, seq_len)
    positions = np.tile(np.arange(seq_len), (micro_batch, 1))
    return MicroBatch(
        index=FILLER_INDEX,
        input_ids=torch.full(shape, pad_id, dtype=torch.int64),
        labels=torch.full(shape, IGNORE, dtype=torch.int64),
        position_ids=torch.from_numpy(positions),
        source_ids=torch.full(shape, PADDING, dtype=torch.int64),
        borders=borders_of(positions),
        targets=targets_of(np.empty((0, 1)), np.empty((0, 1)), borders_of(positions)),
        sample_ids=(),
        tokens=0,
        target_tokens=0,
        attended_pairs=0,
        after=Cursor(),
    )
