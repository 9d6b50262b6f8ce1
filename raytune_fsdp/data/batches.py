"""The endless stream of packed samples, cut into optimizer steps and blocks, and what each rank gets of it.

The stream depends on no world size. Block i of step s (from 1), with n blocks in a full step, belongs to rank
((s-1)*n + i) mod world. A rank with fewer blocks than another runs fillers after them, so that all ranks pass the same
collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np
import torch

from raytune_fsdp.data.order import Permutation, derive_key
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.errors import DataError, ResumeError
from raytune_fsdp.types import IGNORE, PADDING, Batch, Cursor, PackedSample, StepBatches

FILLER_INDEX = -1
"""`Batch.index` of a filler: it is no block of the step."""


class Stream:
    """The packed samples of all epochs, one after the other, for ever.

    Every epoch has the same windows and permutes their order and the samples inside them (not with data.shuffle=none).
    """

    def __init__(self, windows: Windows, *, seed: int) -> None:
        self.windows = windows
        self.seed = seed

    def samples(self, cursor: Cursor) -> Iterator[tuple[PackedSample, Cursor]]:
        """Samples from `cursor` on, each with the cursor behind it; the same tail from wherever it is entered."""
        epoch, first_place, first_index = cursor.epoch, cursor.window, cursor.index
        total = len(self.windows)
        if epoch < 0 or not 0 <= first_place < total:
            raise ResumeError(
                f"{cursor} is outside the data of {total} windows, so it belongs to other data; "
                "use the data the run was started with, or a new run.name"
            )
        while True:
            found = False
            order = self._permutation(total, "windows", epoch)
            for place in range(first_place, total):
                k = order(place)
                samples = self.windows.build(k).samples
                if not 0 <= first_index <= len(samples):
                    raise ResumeError(
                        f"{cursor} is outside its window of {len(samples)} samples, so it belongs to other data; "
                        "use the data the run was started with, or a new run.name"
                    )
                inside = self._permutation(len(samples), "samples", epoch, k)
                for index in range(first_index, len(samples)):
                    found = True
                    yield samples[inside(index)], self._behind(epoch, place, index, len(samples))
                first_index = 0
            if not found and first_place == 0:
                raise DataError(
                    f"no row is left after dropping the ones longer than data.seq_len={self.windows.seq_len}; "
                    "raise it, or set data.long_documents=truncate"
                )
            epoch, first_place = epoch + 1, 0

    def _permutation(self, n: int, what: str, *key: int) -> Callable[[int], int]:
        return Permutation(n, key=derive_key(what, self.seed, *key)) if self.windows.shuffled else range(n).__getitem__

    def _behind(self, epoch: int, place: int, index: int, samples: int) -> Cursor:
        if index + 1 < samples:
            return Cursor(epoch=epoch, window=place, index=index + 1)
        if place + 1 < len(self.windows):
            return Cursor(epoch=epoch, window=place + 1, index=0)
        return Cursor(epoch=epoch + 1, window=0, index=0)


def rank_batches(
    stream: Stream,
    *,
    cursor: Cursor,
    first_step: int,
    last_step: int,
    total_samples: int | None,
    global_batch: int,
    micro_batch: int,
    world: int,
    rank: int,
    device: torch.device | str = "cpu",
) -> Iterator[StepBatches]:
    """The blocks of `rank` in steps first_step..last_step, `cursor` being the first sample of first_step.

    With `total_samples` the run ends there: its last step may be short, and its last block may have fewer rows.
    """
    assert global_batch % micro_batch == 0, (global_batch, micro_batch)
    assert 0 <= rank < world, (rank, world)
    blocks_per_step = global_batch // micro_batch
    pad_id, seq_len = stream.windows.pad_id, stream.windows.seq_len
    samples = stream.samples(cursor)
    for step in range(first_step, last_step + 1):
        count = global_batch
        if total_samples is not None:
            count = min(count, total_samples - (step - 1) * global_batch)
            assert count > 0, f"step {step} starts behind the last of {total_samples} samples"
        num_blocks = -(-count // micro_batch)
        own: list[Batch] = []
        for index in range(num_blocks):
            block = list(islice(samples, min(micro_batch, count - index * micro_batch)))
            cursor = block[-1][1]
            if ((step - 1) * blocks_per_step + index) % world == rank:
                own.append(to_batch([sample for sample, _ in block], index=index, device=device))
        while len(own) < -(-num_blocks // world):
            own.append(filler(micro_batch, seq_len=seq_len, pad_id=pad_id, device=device))
        yield StepBatches(step=step, blocks=tuple(own), cursor=cursor)


def eval_batches(
    windows: Windows, *, micro_batch: int, world: int, rank: int, device: torch.device | str = "cpu"
) -> Iterator[Batch]:
    """All samples once, in the order of the windows; block i belongs to rank i mod world, fillers even it out."""
    assert 0 <= rank < world, (rank, world)
    samples = (sample for k in range(len(windows)) for sample in windows.build(k).samples)
    index = 0
    while block := list(islice(samples, micro_batch)):
        if index % world == rank:
            yield to_batch(block, index=index, device=device)
        index += 1
    # The ranks behind the owner of the last block have one block less than it.
    if index % world and rank >= index % world:
        yield filler(micro_batch, seq_len=windows.seq_len, pad_id=windows.pad_id, device=device)


def to_batch(samples: Sequence[PackedSample], *, index: int, device: torch.device | str = "cpu") -> Batch:
    """Samples side by side as int64 tensors, with the counts that are cheap to take before they leave the host."""
    input_ids = np.stack([sample.input_ids for sample in samples])
    labels = np.stack([sample.labels for sample in samples])
    position_ids = np.stack([sample.position_ids for sample in samples])
    source_ids = np.stack([sample.source_ids for sample in samples])
    real = source_ids != PADDING
    tensors = [
        torch.from_numpy(values.astype(np.int64)).to(device) for values in (input_ids, labels, position_ids, source_ids)
    ]
    return Batch(
        index=index,
        input_ids=tensors[0],
        labels=tensors[1],
        position_ids=tensors[2],
        source_ids=tensors[3],
        sample_ids=tuple(sample.id for sample in samples),
        tokens=int(real.sum()),
        target_tokens=int((labels[:, 1:] != IGNORE).sum()),
        # The token at position p of its document attends to p + 1 tokens.
        attended_pairs=int((position_ids[real].astype(np.int64) + 1).sum()),
    )


def filler(micro_batch: int, *, seq_len: int, pad_id: int, device: torch.device | str = "cpu") -> Batch:
    """A block of padding: the shape of a full block, nothing to learn, nothing counted."""
    shape = (micro_batch, seq_len)
    return Batch(
        index=FILLER_INDEX,
        input_ids=torch.full(shape, pad_id, dtype=torch.int64, device=device),
        labels=torch.full(shape, IGNORE, dtype=torch.int64, device=device),
        position_ids=torch.arange(seq_len, dtype=torch.int64, device=device).repeat(micro_batch, 1),
        source_ids=torch.full(shape, PADDING, dtype=torch.int64, device=device),
        sample_ids=(),
        tokens=0,
        target_tokens=0,
        attended_pairs=0,
    )
