"""Windows on shared storage: written once by the first process that builds them, verified whenever they are read.

    <cache>/<fingerprint>/about.json                which datasets these windows are of, for people
    <cache>/<fingerprint>/census.json               their counts, once all are built
    <cache>/<fingerprint>/e000-w00000012.arrow      window 12 of epoch 0
    <cache>/<fingerprint>/locks/0012                held while window 12, or 12 plus a multiple of 1024, is built
    <cache>/files/<key>/                            rows prepared by `sources`
    <cache>/reference/<key>/                        what a reference says of documents (data/reference.py)
    <cache>/teacher/<key>/                          what a teacher predicts in them (data/teacher.py)

A file appears under its name complete or not at all; two processes that write the same window write the same bytes.
Nothing is synced to disk: a file that a crash of the machine truncates is found by its digest and built again.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import xxhash

from raytune_fsdp.base.durable import replace_at_once, take_turn
from raytune_fsdp.base.errors import DataError
from raytune_fsdp.data.packing import PackedSamples
from raytune_fsdp.plan.counts import DatasetCount, SkippedRow, WindowCounts

if TYPE_CHECKING:
    from raytune_fsdp.base.batch import Float64Array

logger = logging.getLogger(__name__)

FORMAT = 1
"""Version of the bytes: an Arrow stream with one record batch, then its xxh3_128 (16 bytes)."""

_DIGEST_BYTES = 16
FILES, REFERENCE, TEACHER = "files", "reference", "teacher"
ABOUT, _META = "about.json", "meta.json"
TEMPORARY = ".tmp"
_LOCKS = 1024
_LOCK_SECONDS = 300.0
"""A process that has waited this long for another to build a window builds it itself."""
_OURS = re.compile(r"[0-9a-f]{32}")
# A temporary file older than this was left by a process that was killed: writing one takes seconds.
ABANDONED_SECONDS = 3600
_BYTES_BETWEEN_LOOKS = 1 << 30
"""A process measures the size of the whole cache again after adding this much to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The packed samples and counts of one window."""

    samples: PackedSamples
    counts: WindowCounts

    def to_bytes(self, place: Mapping[str, str]) -> tuple[pa.Buffer, bytes]:
        """Return the window as an Arrow stream that says where it belongs, and the digest to append to it."""
        # 4.1 bytes a token: the ids, a bit for each that is trained on, and what documents need. Labels, positions and
        # source ids follow from these.
        samples = self.samples
        seq_len = samples.input_ids.shape[1]
        offsets = _array(samples.first_document.astype(np.int32))
        packed = np.packbits(samples.trained, axis=1)
        width = _row_bytes(samples.trained.shape[1])
        columns: Mapping[str, pa.Array] = {
            "input_ids": pa.FixedSizeListArray.from_arrays(_array(samples.input_ids.reshape(-1)), seq_len),
            "trained": pa.Array.from_buffers(
                pa.binary(width), len(samples.trained), [None, pa.py_buffer(packed.tobytes())]
            ),
            "lengths": pa.ListArray.from_arrays(offsets, _array(samples.lengths)),
            "sources": pa.ListArray.from_arrays(offsets, _array(samples.sources)),
            "id": _array(samples.ids),
            **({} if samples.columns is None else {"columns": _told(offsets, samples.columns)}),
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
        """Return the window in these bytes; None if a bit differs from what `to_bytes` made, or it belongs elsewhere.

        Older files do not say where they belong. Their name decides, and `Windows` checks their shape.
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
            columns=_columns(batch["columns"]) if "columns" in schema.names else None,
        )
        counts = WindowCounts.from_json(metadata[b"counts"])
        if any(count.cut and not count.without_targets for count in counts.datasets):
            _count_targets(samples, counts.datasets)  # may be from before pieces without targets were counted
        return cls(samples=samples, counts=counts)


def finish_counts(
    samples: PackedSamples, counts: list[DatasetCount], skipped: list[SkippedRow], *, grouped: bool = False
) -> WindowCounts:
    """Complete the counts with those that follow from the packed samples. `grouped`: whether rows make groups."""
    many = len(counts)
    pieces = np.bincount(samples.sources, minlength=many)
    tokens = np.bincount(samples.sources, weights=samples.lengths, minlength=many)
    for dataset, count in enumerate(counts):
        made = count.rows - sum(count.dropped.values())
        count.groups = made if grouped else 0
        count.documents = int(pieces[dataset]) if grouped else made
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


def _told(offsets: pa.Array, columns: Float64Array) -> pa.Array:
    return pa.ListArray.from_arrays(
        offsets, pa.FixedSizeListArray.from_arrays(_array(columns.reshape(-1)), columns.shape[1])
    )


