"""Read `tensors.json`: which tensors a checkpoint has, and which file has which piece of them.

Ranks cut most tensors alike: pieces of one shape, one after another, each in the next file. Such a run of pieces is one
entry of the index, so the index is as long for 512 ranks as for two. Where a piece lies in its file is said by a table
at the file's end, which only those read who need a piece of that file.

Whoever could write a checkpoint has written its index, with the right hash in the manifest. So every number in it is
checked against the others and against the sizes of the files before one of them is used. An accepted index says exactly
once which file has each number of each tensor, and an accepted table exactly once where in the file.

Format 1 has every piece by itself, with its place, in `tensors.json`.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch
import xxhash

from raytune_fsdp.base.untrusted import MAX_VALUES, UnsoundError, check_format, is_count, parse_json, shown
from raytune_fsdp.checkpoint.storage import PIECE_BYTES, PIECES, XXH3, StoredFile, index_values, table_limit

DTYPES = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128",
        "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
    )
}  # fmt: skip
"""The types that a tensor may have, by the names that the index gives them."""
_MAX_DIMENSIONS = 16  # torch prints a tensor of 64; a model has up to 5
_MAX_NAME = 1024
_ENTRY_BYTES = 100
"""What a table has of a piece besides its name: three numbers of up to 19 digits, and what is around them."""

Sides = tuple[int, ...]
Box = tuple[Sequence[int], Sequence[int]]
"""Offset and shape."""
Key = tuple[str, Sides]
"""A piece, by its tensor and its offset."""


@dataclass(frozen=True, slots=True)
class PieceRun:
    """Pieces of one shape that follow each other along the first axis, each in another file."""

    offset: Sides
    shape: Sides
    count: int = 1
    file: int = 0
    """The number of the first one's file; the next one's is by `step` larger."""
    step: int = 1

    @property
    def box(self) -> Box:
        """All of them together."""
        return self.offset, (self.shape[0] * self.count, *self.shape[1:]) if self.shape else self.shape

    def at(self, number: int) -> tuple[int, Sides]:
        """Return file and offset of one of them."""
        first = (self.offset[0] + number * self.shape[0], *self.offset[1:]) if self.shape else self.offset
        return self.file + number * self.step, first

    def in_file(self, file: int) -> Sides | None:
        """Return the offset of the one that is in a file; None if none is."""
        number, rest = divmod(file - self.file, self.step)
        return None if rest or not 0 <= number < self.count else self.at(number)[1]

    def overlapping(self, offset: Sequence[int], shape: Sequence[int]) -> range:
        """Return which of them have a part of this box."""
        for mine, side, first, length in zip(*self.box, offset, shape, strict=True):
            if mine >= first + length or first >= mine + side:
                return range(0)
        if not shape:
            return range(1)
        rows, here = self.shape[0], offset[0] - self.offset[0]
        return range(max(0, here // rows), min(self.count, -(-(here + shape[0]) // rows)))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    dtype: torch.dtype
    shape: torch.Size
    runs: Sequence[PieceRun]

    def overlapping(self, offset: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[int, Box]]:
        """Yield the pieces that have a part of this box, each with the number of its file."""
        for run in self.runs:
            for number in run.overlapping(offset, shape):
                file, first = run.at(number)
                yield file, (first, run.shape)


Place = tuple[int, int, int]
"""Where the numbers of a piece begin in its file; first byte and length of what torch.save has written around them."""


@dataclass(frozen=True, slots=True)
class TensorsFile:
    """A file with pieces."""

    name: str
    size: int
    table: int = 0
    """The bytes of the table at its end. 0: it has none, its places are in the index."""
    xxh3: str = ""
    """The table's hash."""


