"""Documents become packed samples: whole documents side by side in sequences of one length.

Nothing leaks from a document to the next: positions restart, and the first token of a document is no target, because it
would be predicted from the last token of another one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import xxhash

from raytune_fsdp.data.formats import Document
from raytune_fsdp.types import IGNORE, PADDING, PackedSample

if TYPE_CHECKING:
    from raytune_fsdp.types import Int32Array


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


def pack(
    documents: Sequence[Document],
    *,
    sources: Sequence[int],
    seq_len: int,
    pad_id: int,
    packing: Literal["best_fit", "none"],
) -> list[PackedSample]:
    """Packed samples of `seq_len` tokens from documents no longer than that; `sources[i]` is document i's dataset."""
    if packing == "none":
        bins = [[index] for index in range(len(documents))]
    else:
        bins = best_fit([len(document.input_ids) for document in documents], seq_len)
    return [
        _fill([documents[i] for i in members], [sources[i] for i in members], seq_len=seq_len, pad_id=pad_id)
        for members in bins
    ]


def _fill(documents: Sequence[Document], sources: Sequence[int], *, seq_len: int, pad_id: int) -> PackedSample:
    input_ids = np.full(seq_len, pad_id, dtype=np.int32)
    labels = np.full(seq_len, IGNORE, dtype=np.int32)
    position_ids = np.zeros(seq_len, dtype=np.int32)
    source_ids = np.full(seq_len, PADDING, dtype=np.int32)
    start = 0
    for document, source in zip(documents, sources, strict=True):
        end = start + len(document.input_ids)
        input_ids[start:end] = document.input_ids
        labels[start + 1 : end] = document.labels[1:]
        position_ids[start:end] = np.arange(end - start)
        source_ids[start:end] = source
        start = end
    position_ids[start:] = np.arange(seq_len - start)
    return PackedSample(
        input_ids=input_ids,
        labels=labels,
        position_ids=position_ids,
        source_ids=source_ids,
        id=sample_id(input_ids, labels, position_ids, source_ids),
    )


def sample_id(input_ids: Int32Array, labels: Int32Array, position_ids: Int32Array, source_ids: Int32Array) -> int:
    """xxh3_64 over the bytes of the four arrays (little-endian int32, in this order), as a signed 64-bit integer."""
    digest = xxhash.xxh3_64()
    for values in (input_ids, labels, position_ids, source_ids):
        digest.update(np.ascontiguousarray(values, dtype="<i4").tobytes())
    unsigned = digest.intdigest()
    return unsigned - (1 << 64) if unsigned >= 1 << 63 else unsigned
