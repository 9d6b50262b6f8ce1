"""Documents become packed samples: side by side in sequences of one length.

Nothing leaks from a document to the next: positions restart, and the first token of a document is no target, because it
would be predicted from the last token of another one. A document that is cut goes on as a new one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import xxhash

from raytune_fsdp.data.formats import Document
from raytune_fsdp.types import IGNORE, PADDING, PackedSample

if TYPE_CHECKING:
    from raytune_fsdp.types import Int32Array

    BoolArray = np.ndarray[Any, np.dtype[np.bool_]]
    Int64Array = np.ndarray[Any, np.dtype[np.int64]]

_HASHED_AT_ONCE = 32

Packing = Literal["best_fit", "concat", "none"]


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing: bins of indices into `lengths` whose sums are at most `capacity`.

    Long ones first, equal ones by index; each goes to the fullest bin that has room. Each bin is in ascending order and
    the bins are ordered by their first index: the result follows the order of the input as far as packing lets it.
    """
    bins: list[list[int]] = []
    bins_by_space: dict[int, list[int]] = {}
    spaces: list[int] = []  # sorted keys of bins_by_space
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        assert 0 < length <= capacity, f"length {length} of {index} does not fit {capacity}"
        place = bisect_left(spaces, length)
        if place == len(spaces):
            chosen, space = len(bins), capacity
            bins.append([])
        else:
            space = spaces[place]
            chosen = bins_by_space[space].pop()
            if not bins_by_space[space]:
                del bins_by_space[space], spaces[place]
        bins[chosen].append(index)
        left = space - length
        if left not in bins_by_space:
            bins_by_space[left] = []
            insort(spaces, left)
        bins_by_space[left].append(chosen)
    return sorted(sorted(members) for members in bins)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSamples(Sequence[PackedSample]):
    """Packed samples of one length, compact: what follows from the lengths of the documents is made when asked for.

    Sample i holds the documents `first_document[i]` to `first_document[i + 1]`, side by side, then padding.
    """

    input_ids: Int32Array
    """[samples, seq_len]"""
    trained: BoolArray
    """[samples, seq_len]: whether the token is a label."""
    ids: Int64Array
    first_document: Int64Array
    lengths: Int32Array
    """Tokens of each document."""
    sources: Int32Array
    """Dataset of each document."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        return sum(values.nbytes for values in (self.input_ids, self.trained, self.lengths, self.sources))

    @overload
    def __getitem__(self, index: int) -> PackedSample: ...

    @overload
    def __getitem__(self, index: slice) -> list[PackedSample]: ...

    def __getitem__(self, index: int | slice) -> PackedSample | list[PackedSample]:
        if isinstance(index, slice):
            return [self._sample(i) for i in range(*index.indices(len(self)))]
        return self._sample(range(len(self))[index])

    def __iter__(self) -> Iterator[PackedSample]:
        return (self._sample(i) for i in range(len(self)))

    def _sample(self, index: int) -> PackedSample:
        (sample,) = self.rows(index, index + 1)
        return PackedSample(
            input_ids=sample[0],
            labels=sample[1],
            position_ids=sample[2],
            source_ids=sample[3],
            id=int(self.ids[index]),
        )

    def rows(self, first: int, last: int) -> Int32Array:
        """[samples, 4, seq_len]: input ids, labels, position ids and source ids of samples first <= i < last."""
        input_ids = self.input_ids[first:last]
        many, seq_len = input_ids.shape
        rows = np.empty((many, 4, seq_len), dtype=np.int32)
        rows[:, 0] = input_ids
        rows[:, 1] = np.where(self.trained[first:last], input_ids, np.int32(IGNORE))
        # Each sample's documents and the padding behind them, as one sequence of segments.
        borders = self.first_document[first : last + 1]
        documents = slice(borders[0], borders[-1])
        ends = borders[1:] - borders[0]
        before = np.concatenate([[0], np.cumsum(self.lengths[documents], dtype=np.int64)])
        padding = seq_len - np.diff(before[borders - borders[0]])
        segments = np.insert(self.lengths[documents].astype(np.int64), ends, padding)
        starts = np.cumsum(segments) - segments
        positions = np.arange(many * seq_len) - np.repeat(starts, segments)
        rows[:, 2] = positions.reshape(many, seq_len)
        rows[:, 3] = np.repeat(np.insert(self.sources[documents], ends, PADDING), segments).reshape(many, seq_len)
        return rows


def pack(
    documents: Sequence[Document],
    *,
    sources: Sequence[int],
    seq_len: int,
    pad_id: int,
    packing: Packing,
    reorder: Callable[[int], Callable[[int], int]] | None = None,
) -> PackedSamples:
    """Packed samples of `seq_len` tokens; `sources[i]` is document i's dataset.

    Documents are no longer than `seq_len`, or packing is `concat`. `reorder(n)` is the order in which n samples are
    laid down.
    """
    if packing == "concat":
        documents, sources, bins = _cut(documents, sources, seq_len)
    elif packing == "none":
        bins = [[index] for index in range(len(documents))]
    else:
        bins = best_fit([len(document.input_ids) for document in documents], seq_len)
    if reorder is not None:
        order = reorder(len(bins))
        bins = [bins[order(i)] for i in range(len(bins))]
    return _lay_down(documents, sources, bins, seq_len=seq_len, pad_id=pad_id)


def _cut(
    documents: Sequence[Document], sources: Sequence[int], seq_len: int
) -> tuple[list[Document], list[int], list[list[int]]]:
    """Documents one behind the other, cut where a sample is full; every piece is a document of its own."""
    pieces: list[Document] = []
    origins: list[int] = []
    bins: list[list[int]] = []
    room = 0
    for document, source in zip(documents, sources, strict=True):
        start = 0
        while start < len(document.input_ids):
            if not room:
                bins.append([])
                room = seq_len
            piece = Document(document.input_ids[start : start + room], document.labels[start : start + room])
            bins[-1].append(len(pieces))
            pieces.append(piece)
            origins.append(source)
            start += len(piece.input_ids)
            room -= len(piece.input_ids)
    return pieces, origins, bins


def _lay_down(
    documents: Sequence[Document], sources: Sequence[int], bins: Sequence[Sequence[int]], *, seq_len: int, pad_id: int
) -> PackedSamples:
    order = [index for members in bins for index in members]
    in_order = [documents[index] for index in order]
    lengths = np.array([len(document.input_ids) for document in in_order], dtype=np.int32)
    first_document = np.cumsum([0, *map(len, bins)], dtype=np.int64)
    before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    input_ids = np.full((len(bins), seq_len), pad_id, dtype=np.int32)
    trained = np.zeros((len(bins), seq_len), dtype=np.bool_)
    if order:
        real = np.arange(seq_len) < np.diff(before[first_document])[:, None]
        input_ids[real] = np.concatenate([document.input_ids for document in in_order])
        flags = np.concatenate([document.labels for document in in_order]) != IGNORE
        flags[before[:-1]] = False  # nothing in its sample predicts a document's first token
        trained[real] = flags
    samples = PackedSamples(
        input_ids=input_ids,
        trained=trained,
        ids=np.zeros(len(bins), dtype=np.int64),
        first_document=first_document,
        lengths=lengths,
        sources=np.array([sources[index] for index in order], dtype=np.int32),
    )
    for first in range(0, len(bins), _HASHED_AT_ONCE):
        rows = samples.rows(first, first + _HASHED_AT_ONCE)
        samples.ids[first : first + len(rows)] = [sample_id(row) for row in rows]
    return samples


def sample_id(row: Int32Array) -> int:
    """xxh3_64 over the bytes of a sample's four arrays (little-endian int32), as a signed 64-bit integer."""
    unsigned = xxhash.xxh3_64_intdigest(np.ascontiguousarray(row, dtype="<i4").data)
    return unsigned - (1 << 64) if unsigned >= 1 << 63 else unsigned