def _columns(array: pa.Array) -> Float64Array:
    inner = array.flatten()
    return _values(inner.flatten()).reshape(len(inner), inner.type.list_size)


def _row_bytes(seq_len: int) -> int:
    return -(-seq_len // 8)


def _array(values: np.ndarray[Any, Any]) -> pa.Array:
    """Do what `pa.array(values)` does, which would first import pandas to see whether this is a series: 0.9 s."""
    return pa.Array.from_buffers(
        pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(np.ascontiguousarray(values))]
    )


def _values(array: pa.Array) -> np.ndarray[Any, Any]:
    """Do what `array.to_numpy()` does, which imports pandas, too."""
    values = np.frombuffer(array.buffers()[1] or b"", dtype=str(array.type))
    return values[array.offset : array.offset + len(array)]


@dataclass(slots=True)
class WindowCache:
    """The windows of one fingerprint in the cache directory `root`."""

    root: Path
    fingerprint: str
    max_bytes: int
    about: Mapping[str, Any]
    _written: int = 0
    _warned: bool = False

    @property
    def directory(self) -> Path:
        return self.root / self.fingerprint

    def read(self, epoch: int, k: int) -> Window | None:
        """Return the window; None if it must be built: it is missing, damaged, or a copy of another window's file."""
        path = self._path(epoch, k)
        try:
            with pa.OSFile(str(path)) as file:
                window = Window.from_bytes(file.read_buffer(), self._place(epoch, k))
        except OSError:
            return None  # usually missing. Not removed: if storage failed here, other processes may still read it
        with suppress(OSError):
            if window is None:
                path.unlink()
            else:
                os.utime(path)  # clean-up removes what has been unused for longest
        return window

    def write(self, epoch: int, k: int, window: Window) -> None:
        """Store a window. If that fails, raise DataError and leave no partial file."""
        body, digest = window.to_bytes(self._place(epoch, k))
        try:
            self._make_room(body.size)
            self._put(self._path(epoch, k), body, digest)
        except OSError as error:
            raise DataError(
                f"the cache {self.root} cannot take another {body.size / 1e6:.1f} MB ({error.strerror}); free space, "
                "set data.cache.path to another directory, or remove old windows with raytune-fsdp data clean"
            ) from error
        self._written += body.size

    @contextmanager
    def building(self, epoch: int, k: int) -> Iterator[None]:
        """Wait until no other process builds this window. Only saves work: if files cannot be locked, all build it."""
        with ExitStack() as stack:
            with suppress(OSError):
                locks = self.directory / "locks"
                locks.mkdir(parents=True, exist_ok=True)
                # 1024 files, shared by all windows and never removed: removing a lock file races with those who wait
                # for it. The kernel releases the locks of a process that dies; a hanging one is waited for 300 s.
                # Epochs are 37 files apart, so that the same window of two epochs does not share a lock.
                handle = stack.enter_context(open(locks / f"{(k + 37 * epoch) % _LOCKS:04d}", "w"))
                take_turn(handle.fileno(), _LOCK_SECONDS, 0.05)
            yield

    def read_census(self) -> Mapping[str, Any]:
        """Return earlier counts by epoch; empty if there are none or they are damaged."""
        try:
            found = json.loads((self.directory / "census.json").read_text())
            values: Mapping[str, Any] = json.loads(found["counted"])
            return values if found["digest"] == xxhash.xxh3_128_hexdigest(found["counted"].encode()) else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def write_census(self, values: Mapping[str, Any]) -> None:
        counted = json.dumps(values)
        found = {"counted": counted, "digest": xxhash.xxh3_128_hexdigest(counted.encode())}
        with suppress(OSError):  # a lost census costs time, nothing else
            self._put(self.directory / "census.json", json.dumps(found).encode())

    def _place(self, epoch: int, k: int) -> Mapping[str, str]:
        """Return what its file says about which window it is: a file may have been copied or renamed by hand."""
        return {"fingerprint": self.fingerprint, "epoch": str(epoch), "window": str(k)}

    def _path(self, epoch: int, k: int) -> Path:
        return self.directory / f"e{epoch:03d}-w{k:08d}.arrow"

    def _put(self, path: Path, *parts: bytes | pa.Buffer) -> None:
        about = json.dumps(self.about)
        try:
            put(self.directory, about, path, *parts)
        except FileNotFoundError:  # a clean-up removed the directory just now
            put(self.directory, about, path, *parts)

    def _make_room(self, size: int) -> None:
        """Keep the cache within its limit. Checked only now and then, because measuring walks the whole directory."""
        if self._written and self._written + size < min(_BYTES_BETWEEN_LOOKS, self.max_bytes // 10):
            return
        self._written = 0
        # What other models have said is not counted: it costs a pass to make again, is never removed here, and may be
        # larger than the limit, which would push out every window.
        kept = (self.root / REFERENCE, self.root / TEACHER)
        found = [entry for entry in entries(self.root) if entry.path.parent not in kept]
        files = sum(entry.bytes for entry in found if entry.is_files)
        held = sum(entry.bytes for entry in found) - files
        if files + held + size > self.max_bytes:
            # Only windows are removed, since they can be built again; the rows they are built from are in use. Down to
            # 90 %, so that the next window does not start this again.
            removed = remove(self.root, keep_bytes=max(0, self.max_bytes * 9 // 10 - size - files), files=False)
            if any(entry.path.parent == self.directory for entry in removed) and not self._warned:
                self._warned = True
                logger.warning(
                    "data.cache.max_gb=%g is too small for all windows of this data, so some are tokenized again in "
                    "every epoch; raise it, or set data.cache.path to a larger directory",
                    self.max_bytes / 1e9,
                )


def put(directory: Path, about: str, path: Path, *parts: bytes | pa.Buffer) -> None:
    """Write a file of a directory of the cache, and before the first one what all of them are about."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not (directory / ABOUT).exists():
        replace_at_once(directory / ABOUT, about.encode())
    replace_at_once(path, *parts)


@dataclass(frozen=True, slots=True)
class Entry:
    """A part of the cache that can be removed on its own."""

    path: Path
    bytes: int
    used: float
    """When it was last written or read, in seconds since 1970."""
    is_files: bool = False
    """Whether it holds prepared rows, or what a reference or a teacher says; otherwise it is a window."""


def entries(root: Path) -> Iterator[Entry]:
    """Yield everything in a cache directory that can be made again, except what is being written right now."""
    said = [
        each for what in (REFERENCE, TEACHER) for each in _named_by_us(root / what) if what in _json_of(each / ABOUT)
    ]
    for directory in [*_named_by_us(root / FILES), *said]:
        known = directory in said or "identity" in _json_of(directory / _META)
        if directory.suffix != TEMPORARY and not known:
            continue
        with suppress(OSError):
            found = {path: path.stat() for path in directory.rglob("*") if path.is_file()}
            used = max(map(_used, found, found.values()), default=directory.stat().st_mtime)
            if directory.suffix != TEMPORARY or time.time() - used > ABANDONED_SECONDS:
                yield Entry(directory, sum(status.st_size for status in found.values()), used, True)
    for directory in _window_directories(root):
        with suppress(OSError), os.scandir(directory) as files:  # another clean-up may have removed it just now
            for file in files:
                with suppress(OSError):
                    status = file.stat()
                    abandoned = file.name.endswith(TEMPORARY) and time.time() - status.st_mtime > ABANDONED_SECONDS
                    if file.name.endswith(".arrow") or abandoned:
                        yield Entry(Path(file.path), status.st_size, _used(Path(file.path), status))


def _used(path: Path, status: os.stat_result) -> float:
    """Return when a file was last used.

    Another user's process may not set the time of what it reads, but most file systems note once a day that it was
    read. Not of the files that are read here, to see what their directory is.
    """
    return status.st_mtime if path.name in (_META, ABOUT) else max(status.st_mtime, status.st_atime)


def remove(
    root: Path, *, keep_bytes: int = 0, unused_for: float = 0.0, files: bool = True, dry_run: bool = False
) -> list[Entry]:
    """Remove the least recently used entries until `keep_bytes` are left; none used in the last `unused_for` seconds.

    Without `files`, only windows are counted and removed. Returns what is gone: another user's data may have to stay.
    """
    found = sorted((entry for entry in entries(root) if files or not entry.is_files), key=lambda entry: entry.used)
    held = sum(entry.bytes for entry in found)
    removed = []
    for entry in found:
        if held <= keep_bytes or time.time() - entry.used < unused_for:
            break
        if dry_run or _is_removed(entry.path):
            held -= entry.bytes
            removed.append(entry)
    for directory in [] if dry_run else _window_directories(root):
        with suppress(OSError):  # another clean-up may remove it, too
            if not any(path.suffix in (".arrow", TEMPORARY) for path in directory.iterdir()):
                shutil.rmtree(directory, ignore_errors=True)
    return removed


def _is_removed(path: Path) -> bool:
    with suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return not os.path.lexists(path)


def _window_directories(root: Path) -> list[Path]:
    return [path for path in _named_by_us(root) if "datasets" in _json_of(path / ABOUT)]


def _named_by_us(directory: Path) -> list[Path]:
    """Return subdirectories named as the cache names them. A user who gives a wrong directory must lose nothing."""
    try:
        return sorted(path for path in directory.iterdir() if _OURS.match(path.name) and path.is_dir())
    except OSError:
        return []


def _json_of(path: Path) -> Mapping[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        if isinstance(found, dict):
            return found
    return {}
