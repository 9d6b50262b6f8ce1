"""Pack documents into samples: one after another, in sequences of one length.

Nothing leaks from one document to the next: positions restart, and the first token of a document is not a target,
because it would be predicted from the last token of another document. When a document is cut, each piece is a document
of its own. The documents of a group directly follow one another in one sample, and none is cut.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, overload

import numpy as np
import xxhash

from raytune_fsdp.base.batch import GROUP_COLUMNS, IGNORE, PADDING, PackedSample, Role
from raytune_fsdp.data.rows.formats import Document
from raytune_fsdp.plan.counts import DatasetCount, SkippedRow

if TYPE_CHECKING:
    from raytune_fsdp.base.batch import BoolArray, Float64Array, Int32Array, Int64Array

# Samples laid out together: at 2048 tokens their int32 arrays take 1 MiB, which stays in the processor's cache. 16.6 ns
# a token, against 73 with one sample at a time and 21 with all of a window.
_SAMPLES_AT_ONCE = 32

OPEN_SAMPLES = 32
"""The number of samples that `best_fit_in_order` can still add a document to."""

Packing = Literal["best_fit", "concat", "none"]


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack best-fit decreasing: return bins of indices into `lengths` whose sums are at most `capacity`.

    The longest comes first, and of equal lengths the lower index. Each goes into the fullest bin that has room. Each
    bin is in ascending order and bins are ordered by their first index, so the result keeps the order of the input as
    far as packing allows.
    """
    # Over windows of 4096 documents (mean 400, capacity 2048) this makes 0.1 % more samples than over all documents at
    # once, which in turn are the theoretical minimum; over windows of 256 documents 1.2 % more.
    bins: list[list[int]] = []
    bins_by_space: dict[int, list[int]] = {}
    spaces: list[int] = []  # sorted keys of bins_by_space: at most `capacity` of them, so inserting stays cheap
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


