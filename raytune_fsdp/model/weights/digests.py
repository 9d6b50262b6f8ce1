"""Hash tensors as they are stored, by rows, so that no more than some rows are in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

from raytune_fsdp.base.beat import beat
from raytune_fsdp.base.row_hashes import HashedRows, TensorRows
from raytune_fsdp.model.weights.source import Weights

_AT_ONCE = 256 << 20
"""Bytes that are read at once, unless a row has more."""


def digests_of(weights: Weights, prefix: str = "") -> dict[str, str]:
    """Return the digest of each of these tensors by its name, which begins with the prefix and is hashed, too."""
    found = {}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        for name, shape in sorted(weights.shapes().items()):
            rows = TensorRows.of(prefix + name, weights.read(name, 0, 0 if shape else 1).dtype, shape)
            found[rows.name] = rows.digest(_hashed(weights, name, rows, threads))
    return found


def _hashed(weights: Weights, name: str, rows: TensorRows, threads: Executor) -> Iterator[HashedRows]:
    at_once = max(1, _AT_ONCE // max(1, rows.row_bytes) // rows.leaf) * rows.leaf
    for first in range(0, rows.count, at_once):
        beat()
        yield from rows.hashed(first, weights.read(name, first, min(rows.count, first + at_once)), threads)
