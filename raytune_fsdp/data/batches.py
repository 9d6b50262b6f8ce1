"""The endless stream of packed samples, cut into optimizer steps and blocks, and what each rank gets of it.

The stream depends on no world size. Block i of step s (from 1), with n blocks in a full step, belongs to rank
((s-1)*n + i) mod world. A rank with fewer blocks than another runs fillers after them, so that all ranks pass the same
collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import count, islice

import numpy as np
import torch

from raytune_fsdp.data.order import Permutation, derive_key
from raytune_fsdp.data.window import Window
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.errors import DataError, ResumeError
from raytune_fsdp.types import IGNORE, PADDING, Batch, Cursor, PackedSample, StepBatches

FILLER_INDEX = -1
"""`Batch.index` of a filler: it is no block of the step."""


@dataclass(frozen=True, slots=True)
class StreamSample:
    """A packed sample on its way."""

    sample: PackedSample
    behind: Cursor
    """The sample after it."""
    built: bool
    """The first sample of a window that had to be tokenized, because no cache had it."""


class Stream:
    """The packed samples of all epochs, one after the other, for ever.

    Every epoch permutes the order of its windows and the samples inside them (not with data.shuffle=none).
    """

    def __init__(self, windows: Windows, *, seed: int) -> None:
        self.windows = windows
        self.seed = seed

    def samples(self, cursor: Cursor) -> Generator[StreamSample, None, None]:
        """Samples from `cursor` on; the same tail from wherever it is entered. The next window is built meanwhile."""
        empty = 0
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="windows") as ahead:
            coming = ahead.submit(self._load, cursor, 0)
            for number in count():
                window, built = coming.result()
                coming = ahead.submit(self._load, cursor, number + 1)
                empty = 0 if len(window.samples) else empty + 1
                self.check_not_empty(empty)
                yield from self._section(cursor, number, window, built)

    def section(self, cursor: Cursor, number: int) -> Iterator[StreamSample]:
        """The samples of the window that comes `number` windows after the cursor's own one."""
        window, built = self._load(cursor, number)
        return self._section(cursor, number, window, built)

    def first_window(self, cursor: Cursor) -> tuple[Window, bool]:
        """The window that the cursor is in, and whether it had to be built."""
        return self._load(cursor, 0)

    def check_not_empty(self, empty: int) -> None:
        """Raise if so many windows in a row without a sample mean that there never will be one."""
        if empty > self.windows.enough():
            raise DataError(
                f"no row of {', '.join(self.windows.names)} is left after dropping the ones that data.bad_rows="
                f"{self.windows.data.bad_rows} and data.long_documents={self.windows.data.long_documents} leave out "
                f"(data.seq_len={self.windows.seq_len}); raytune-fsdp data stats names the reasons"
            )

    def place(self, cursor: Cursor, number: int) -> tuple[int, int]:
        """Epoch, and place in it, of the window that comes `number` windows after the cursor's own one."""
        epoch, place = cursor.epoch, cursor.window
        total = self.windows.count(max(epoch, 0))
        if epoch < 0 or not 0 <= place < max(total, 1):  # with small weights an epoch may have no window
            raise self._foreign(cursor, f"{total} windows")
        place += number
        if self.windows.repeats:
            return epoch + place // total, place % total
        while place >= (total := self.windows.count(epoch)):
            epoch, place = epoch + 1, place - total
        return epoch, place

    def window_at(self, epoch: int, place: int) -> int:
        """Number of the window at this place of an epoch."""
        return self._order(self.windows.count(epoch), "windows", epoch)(place)

    def _load(self, cursor: Cursor, number: int) -> tuple[Window, bool]:
        epoch, place = self.place(cursor, number)
        return self.windows.get(epoch, self.window_at(epoch, place))

    def _section(self, cursor: Cursor, number: int, window: Window, built: bool) -> Iterator[StreamSample]:
        epoch, place = self.place(cursor, number)
        samples, first = window.samples, 0 if number else cursor.index
        if not 0 <= first <= len(samples):
            raise self._foreign(cursor, f"a window of {len(samples)} samples")
        inside = self._order(len(samples), "samples", epoch, self.window_at(epoch, place))
        for index in range(first, len(samples)):
            behind = self._behind(epoch, place, index, len(samples))
            yield StreamSample(samples[inside(index)], behind, built and index == first)

    def _order(self, n: int, what: str, *key: int) -> Callable[[int], int]:
        return Permutation(n, key=derive_key(what, self.seed, *key)) if self.windows.shuffled else range(n).__getitem__

    def _behind(self, epoch: int, place: int, index: int, samples: int) -> Cursor:
        if index + 1 < samples:
            return Cursor(epoch=epoch, window=place, index=index + 1)
        if place + 1 < self.windows.count(epoch):
            return Cursor(epoch=epoch, window=place + 1, index=0)
        return Cursor(epoch=epoch + 1, window=0, index=0)

    def _foreign(self, cursor: Cursor, what: str) -> ResumeError:
        return ResumeError(
            f"{cursor} is outside of {what}, so it belongs to other data; "
            "use the data the run was started with, or a new run.name"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How the stream is divided: into steps, steps into blocks, blocks among the ranks."""

    first_step: int
    last_step: int
    total_samples: int | None
    """Where the run ends: its last step may be short, and its last block may have fewer rows."""
    global_batch: int
    micro_batch: int
    world: int

    def __post_init__(self) -> None:
        assert self.global_batch % self.micro_batch == 0, (self.global_batch, self.micro_batch)

    def block_sizes(self, step: int) -> list[int]:
        """Samples of each block of a step."""
        left = self.global_batch
        if self.total_samples is not None:
            left = min(left, self.total_samples - (step - 1) * self.global_batch)
            assert left > 0, f"step {step} starts behind the last of {self.total_samples} samples"
        whole, rest = divmod(left, self.micro_batch)
        return [self.micro_batch] * whole + [rest] * (rest > 0)

    def first_block(self, step: int) -> int:
        """Number of the step's first block, counted from the start of the run."""
        return (step - 1) * (self.global_batch // self.micro_batch)

    def owner(self, step: int, index: int) -> int:
        return (self.first_block(step) + index) % self.world

    def rounds(self, step: int) -> int:
        """Blocks of each rank, fillers included."""
        return -(-len(self.block_sizes(step)) // self.world)

    def samples(self) -> int:
        """Samples of all steps."""
        return (self.last_step - self.first_step) * self.global_batch + sum(self.block_sizes(self.last_step))


def rank_batches(
    stream: Stream, division: Division, *, cursor: Cursor, rank: int, device: torch.device | str = "cpu"
) -> Iterator[StepBatches]:
    """The blocks of `rank` in all steps, `cursor` being the first sample of the first one. Runs through all samples."""
    assert 0 <= rank < division.world, (rank, division.world)
    with closing(stream.samples(cursor)) as samples:
        for step in range(division.first_step, division.last_step + 1):
            own: list[Batch] = []
            built = 0
            for index, size in enumerate(division.block_sizes(step)):
                block = list(islice(samples, size))
                built += sum(each.built for each in block)
                if division.owner(step, index) == rank:
                    own.append(stream_batch(block, index=index, device=device))
            yield fill_up(step, own, division, stream.windows, device, windows_built=built)


def fill_up(
    step: int,
    own: list[Batch],
    division: Division,
    windows: Windows,
    device: torch.device | str,
    *,
    windows_built: int,
) -> StepBatches:
    """A rank's own blocks of a step, and fillers until it has as many as every other rank."""
    while len(own) < division.rounds(step):
        own.append(filler(division.micro_batch, seq_len=windows.seq_len, pad_id=windows.pad_id, device=device))
    return StepBatches(step=step, blocks=tuple(own), windows_built=windows_built)


def eval_batches(
    windows: Windows, *, micro_batch: int, world: int, rank: int, device: torch.device | str = "cpu"
) -> Iterator[Batch]:
    """All samples once, in the order of the windows; block i belongs to rank i mod world, fillers even it out."""
    assert 0 <= rank < world, (rank, world)
    samples = (sample for k in range(windows.count(0)) for sample in windows.get(0, k)[0].samples)
    index = 0
    while block := list(islice(samples, micro_batch)):
        if index % world == rank:
            yield to_batch(block, index=index, behind=Cursor(), device=device)
        index += 1
    # The ranks behind the owner of the last block have one block less than it.
    if index % world and rank >= index % world:
        yield filler(micro_batch, seq_len=windows.seq_len, pad_id=windows.pad_id, device=device)


def stream_batch(block: Sequence[StreamSample], *, index: int, device: torch.device | str = "cpu") -> Batch:
    return to_batch(
        [each.sample for each in block],
        index=index,
        behind=block[-1].behind,
        device=device,
    )


def to_batch(
    samples: Sequence[PackedSample],
    *,
    index: int,
    behind: Cursor,
    device: torch.device | str = "cpu",
) -> Batch:
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
        behind=behind,
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
        behind=Cursor(),
    )
