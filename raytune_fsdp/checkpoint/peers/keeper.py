"""Keep the files of peer copies in the memory of this process, as bytes. Nothing in them is ever looked at.

A file is there once it is sealed: whole, with the hash that its writer has computed. Two copies are kept at most, the
newest whole one and the one that is being written; copies are in the order of attempts, then of steps.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import xxhash

from raytune_fsdp.checkpoint.storage import MANIFEST_FILE, parse_directory_name

Held = Mapping[str, Mapping[str, int]]
"""The sizes of sealed files by name, for each copy by its name."""


@dataclass(slots=True)
class _File:
    pieces: dict[int, bytes] = field(default_factory=dict)
    """What has come, by its place in the file: in any order."""
    starts: list[int] = field(default_factory=list)
    """The places of all pieces, once the file is sealed."""
    size: int | None = None
    """None: it is not sealed."""


class Keeper:
    """What one node keeps. Every method may be called by several threads at a time; OSError says what cannot be done.

    What is written to a copy that is older than the newest one is refused: its writer died long ago, and what it had
    sent may come late.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: dict[str, dict[str, _File]] = {}
        self._newest = (0, 0)
        """Attempt and step of the newest copy that was ever written here."""

    def write(self, name: str, file: str, offset: int, piece: bytes | memoryview) -> None:
        """Take a piece of a file that is not sealed."""
        content = bytes(piece)
        with self._lock:
            found = self._copy(name).setdefault(file, _File())
            if found.size is not None:
                raise OSError(f"{name}/{file} is whole already")
            found.pieces[offset] = content

    def seal(self, name: str, file: str, size: int, xxh3: str) -> None:
        """Say that all of a file was sent. OSError unless all of it has come. A manifest is the last file of a copy:
        with it, older copies go."""
        with self._lock:
            found = self._copy(name).setdefault(file, _File())
        digest, at, starts = xxhash.xxh3_128(), 0, sorted(found.pieces)
        for start in starts:
            if start != at:  # a gap, or what was sent twice
                at = -1
                break
            digest.update(found.pieces[start])
            at += len(found.pieces[start])
        if at != size or digest.hexdigest() != xxh3:
            with self._lock:
                self._copies.get(name, {}).pop(file, None)
            raise OSError(f"{name}/{file} has not come whole")
        with self._lock:
            found.starts, found.size = starts, size
            if file == MANIFEST_FILE:
                self._keep(name)

    def read(self, name: str, file: str, offset: int, size: int) -> bytes:
        """Return bytes of a sealed file, fewer if it ends before that. FileNotFoundError if it is not there."""
        with self._lock:
            found = self._copies.get(name, {}).get(file)
        if found is None or found.size is None:
            raise FileNotFoundError(f"{name}/{file} is not there")
        if not 0 <= offset <= found.size or size < 0:
            raise OSError(f"{name}/{file} has {found.size} bytes, so none from {offset} on")
        parts, end = [], min(offset + size, found.size)
        number = bisect_right(found.starts, offset) - 1
        while offset < end:
            start = found.starts[number]
            parts.append(found.pieces[start][offset - start : end - start])
            offset, number = start + len(found.pieces[start]), number + 1
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def held(self) -> Held:
        with self._lock:
            sealed = {
                name: {file: each.size for file, each in files.items() if each.size is not None}
                for name, files in self._copies.items()
            }
        return {name: files for name, files in sealed.items() if files}

    def nbytes(self) -> int:
        """The bytes of all copies, whole or not."""
        with self._lock:
            files = [each for copy in self._copies.values() for each in copy.values()]
        return sum(len(piece) for each in files for piece in list(each.pieces.values()))

    def drop(self, names: Collection[str]) -> None:
        """Forget these copies."""
        with self._lock:
            for name in names:
                self._copies.pop(name, None)

    def forget(self, attempt: int, but: str | None) -> None:
        """Forget the copies of earlier attempts, but for one: what a process says that has died may come late."""
        with self._lock:
            self._copies = {
                name: files for name, files in self._copies.items() if name == but or _order(name) >= (attempt, 0)
            }

    def _copy(self, name: str) -> dict[str, _File]:
        """Return the files of the copy that is being written. Older ones go, except for the newest whole one."""
        order = _order(name)
        if order < self._newest:
            raise OSError(f"{name} is older than what is kept by now")
        if name not in self._copies:
            if order == self._newest:
                raise OSError(f"{name} was given up")
            self._newest = order
            whole = [each for each, files in self._copies.items() if _is_sealed(files.get(MANIFEST_FILE))]
            self._keep(max(whole, key=_order, default=None))
            self._copies[name] = {}
        return self._copies[name]

    def _keep(self, name: str | None) -> None:
        self._copies = {each: files for each, files in self._copies.items() if each == name}


def _is_sealed(file: _File | None) -> bool:
    return file is not None and file.size is not None


def _order(name: str) -> tuple[int, int]:
    found = parse_directory_name(name)
    if found is None:
        raise OSError(f"{name} is not the name of a checkpoint")
    step, attempt, _ = found
    return attempt, step
