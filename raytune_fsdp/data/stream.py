"""The endless stream of packed samples, the same at every world size. Does not import torch.

`division.Division` says how it is divided into steps, micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

from raytune_fsdp.base.batch import Cursor, PackedSample
from raytune_fsdp.base.errors import DataError, ResumeError
from raytune_fsdp.base.random import derive_key
from raytune_fsdp.data.cache import Window
from raytune_fsdp.data.mixture import Permutation
from raytune_fsdp.data.packing import RowOrigin
from raytune_fsdp.data.windows import Windows


@dataclass(frozen=True, slots=True)
class StreamSample:
    """A packed sample with its place in the stream."""

    sample: PackedSample
    after: Cursor
    """The place of the sample after it."""
    built: bool
    """Whether this is the first sample of a window that was tokenized because no cache had it."""


class Stream:
    """The packed samples of all epochs, one epoch after the other, without end.

    Every epoch permutes its windows and the samples inside them, unless data.shuffle=none.
    """

    def __init__(self, windows: Windows, *, seed: int) -> None:
        self.windows = windows
        self.seed = seed

    def samples(self, cursor: Cursor) -> Generator[StreamSample, None, None]:
        """Yield samples from `cursor` on, in the same order from any cursor. A thread builds the next window."""
        empty = 0
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="windows") as ahead:
            coming = ahead.submit(self.load, cursor, 0)
            for number in count():
                window, built = coming.result()
                coming = ahead.submit(self.load, cursor, number + 1)
                empty = 0 if len(window.samples) else empty + 1
                self.check_not_empty(empty)
                yield from self._section(cursor, number, window, built)

    def section(self, cursor: Cursor, number: int) -> Iterator[StreamSample]:
        """Yield the samples of the window `number` windows after the cursor's own."""
        window, built = self.load(cursor, number)
        return self._section(cursor, number, window, built)

    def origins(self, epoch: int, place: int) -> list[list[RowOrigin]]:
        """Return where the documents of each sample of a window come from; samples in the order of the stream.

        Reads the rows of the window again.
        """
        k = self.window_at(epoch, place)
        found = self.windows.origins(epoch, k)
        inside = self.order(len(found), "samples", epoch, k)
        return [found[inside(index)] for index in range(len(found))]

    def check_not_empty(self, empty: int) -> None:
        """Raise if, after `empty` windows in a row without a sample, no window can have one."""
        if empty > self.windows.enough():
            raise DataError(
                f"no row of {', '.join(self.windows.names)} is left after dropping those that data.bad_rows="
                f"{self.windows.data.bad_rows} and data.long_documents={self.windows.data.long_documents} leave out "
                f"(data.seq_len={self.windows.seq_len}); `raytune-fsdp data stats` lists the reasons"
            )

    def seek(self, cursor: Cursor, samples: int) -> Cursor:
        """Return the place `samples` samples after the cursor. Reads the windows in between, but unpacks no sample."""
        left, empty = cursor.index + samples, 0
        for number in count():
            epoch, place = self.place(cursor, number)
            many = len(self.windows.get(epoch, self.window_at(epoch, place))[0].samples)
            if left < many:
                return Cursor(epoch=epoch, window=place, index=left)
            left -= many
            empty = 0 if many else empty + 1
            self.check_not_empty(empty)
        raise AssertionError("the stream has no end")

    def place(self, cursor: Cursor, number: int) -> tuple[int, int]:
        """Return the epoch of the window `number` windows after the cursor's own, and its place in that epoch."""
        epoch, place = cursor.epoch, cursor.window
        total = self.windows.count(max(epoch, 0))
        if epoch < 0 or not 0 <= place < max(total, 1):  # with small weights an epoch may have no window at all
            raise self._foreign(cursor, f"{total} windows")
        place += number
        if self.windows.repeats:
            return epoch + place // total, place % total
        while place >= (total := self.windows.count(epoch)):
            epoch, place = epoch + 1, place - total
        return epoch, place

    def window_at(self, epoch: int, place: int) -> int:
        """Return the number of the window at this place of an epoch."""
        return self.order(self.windows.count(epoch), "windows", epoch)(place)

    def load(self, cursor: Cursor, number: int) -> tuple[Window, bool]:
        """Return the window `number` windows after the cursor's own, and whether it had to be built."""
        epoch, place = self.place(cursor, number)
        return self.windows.get(epoch, self.window_at(epoch, place))

    def _section(self, cursor: Cursor, number: int, window: Window, built: bool) -> Iterator[StreamSample]:
        epoch, place = self.place(cursor, number)
        samples, first = window.samples, 0 if number else cursor.index
        if not 0 <= first <= len(samples):
            raise self._foreign(cursor, f"a window of {len(samples)} samples")
        inside = self.order(len(samples), "samples", epoch, self.window_at(epoch, place))
        for index in range(first, len(samples)):
            if index + 1 < len(samples):
                after = Cursor(epoch=epoch, window=place, index=index + 1)
            elif place + 1 < self.windows.count(epoch):
                after = Cursor(epoch=epoch, window=place + 1, index=0)
            else:
                after = Cursor(epoch=epoch + 1, window=0, index=0)
            yield StreamSample(samples[inside(index)], after, built and index == first)

    def order(self, n: int, what: str, *key: int) -> Callable[[int], int]:
        return Permutation(n, key=derive_key(what, self.seed, *key)) if self.windows.shuffled else range(n).__getitem__

    def _foreign(self, cursor: Cursor, what: str) -> ResumeError:
        return ResumeError(
            f"{cursor} is outside of {what}, so it belongs to other data: "
            "use the data the run was started with, or a new run.name"
        )
