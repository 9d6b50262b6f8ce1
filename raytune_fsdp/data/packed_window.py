"""One built window: its packed samples, the counts of its rows, and the bytes in which both are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from raytune_fsdp.data.packing import PackedSamples
from raytune_fsdp.plan.counts import DatasetCount, SkippedRow, WindowCounts

FORMAT = 1
"""Version of the bytes: an Arrow stream with one record batch, then its xxh3_128 (16 bytes)."""

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The packed samples and counts of one window."""

    samples: PackedSamples
    counts: WindowCounts

    def to_bytes(self, place: Mapping[str, str]) -> tuple[pa.Buffer, bytes]:
        """The window as an Arrow stream that says where it belongs, and the digest to append to it."""
        # 4.1 bytes a token: the ids, a bit for each that is trained on, and what documents need. Labels, positions and
        # source ids follow from these.
        samples = self.samples
        seq_len = samples.input_ids.shape[1]
        offsets = _array(samples.first_document.astype(np.int32))
        columns: Mapping[str, pa.Array] = {
            "input_ids": pa.FixedSizeListArray.from_arrays(_array(samples.input_ids.reshape(-1)), seq_len),
            "trained": _bits(samples.trained),
            "lengths": pa.ListArray.from_arrays(offsets, _array(samples.lengths)),
            "sources": pa.ListArray.from_arrays(offsets, _array(samples.sources)),
            "id": _array(samples.ids),
        }
        metadata = {"format": str(FORMAT), "seq_len": str(seq_len), "counts": self.counts.to_json(), **place}
        batch = pa.record_batch(list(columns.values()), names=list(columns)).replace_schema_metadata(metadata)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        buffer = sink.getvalue()
        return buffer, xxhash.xxh3_128_digest(buffer)

    @classmethod
    def from_bytes(cls, data: pa.Buffer, place: Mapping[str, str]) -> Window | None:
        """The window in these bytes; None if a bit differs from what `to_bytes` returned, or it belongs elsewhere.

        Files from before they said where they belong are taken by their name; `Windows` checks their shape.
        """
        body = data.slice(0, max(0, data.size - _DIGEST_BYTES))
        if xxhash.xxh3_128_digest(body) != bytes(data.slice(body.size)):
            return None
        with pa.ipc.open_stream(body) as reader:
            schema, batch = reader.schema, reader.read_next_batch()
        metadata = schema.metadata
        if metadata[b"format"] != str(FORMAT).encode():
            return None
        if any(metadata.get(key.encode(), value.encode()) != value.encode() for key, value in place.items()):
            return None
        seq_len = int(metadata[b"seq_len"])
        shape = (batch.num_rows, seq_len)
        bits = np.frombuffer(batch["trained"].buffers()[1] or b"", dtype=np.uint8)
        packed = bits[: shape[0] * _row_bytes(seq_len)].reshape(shape[0], _row_bytes(seq_len))
        samples = PackedSamples(
            input_ids=_values(batch["input_ids"].flatten()).reshape(shape),
            trained=np.unpackbits(packed, axis=1, count=seq_len).view(np.bool_),
            ids=_values(batch["id"]),
            first_document=_values(batch["lengths"].offsets).astype(np.int64),
            lengths=_values(batch["lengths"].flatten()),
            sources=_values(batch["sources"].flatten()),
        )
        counts = WindowCounts.from_json(metadata[b"counts"])
        if any(count.cut and not count.without_targets for count in counts.datasets):
            _count_targets(samples, counts.datasets)  # perhaps written before pieces without targets were counted
        return cls(samples=samples, counts=counts)


def finish_counts(samples: PackedSamples, counts: list[DatasetCount], skipped: list[SkippedRow]) -> WindowCounts:
    """Complete the counts with those that follow from the packed samples."""
    many = len(counts)
    pieces = np.bincount(samples.sources, minlength=many)
    tokens = np.bincount(samples.sources, weights=samples.lengths, minlength=many)
    for dataset, count in enumerate(counts):
        count.documents = count.rows - sum(count.dropped.values())
        count.tokens = int(tokens[dataset])
        count.cut = int(pieces[dataset]) - count.documents
    _count_targets(samples, counts)
    return WindowCounts(samples=len(samples), datasets=tuple(counts), skipped=tuple(skipped))


def _count_targets(samples: PackedSamples, counts: Sequence[DatasetCount]) -> None:
    """Count the tokens that are trained on, and the pieces of documents that have none."""
    each = np.zeros(0, dtype=np.int64)
    if len(samples.lengths):
        # Where each document starts when the samples are laid end to end. A sum from one start to the next includes the
        # padding after a sample's last document, which has no targets.
        before = np.cumsum(samples.lengths) - samples.lengths
        in_sample = np.diff(samples.first_document)
        first = np.repeat(before[samples.first_document[:-1]], in_sample)
        starts = np.repeat(np.arange(len(samples)) * samples.input_ids.shape[1], in_sample) + before - first
        each = np.add.reduceat(samples.trained.reshape(-1), starts, dtype=np.int64)
    targets = np.bincount(samples.sources, weights=each, minlength=len(counts))
    without = np.bincount(samples.sources[each == 0], minlength=len(counts))
    for dataset, count in enumerate(counts):
        count.target_tokens = int(targets[dataset])
        count.without_targets = int(without[dataset])


def _row_bytes(seq_len: int) -> int:
    return -(-seq_len // 8)


def _array(values: np.ndarray[Any, Any]) -> pa.Array:
    """`pa.array(values)`, which would first import pandas, to see whether this is one of its series: 0.9 s."""
    return pa.Array.from_buffers(
        pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(np.ascontiguousarray(values))]
    )


def _values(array: pa.Array) -> np.ndarray[Any, Any]:
    """`array.to_numpy()`, which imports pandas, too."""
    values = np.frombuffer(array.buffers()[1] or b"", dtype=str(array.type))
    return values[array.offset : array.offset + len(array)]


def _bits(flags: np.ndarray[tuple[int, int], np.dtype[np.bool_]]) -> pa.Array:
    packed = np.packbits(flags, axis=1)
    width = _row_bytes(flags.shape[1])
    return pa.Array.from_buffers(pa.binary(width), len(flags), [None, pa.py_buffer(packed.tobytes())])
