"""Windows on shared storage: written once by whoever builds one first, verified whenever they are read.

    <cache>/<fingerprint>/about.json                whose windows these are, for people
    <cache>/<fingerprint>/census.json               their counts, once all were built
    <cache>/<fingerprint>/e000-w00000012.arrow      window 12 of epoch 0
    <cache>/<fingerprint>/lock-12                   held by whoever builds a window whose number ends so (modulo 16)
    <cache>/files/<key>/                            rows prepared by `sources`

A file appears under its name complete or not at all; two that write the same window write the same bytes. Nothing needs
to be durable: what a crash of the machine tears is found by its digest and built again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from raytune_fsdp.data.window import Window
from raytune_fsdp.errors import DataError

FILES = "files"
_ABOUT = "about.json"
_TEMPORARY = ".tmp"
_LOCKS = 16
_ABANDONED_SECONDS = 3600
_BYTES_BETWEEN_LOOKS = 1 << 30
"""The size of the whole cache is looked up each time that one process has added this much to it."""


@dataclass(slots=True)
class WindowCache:
    """The windows of one fingerprint in the cache directory `root`."""

    root: Path
    fingerprint: str
    max_bytes: int
    about: Mapping[str, Any]
    _written: int = 0

    @property
    def directory(self) -> Path:
        return self.root / self.fingerprint

    def read(self, epoch: int, k: int) -> Window | None:
        """The window, or None where it has to be built: it is not there, or damaged."""
        path = self._path(epoch, k)
        try:
            with pa.OSFile(str(path)) as file:
                window = Window.from_bytes(file.read_buffer())
        except FileNotFoundError:
            return None
        except (OSError, pa.ArrowException, KeyError, ValueError):
            window = None
        with suppress(OSError):
            if window is None:
                path.unlink()
            else:
                os.utime(path)  # what was used last is removed last
        return window

    def write(self, epoch: int, k: int, window: Window) -> None:
        """Keep a window. Raises DataError where it cannot be kept, and leaves nothing behind."""
        body, digest = window.to_bytes()
        try:
            self._open()
            self._make_room(body.size)
            _write(self._path(epoch, k), body, digest)
        except OSError as error:
            raise DataError(
                f"the cache {self.root} cannot take another {body.size / 1e6:.1f} MB ({error.strerror}); free space, "
                "choose another directory with data.cache.path, or remove old windows: raytune-fsdp data clean"
            ) from error
        self._written += body.size

    @contextmanager
    def building(self, k: int) -> Iterator[None]:
        """Only one process that sees this cache builds window k at a time; where files cannot be locked, any does."""
        with ExitStack() as stack:
            with suppress(OSError):
                self._open()
                # A few files for all windows, because a lock cannot be removed without a race.
                handle = stack.enter_context(open(self.directory / f"lock-{k % _LOCKS:02d}", "w"))
                fcntl.flock(handle, fcntl.LOCK_EX)  # released by the system if the process dies
            yield

    def read_census(self) -> Mapping[str, Any] | None:
        try:
            values: Mapping[str, Any] = json.loads((self.directory / "census.json").read_text())
        except (OSError, ValueError):
            return None
        return values

    def write_census(self, values: Mapping[str, Any]) -> None:
        with suppress(OSError):  # only saves time
            self._open()
            _write(self.directory / "census.json", json.dumps(values).encode())

    def _path(self, epoch: int, k: int) -> Path:
        return self.directory / f"e{epoch:03d}-w{k:08d}.arrow"

    def _open(self) -> None:
        if not self.directory.exists():
            self.directory.mkdir(parents=True, exist_ok=True)
            _write(self.directory / _ABOUT, json.dumps(self.about).encode())

    def _make_room(self, size: int) -> None:
        """Keep the cache within its bound: looked at now and then, because looking walks the whole directory."""
        if self._written and self._written + size < min(_BYTES_BETWEEN_LOOKS, self.max_bytes // 10):
            return
        self._written = 0
        found = list(entries(self.root))
        files = sum(entry.bytes for entry in found if entry.is_files)
        held = sum(entry.bytes for entry in found) - files
        if files + held + size > self.max_bytes:
            # Windows can be built again; the rows they are built from are in use.
            remove(self.root, keep_bytes=max(0, self.max_bytes * 9 // 10 - size - files), files=False)


def _write(path: Path, *parts: bytes | pa.Buffer) -> None:
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}{_TEMPORARY}")
    try:
        with open(temporary, "wb") as file:
            for part in parts:
                file.write(part)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@dataclass(frozen=True, slots=True)
class Entry:
    """Something in the cache that can be removed by itself."""

    path: Path
    bytes: int
    used: float
    """When it was written or read last, in seconds since the epoch."""
    is_files: bool = False
    """Whether these are prepared rows, not a window."""


def entries(root: Path) -> Iterator[Entry]:
    """All windows and prepared files in a cache directory. What others are writing right now is left out."""
    for directory in _subdirectories(root):
        if directory.name == FILES:
            yield from _prepared_rows(directory)
            continue
        if not (directory / _ABOUT).exists():
            continue  # none of ours
        for file in os.scandir(directory):
            with suppress(OSError):
                status = file.stat()
                abandoned = file.name.endswith(_TEMPORARY) and time.time() - status.st_mtime > _ABANDONED_SECONDS
                if file.name.endswith(".arrow") or abandoned:
                    yield Entry(Path(file.path), status.st_size, status.st_mtime)


def remove(
    root: Path, *, keep_bytes: int = 0, unused_for: float = 0.0, files: bool = True, dry_run: bool = False
) -> list[Entry]:
    """Remove what was not used for longest until `keep_bytes` are left, sparing what was used in `unused_for` seconds.

    Without `files`, only windows count and are removed.
    """
    found = sorted((entry for entry in entries(root) if files or not entry.is_files), key=lambda entry: entry.used)
    held = sum(entry.bytes for entry in found)
    removed = []
    for entry in found:
        if held <= keep_bytes or time.time() - entry.used < unused_for:
            break
        if dry_run:
            pass
        elif entry.path.is_dir():
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            entry.path.unlink(missing_ok=True)
        held -= entry.bytes
        removed.append(entry)
    for directory in [] if dry_run else _subdirectories(root):
        if (
            directory.name != FILES
            and (directory / _ABOUT).exists()
            and not any(path.suffix in (".arrow", _TEMPORARY) for path in directory.iterdir())
        ):
            shutil.rmtree(directory, ignore_errors=True)
    return removed


def _subdirectories(directory: Path) -> list[Path]:
    try:
        return sorted(path for path in directory.iterdir() if path.is_dir() and not path.name.endswith(_TEMPORARY))
    except OSError:
        return []


def _prepared_rows(files: Path) -> Iterator[Entry]:
    for directory in (path for path in files.iterdir() if path.is_dir()):
        with suppress(OSError):
            found = [path.stat() for path in directory.rglob("*") if path.is_file()]
            used = max((status.st_mtime for status in found), default=directory.stat().st_mtime)
            if directory.suffix != _TEMPORARY or time.time() - used > _ABANDONED_SECONDS:
                yield Entry(directory, sum(status.st_size for status in found), used, True)