def best_fit_in_order(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack documents best-fit as they come: only the last OPEN_SAMPLES samples still take a document.

    So no document is placed further than that before the newest sample, and the samples keep the order of the input
    whatever the lengths are. `best_fit` places the long documents first and the short ones wherever they fit, which no
    order of its samples can undo.
    """
    bins: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (space, bin) of the open bins, sorted
    for index, length in enumerate(lengths):
        assert 0 < length <= capacity, f"length {length} of {index} does not fit {capacity}"
        place = bisect_left(spaces, (length, 0))
        if place == len(spaces):
            chosen, space = len(bins), capacity
            bins.append([])
            spaces = [each for each in spaces if each[1] > chosen - OPEN_SAMPLES]
        else:
            space, chosen = spaces.pop(place)
        bins[chosen].append(index)
        if space > length:
            insort(spaces, (space - length, chosen))
    return bins


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSamples(Sequence[PackedSample]):
    """Packed samples of one length, stored compactly: positions and source ids are computed when asked for.

    Sample i holds the documents `first_document[i]` to `first_document[i + 1]`, one after another, then padding.
    """

    input_ids: Int32Array
    """[samples, seq_len]"""
    trained: BoolArray
    """[samples, seq_len]: whether the token is trained on, that is, its own label."""
    ids: Int64Array
    first_document: Int64Array
    lengths: Int32Array
    """Tokens of each document."""
    sources: Int32Array
    """Dataset of each document."""
    columns: Float64Array | None = None
    """[documents, columns]: what a loss is told of each document's row; None: nothing."""

    def __len__(self) -> int:
        return len(self.ids)

    def tells(self, columns: int) -> bool:
        """Return whether a loss would be told so many numbers of each document's row, all finite."""
        found = np.empty((len(self.lengths), 0)) if self.columns is None else self.columns
        return not len(self.lengths) or (found.shape == (len(self.lengths), columns) and bool(np.isfinite(found).all()))

    @property
    def groups(self) -> Int64Array:
        """The number of groups of each sample: pairs, or judged answers."""
        assert self.columns is not None, "its documents stand alone"
        first = ~np.isin(self.columns[:, GROUP_COLUMNS.index("role")], (Role.REJECTED, Role.MISMATCHED))
        before = np.concatenate([[0], np.cumsum(first, dtype=np.int64)])
        return np.diff(before[self.first_document])

    @property
    def nbytes(self) -> int:
        told = 0 if self.columns is None else self.columns.nbytes
        return told + sum(each.nbytes for each in (self.input_ids, self.trained, self.lengths, self.sources))

    @overload
    def __getitem__(self, index: int) -> PackedSample: ...

    @overload
    def __getitem__(self, index: slice) -> list[PackedSample]: ...

    def __getitem__(self, index: int | slice) -> PackedSample | list[PackedSample]:
        if isinstance(index, slice):
            return [self._sample(i) for i in range(*index.indices(len(self)))]
        return self._sample(range(len(self))[index])

    def _sample(self, index: int) -> PackedSample:
        (sample,) = self.rows(index, index + 1)
        return PackedSample(
            input_ids=sample[0],
            labels=sample[1],
            position_ids=sample[2],
            source_ids=sample[3],
            id=int(self.ids[index]),
            columns=self._columns(index),
        )

    def _columns(self, index: int) -> Float64Array | None:
        """Return what a loss is told of each token's row of a sample; 0 of padding."""
        if self.columns is None:
            return None
        documents = slice(self.first_document[index], self.first_document[index + 1])
        found = np.zeros((self.columns.shape[1], self.input_ids.shape[1]))
        told = np.repeat(self.columns[documents], self.lengths[documents], axis=0)
        found[:, : len(told)] = told.T
        return found

    def rows(self, first: int, last: int) -> Int32Array:
        """Return [samples, 4, seq_len]: input, label, position and source ids of samples first <= i < last."""
        input_ids = self.input_ids[first:last]
        rows = np.empty((len(input_ids), 4, input_ids.shape[1]), dtype=np.int32)
        rows[:, 0] = input_ids
        rows[:, 1] = np.where(self.trained[first:last], input_ids, np.int32(IGNORE))
        borders = self.first_document[first : last + 1]
        documents = slice(borders[0], borders[-1])
        _lay_out(self.lengths[documents], self.sources[documents], borders - borders[0], out=rows[:, 2:])
        return rows


def _lay_out(lengths: Int32Array, sources: Int32Array, borders: Int64Array, *, out: Int32Array) -> Int64Array:
    """Fill [samples, 2, seq_len] with the positions and datasets of the tokens; return where each document starts.

    Sample i has the documents `borders[i]` to `borders[i + 1]`, then padding. Starts are counted through all samples,
    laid end to end.
    """
    samples, _, seq_len = out.shape
    before = np.concatenate([[0], np.cumsum(lengths)])
    padding = seq_len - np.diff(before[borders])
    # The documents and the padding of each sample, as one sequence of segments. The places given to np.insert count in
    # the array before insertion, so they are the borders themselves.
    segments = np.insert(lengths, borders[1:], padding)
    starts = np.cumsum(segments, dtype=np.int32) - segments
    positions = np.arange(samples * seq_len, dtype=np.int32) - np.repeat(starts, segments)
    out[:, 0] = positions.reshape(samples, seq_len)
    out[:, 1] = np.repeat(np.insert(sources, borders[1:], PADDING), segments).reshape(samples, seq_len)
    document_starts: Int64Array = before[:-1] + np.repeat(np.cumsum(padding) - padding, np.diff(borders))
    return document_starts


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Which documents, or pieces of documents, are in which packed sample."""

    pieces: Sequence[Document]
    parents: Sequence[int]
    """For each piece the number of the document it was cut from, or is, or whose group it is of, in order."""
    bins: list[list[int]]
    """The pieces of each sample."""


def arrange(
    documents: Sequence[Document],
    *,
    seq_len: int,
    packing: Packing,
    reorder: Callable[[int], Callable[[int], int]] | None = None,
    in_order: bool = False,
) -> Arrangement:
    """Divide documents among packed samples. See `pack`."""
    parents: Sequence[int] = range(len(documents))
    if packing == "concat":
        documents, parents, bins = _cut(documents, seq_len)
    elif packing == "none":
        bins = [[index] for index in range(len(documents))]
    else:
        fit = best_fit_in_order if in_order else best_fit
        bins = fit([document.length for document in documents], seq_len)
    if reorder is not None:
        order = reorder(len(bins))
        bins = [bins[order(i)] for i in range(len(bins))]
    if any(document.others for document in documents):
        assert packing != "concat", "groups are not cut"
        return _in_groups(documents, bins)
    return Arrangement(documents, parents, bins)


def _in_groups(documents: Sequence[Document], bins: Sequence[Sequence[int]]) -> Arrangement:
    """Return the arrangement of all documents of these groups, as `bins` has the first of each."""
    pieces = [each for document in documents for each in document.members]
    many = [len(document.members) for document in documents]
    firsts = np.cumsum([0, *many]).tolist()
    parents = np.repeat(np.arange(len(documents)), many).tolist()
    placed = [[at for index in members for at in range(firsts[index], firsts[index + 1])] for members in bins]
    return Arrangement(pieces, parents, placed)


def pack(
    documents: Sequence[Document],
    *,
    sources: Sequence[int],
    seq_len: int,
    pad_id: int,
    packing: Packing,
    reorder: Callable[[int], Callable[[int], int]] | None = None,
    in_order: bool = False,
) -> PackedSamples:
    """Pack documents into samples of `seq_len` tokens; `sources[i]` is document i's dataset.

    No document is longer than `seq_len`, unless packing is `concat`. `reorder(n)` is the order of n samples. With
    `in_order`, best fit keeps the order of the documents.
    """
    arranged = arrange(documents, seq_len=seq_len, packing=packing, reorder=reorder, in_order=in_order)
    return fill_samples(arranged, sources=sources, seq_len=seq_len, pad_id=pad_id)


def fill_samples(arranged: Arrangement, *, sources: Sequence[int], seq_len: int, pad_id: int) -> PackedSamples:
    """Build the packed samples of an arrangement; `sources[i]` is document i's dataset."""
    pieces, parents, bins = arranged.pieces, arranged.parents, arranged.bins
    placed = [index for members in bins for index in members]
    samples = PackedSamples(
        input_ids=np.empty((len(bins), seq_len), dtype=np.int32),
        trained=np.empty((len(bins), seq_len), dtype=np.bool_),
        ids=np.empty(len(bins), dtype=np.int64),
        first_document=np.cumsum([0, *map(len, bins)], dtype=np.int64),
        lengths=np.array([len(pieces[index].input_ids) for index in placed], dtype=np.int32),
        sources=np.array([sources[parents[index]] for index in placed], dtype=np.int32),
        columns=np.array([pieces[index].columns for index in placed]) if placed and pieces[placed[0]].columns else None,
    )
    pads = np.full(seq_len, pad_id, dtype=np.int32), np.full(seq_len, IGNORE, dtype=np.int32)
    for first in range(0, len(bins), _SAMPLES_AT_ONCE):
        _fill(samples, pieces, bins[first : first + _SAMPLES_AT_ONCE], first, pads)
    return samples


def _cut(documents: Sequence[Document], seq_len: int) -> tuple[list[Document], list[int], list[list[int]]]:
    """Lay documents one after another, cut where a sample is full; every piece is a document of its own."""
    pieces: list[Document] = []
    parents: list[int] = []
    bins: list[list[int]] = []
    room = 0
    for number, document in enumerate(documents):
        start = 0
        while start < len(document.input_ids):
            if not room:
                bins.append([])
                room = seq_len
            part = slice(start, start + room)
            piece = replace(document, input_ids=document.input_ids[part], labels=document.labels[part])
            bins[-1].append(len(pieces))
            pieces.append(piece)
            parents.append(number)
            start += len(piece.input_ids)
            room -= len(piece.input_ids)
    return pieces, parents, bins


def _fill(
    samples: PackedSamples,
    documents: Sequence[Document],
    bins: Sequence[Sequence[int]],
    first: int,
    pads: tuple[Int32Array, Int32Array],
) -> None:
    """Write the documents in `bins` into the samples from number `first` on, with their labels and ids."""
    seq_len = samples.input_ids.shape[1]
    ids: list[Int32Array] = []
    labels: list[Int32Array] = []
    for members in bins:
        room = seq_len
        for index in members:
            document = documents[index]
            ids.append(document.input_ids)
            labels.append(document.labels)
            room -= len(document.input_ids)
        ids.append(pads[0][:room])
        labels.append(pads[1][:room])
    rows = np.empty((len(bins), 4, seq_len), dtype=np.int32)
    borders = samples.first_document[first : first + len(bins) + 1]
    here = slice(borders[0], borders[-1])
    starts = _lay_out(samples.lengths[here], samples.sources[here], borders - borders[0], out=rows[:, 2:])
    end_to_end = np.concatenate(labels)
    end_to_end[starts] = IGNORE  # the token before a document's first one is another document's
    part = slice(first, first + len(bins))
    np.concatenate(ids, out=samples.input_ids[part].reshape(-1))
    rows[:, 0] = samples.input_ids[part]
    rows[:, 1] = end_to_end.reshape(len(bins), seq_len)
    np.not_equal(rows[:, 1], IGNORE, out=samples.trained[part])
    samples.ids[part] = [sample_id(row) for row in rows]


def sample_id(row: Int32Array) -> int:
    """Return xxh3_64 of the bytes of a sample's four arrays (little-endian int32), as a signed 64-bit integer."""
    unsigned = xxhash.xxh3_64_intdigest(np.ascontiguousarray(row, dtype="<i4").data)
    return unsigned - (1 << 64) if unsigned >= 1 << 63 else unsigned


# Where the packed samples of a window come from.


@dataclass(frozen=True, slots=True)
class RowOrigin:
    """Where a document of a packed sample comes from."""

    dataset: int
    where: str
    """File and line of the row, as messages show them."""
    first_token: int
    """How many of the row's tokens come before it; more than 0 for a later piece of a row that was cut."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """The rows of a window as documents, before they are packed. A row that was split has several."""

    counts: list[DatasetCount]
    skipped: list[SkippedRow] = field(default_factory=list)
    documents: list[Document] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    """The dataset of each document."""
    wheres: list[str] = field(default_factory=list)
    """File and line of each document's row."""
    rows: list[int] = field(default_factory=list)
    """The number in the window of each document's row."""
    mismatched: list[str] = field(default_factory=list)
    """File and line of the row whose answer each document's mismatched one has; empty for other groups."""


def origins(found: Gathered, arranged: Arrangement) -> list[list[RowOrigin]]:
    """Return for each packed sample where its documents come from, in their order."""
    first_tokens: list[int] = []
    for number, parent in enumerate(arranged.parents):
        # Parts of a row, and pieces of a part, directly follow one another.
        goes_on = number > 0 and found.rows[arranged.parents[number - 1]] == found.rows[parent]
        goes_on = goes_on and not found.documents[parent].others
        before = number - 1
        first_tokens.append(first_tokens[before] + len(arranged.pieces[before].input_ids) if goes_on else 0)

    def origin(piece: int) -> RowOrigin:
        parent = arranged.parents[piece]
        where = found.wheres[parent]
        if found.mismatched and piece and arranged.parents[piece - 1] == parent:
            where = f"{where}, with the answer of {found.mismatched[parent]}"
        return RowOrigin(found.sources[parent], where, first_tokens[piece])

    return [[origin(piece) for piece in members] for members in arranged.bins]