@dataclass(frozen=True, slots=True)
class Index:
    """Which tensors a checkpoint has, and where their pieces are."""

    tensors: Mapping[str, StoredTensor]
    files: Sequence[TensorsFile]
    places: dict[int, Mapping[Key, Place]] = field(default_factory=dict)
    """Where the pieces are, in each file of which that has been read, by its number."""

    def places_in(self, number: int, source: StoredFile) -> Mapping[Key, Place]:
        """Return where the pieces in a file are. Raise UnsoundError if its table does not fit index and file."""
        if number not in self.places:
            file, pieces = self.files[number], self.pieces_in(number)
            if file.table > sum(_ENTRY_BYTES + 12 * len(name) for name in pieces) + 2:  # 12: \ud83d\ude00
                raise UnsoundError(f"has a table of {file.table} bytes for {len(pieces)} pieces")
            content = bytearray(file.table)
            source.read_into(file.size - file.table, memoryview(content))
            if xxhash.xxh3_128_hexdigest(content) != file.xxh3:
                raise UnsoundError("has another table at its end than was written")
            self.places[number] = self._parse_table(bytes(content), number, pieces)
        return self.places[number]

    def pieces_in(self, number: int) -> dict[str, tuple[Sides, int]]:
        """Return offset and bytes of each tensor's piece in a file."""
        found: dict[str, tuple[Sides, int]] = {}
        for name, tensor in self.tensors.items():
            for run in tensor.runs:
                offset = run.in_file(number)
                if offset is None:
                    continue
                if name in found:
                    raise UnsoundError(f"has two pieces of {name}, by the index")
                found[name] = offset, prod(run.shape) * tensor.dtype.itemsize
        return found

    def _parse_table(self, content: bytes, number: int, wanted: Mapping[str, tuple[Sides, int]]) -> Mapping[Key, Place]:
        read = parse_json(content, values=max(MAX_VALUES, content.count(b",") + 2 * len(wanted)), depth=None)
        if not isinstance(read, dict) or read.keys() != wanted.keys():
            raise UnsoundError("has a table at its end with other tensors than the index says")
        places, end = {}, self.files[number].size - self.files[number].table
        for name, (offset, size) in wanted.items():
            place = read[name]
            if not (type(place) is list and len(place) == 3 and all(map(is_count, place))):
                raise UnsoundError(f"has a piece of {name} at {shown(place)}")
            start, first, length = place
            if not (first <= start and start + size <= first + length <= end):
                raise UnsoundError(f"has a piece of {name} of {size} bytes at {shown(place)}, which it cannot have")
            places[name, offset] = start, first, length
        spans = sorted((first, first + length) for _, first, length in places.values())
        if any(end > first for (_, end), (first, _) in zip(spans, spans[1:], strict=False)):
            raise UnsoundError("has two pieces in the same bytes")
        return places


def parse_index(content: bytes, sizes: Mapping[str, int]) -> Index:
    """Parse the `tensors.json` of a checkpoint whose files have these sizes. Raise ValueError if it is not one."""
    # Its depth need not be measured: below, every level has its type.
    read = parse_json(content, values=index_values(sizes), depth=None)
    if not isinstance(read, dict) or not isinstance(read.get("tensors"), dict):
        raise UnsoundError("has no tensors")
    check_format(read.get("format"), 1, 2)
    for name in read["tensors"]:
        if not (0 < len(name) <= _MAX_NAME and name.isprintable()):
            raise UnsoundError(f"has a tensor of the name {shown(name)}")
    return _index_of_places(read, sizes) if read["format"] == 1 else _index_of_runs(read, sizes)


def _index_of_runs(read: Mapping[str, Any], sizes: Mapping[str, int]) -> Index:
    files = _files(read.get("files"), sizes)
    tensors = {}
    for name, entry in read["tensors"].items():
        dtype, shape, pieces = _tensor(name, entry)
        runs = [_run(name, each, shape, len(files)) for each in pieces]
        check_covered(name, shape, [run.box for run in runs])
        tensors[name] = StoredTensor(dtype, torch.Size(shape), runs)
    index = Index(tensors, files)
    needed = sum(prod(each.shape) * each.dtype.itemsize for each in tensors.values())
    # First all together: then no sum for a file wraps.
    if needed > sum(file.size for file in files) or needed >= 1 << 62:
        raise UnsoundError(f"has tensors of {needed} bytes, more than its files have")
    for file, (least, _) in zip(files, room_of(index), strict=True):
        if least > file.size - file.table:
            raise UnsoundError(f"has pieces of {least} bytes in {file.name}, more than it has")
    return index


def room_of(index: Index) -> list[tuple[int, int]]:
    """Return the fewest and the most bytes that each file may have, by the pieces in it."""
    least, most = np.zeros(len(index.files), np.int64), np.array([file.table for file in index.files], np.int64)
    for tensor in index.tensors.values():
        for run in tensor.runs:
            which = slice(run.file, run.file + (run.count - 1) * run.step + 1, run.step)
            least[which] += prod(run.shape) * tensor.dtype.itemsize
            most[which] += PIECE_BYTES
    return list(zip(least.tolist(), (least + most).tolist(), strict=True))


_RUN = {"offset", "shape", "count", "file", "step"}


def _files(entries: Any, sizes: Mapping[str, int]) -> list[TensorsFile]:
    if not isinstance(entries, list):
        raise UnsoundError("has no list of files")
    found: dict[str, TensorsFile] = {}
    for entry in entries:
        name, table, xxh3 = entry if type(entry) is list and len(entry) == 3 else (None, None, None)
        if not (isinstance(name, str) and name in sizes and name.endswith(PIECES)):
            raise UnsoundError(f"names {shown(entry)}, which is no file of this checkpoint and its table")
        if name in found:
            raise UnsoundError(f"names {name} twice")
        if not is_count(table) or not 0 < table <= table_limit(sizes[name]):
            raise UnsoundError(f"has a table of {shown(table)} bytes in {name}, which has {sizes[name]}")
        if not (isinstance(xxh3, str) and XXH3.fullmatch(xxh3)):
            raise UnsoundError(f"has a table in {name} with the hash {shown(xxh3)}")
        found[name] = TensorsFile(name, sizes[name], table, xxh3)
    return [*found.values()]


def _run(name: str, run: Any, whole: Sequence[int], files: int) -> PieceRun:
    """Return some pieces after checking that they fit their tensor, and that there are as many files."""
    if not isinstance(run, dict) or run.keys() != _RUN:
        raise UnsoundError(f"has pieces of {name} without exactly {', '.join(sorted(_RUN))}")
    offset, shape, count, file, step = (run[key] for key in ("offset", "shape", "count", "file", "step"))
    if not (is_count(count) and is_count(file) and is_count(step) and count and step):
        raise UnsoundError(f"has {shown(count)} pieces of {name} in each {shown(step)}th file from {shown(file)} on")
    if file + (count - 1) * step >= files:
        raise UnsoundError(f"has {count} pieces of {name} in each {step}th file from {file} on, and only {files} files")
    _check_box(name, offset, shape, whole, count)
    if not prod(shape):
        raise UnsoundError(f"has a piece of {name} without numbers")
    return PieceRun(tuple(offset), tuple(shape), count, file, step)


def _index_of_places(read: Mapping[str, Any], sizes: Mapping[str, int]) -> Index:
    """Return an index of format 1."""
    numbers = {file: number for number, file in enumerate(file for file in sizes if file.endswith(PIECES))}
    places: dict[int, dict[Key, Place]] = {number: {} for number in numbers.values()}
    tensors: dict[str, StoredTensor] = {}
    used: dict[str, tuple[array[int], array[int]]] = defaultdict(lambda: (array("q"), array("q")))
    for name, entry in read["tensors"].items():
        dtype, shape, pieces = _tensor(name, entry)
        runs = []
        for piece in pieces:
            offset, size, (file, start, length) = _piece(name, piece, dtype, shape, sizes)
            if not length:
                continue  # nothing of it is ever read
            runs.append(PieceRun(tuple(offset), tuple(size), file=numbers[file]))
            places[numbers[file]][name, runs[-1].offset] = start, start, length
            starts, ends = used[file]
            starts.append(start)
            ends.append(start + length)
        check_covered(name, shape, [run.box for run in runs])
        tensors[name] = StoredTensor(dtype, torch.Size(shape), runs)
    for file, spans in used.items():
        first, end = map(np.array, spans)
        order = np.argsort(first, kind="stable")
        if (end[order][:-1] > first[order][1:]).any():
            raise UnsoundError(f"has two pieces in the same bytes of {file}")
    return Index(tensors, [TensorsFile(file, sizes[file]) for file in numbers], {**places})


def _tensor(name: str, entry: Any) -> tuple[torch.dtype, list[int], list[Any]]:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "pieces"}:
        raise UnsoundError(f"has an entry {name} without exactly dtype, shape and pieces")
    dtype, shape, pieces = entry["dtype"], entry["shape"], entry["pieces"]
    if not (isinstance(dtype, str) and dtype in DTYPES):
        raise UnsoundError(f"has a tensor {name} of the unknown type {shown(dtype)}")
    sides = shape if _are_integers(shape) and len(shape) <= _MAX_DIMENSIONS else [-1]
    if min(sides, default=0) < 0 or prod(max(1, rows) for rows in sides) >= 1 << 59:
        raise UnsoundError(f"has a tensor {name} of the shape {shown(shape)}")
    if not isinstance(pieces, list):
        raise UnsoundError(f"has a tensor {name} whose pieces are not a list")
    return DTYPES[dtype], shape, pieces


_INTEGER = {int}  # compared by type: True is no integer
_PIECE = {"offset", "shape", "file", "start", "bytes"}


def _piece(
    name: str, piece: Any, dtype: torch.dtype, whole: Sequence[int], sizes: Mapping[str, int]
) -> tuple[list[int], list[int], tuple[str, int, int]]:
    """Return offset, shape and place of a piece, after checking that it fits the tensor and the file that it names."""
    if not isinstance(piece, dict) or piece.keys() != _PIECE:
        raise UnsoundError(f"has a piece of {name} without exactly {', '.join(sorted(_PIECE))}")
    offset, shape, file = piece["offset"], piece["shape"], piece["file"]
    _check_box(name, offset, shape, whole)
    if not (isinstance(file, str) and file in sizes and file.endswith(PIECES)):
        raise UnsoundError(f"has a piece of {name} in {shown(file)}, which is no file of this checkpoint")
    start, size = piece["start"], piece["bytes"]
    if not is_count(size) or size != prod(shape) * dtype.itemsize:
        raise UnsoundError(f"has a piece of {name} of {shown(size)} bytes, which is not the size of {shape} {dtype}")
    if not is_count(start) or start + size > sizes[file]:
        raise UnsoundError(f"has a piece of {name} from byte {shown(start)} on, outside of {file}")
    return offset, shape, (file, start, size)


def _check_box(name: str, offset: Any, shape: Any, whole: Sequence[int], count: int = 1) -> None:
    """Refuse so many boxes of this shape, one after another along the first axis, unless they are inside a tensor."""
    if not (_are_integers(offset) and _are_integers(shape) and len(offset) == len(shape) == len(whole)):
        raise UnsoundError(f"has a piece of {name} at {shown(offset)} of the shape {shown(shape)}")
    if count > 1 and not shape:
        raise UnsoundError(f"has {count} pieces of {name}, which is one number")
    for axis, (first, length, rows) in enumerate(zip(offset, shape, whole, strict=True)):
        if first < 0 or length < 0 or first + length * (1 if axis else count) > rows:
            raise UnsoundError(f"has a piece of {name} at {shown(offset)} of {shown(shape)}, outside of {list(whole)}")


def _are_integers(value: Any) -> bool:
    return type(value) is list and _INTEGER.issuperset(map(type, value))


def check_covered(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Refuse boxes that are not the whole tensor, each number once. They are inside of it, and none is empty."""
    # As large as the whole, and without overlaps: then there are no holes either.
    if sum(prod(size) for _, size in boxes) != prod(shape):
        raise UnsoundError(f"has pieces of {name} that do not add up to the whole tensor")
    # Axis by axis, what overlaps on all axes so far stays together. However a tensor is sharded, its pieces are rows,
    # and inside of those columns: sorted once per axis, 2 million of them take seconds, not pairs of 2 million.
    together = [list(boxes)]
    for axis in range(len(shape)):
        together = [part for boxes in together if len(boxes) > 1 for part in _parts(boxes, axis)]
    if any(len(boxes) > 1 for boxes in together):
        raise UnsoundError(f"has pieces of {name} that overlap")


def _parts(boxes: list[Box], axis: int) -> list[list[Box]]:
    """Group boxes by the stretches of an axis that they share."""
    boxes.sort(key=lambda box: box[0][axis])
    parts: list[list[Box]] = []
    end = -1
    for box in boxes:
        if box[0][axis] >= end:
            parts.append([])
        parts[-1].append(box)
        end = max(end, box[0][axis] + box[1][axis])
    return parts
