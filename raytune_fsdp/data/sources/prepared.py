"""Directories of the cache: made once, renamed into place when they are complete, used by all nodes.

<cache>/files/<key>/            key: hash of what was prepared, how, and from which file (path, size, time or ETag)
    meta.json                   what was prepared; size and hash of every file. Its mtime is the time of the last use
    ...
<cache>/files/<key>.<x>.tmp/    being made, or left by a process that was killed
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from raytune_fsdp.base.batch import Progress
from raytune_fsdp.base.durable import sync_directory, write_durably
from raytune_fsdp.base.errors import DataError
from raytune_fsdp.data.sources.handles import (
    BLOCKS,
    CHUNK_BYTES,
    DECODED,
    OPEN,
    TABLES,
    ChunkHashes,
    Stored,
    hash_once,
)
from raytune_fsdp.data.sources.source import File, unreadable

# Part of every key. Raise it when the format of any prepared file changes.
_VERSION = 2
_META = "meta.json"
_STAYS = "start again; if it stays so, make it readable or remove it (it is prepared again), or change data.cache.path"
_TOUCH_SECONDS = 3600.0
_TOUCHED: dict[str, float] = {}
_Report = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """A complete directory of the cache."""

    path: Path
    meta: Mapping[str, Any]

    def stored(self, name: str, *, shown: str) -> Stored:
        """Return one of its files."""
        return Stored(shown, str(self.path / name), self.meta["files"][name], self.meta["content"])

    def in_place(self, file: File) -> Stored:
        """Return the file itself that was prepared, which must still have the content that it had then."""
        return Stored(file.shown, file.url, file.size, self.meta["content"], ChunkHashes(str(self.path / BLOCKS)))

    def holds(self, file: File, every: int) -> bool:
        """Return whether the local file still has the content that was prepared, judged by each `every`-th chunk."""
        # Copies that were made before chunks were hashed have no hashes: size and time must do for them.
        return BLOCKS not in self.meta["files"] or ChunkHashes(str(self.path / BLOCKS)).hold(file, every)


def prepare_file(
    cache: Path,
    identity: Mapping[str, object],
    make: Callable[[Path], Mapping[str, Any]],
    *,
    shown: str,
    progress: Progress | None = None,
    holds: Callable[[PreparedRows], bool] | None = None,
) -> PreparedRows:
    """Return the directory prepared earlier if it `holds`; otherwise a new one.

    `make` fills a new directory and returns its meta. Each process hashes every file once: a directory that storage has
    damaged is made again.
    """
    final = cache / "files" / key_of(identity)
    report = None if progress is None else partial(progress, f"checking {shown}")
    found = _find(final, report)
    if found is not None and holds is not None and not holds(found):
        _discard(final)
        found = None
    while found is None:
        temporary = final.with_name(f"{final.name}.{uuid.uuid4().hex[:12]}.tmp")
        try:
            temporary.mkdir(parents=True)
            meta = {**make(temporary), "identity": dict(identity)}
            files = {}
            for file in sorted(temporary.iterdir()):
                with open(file, "rb") as opened:
                    os.fsync(opened.fileno())
                files[file.name] = file.stat().st_size
            whole = {**meta, "files": files, "hashes": _hashes(temporary, files, final, report)}
            write_durably(temporary / _META, json.dumps({**whole, "digest": _digest(whole)}, indent=1))
            sync_directory(temporary)
            try:
                temporary.rename(final)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                # Another process was faster and made the same directory.
            else:
                sync_directory(final.parent)
        except OSError as error:
            raise unwritable(cache, shown, error) from error
        finally:
            # The directory still exists if another process was first, or something failed.
            shutil.rmtree(temporary, ignore_errors=True)
        found = _find(final, report)
    return found


def prepare_one(
    file: File,
    how: Mapping[str, object],
    make: Callable[[Path], Mapping[str, Any]],
    *,
    cache: Path,
    every: int,
    progress: Progress | None,
    in_place: bool,
) -> PreparedRows:
    """Return what `prepare_file` does for one file. `how`: how it is prepared. `every`: see `PreparedRows.holds`.

    `in_place`: its rows are read from itself.
    """
    identity = {**how, **file.identity, **({"blocks": CHUNK_BYTES} if in_place else {})}
    holds = None if file.remote else lambda made: made.holds(file, every)
    return prepare_file(cache, identity, make, shown=file.shown, progress=progress, holds=holds)


def key_of(identity: Mapping[str, object]) -> str:
    """Return the name of the directory for what `identity` describes."""
    return _digest([_VERSION, identity])


def touch(path: str) -> None:
    """Note that this file's directory is in use: a clean-up removes what has long been unused.

    It can be called often; a process writes it down once an hour.
    """
    now = time.monotonic()
    if now - _TOUCHED.get(path, -_TOUCH_SECONDS) < _TOUCH_SECONDS:
        return
    _TOUCHED[path] = now
    with suppress(OSError):
        os.utime(Path(path).with_name(_META))


def _digest(value: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


def _find(final: Path, report: _Report | None) -> PreparedRows | None:
    try:
        meta = json.loads((final / _META).read_text(encoding="utf-8"))
        whole = (
            meta.pop("digest") == _digest(meta)
            and all((final / name).stat().st_size == size for name, size in meta["files"].items())
            and _hashes(final, meta["files"], final, report) == meta["hashes"]
        )
    except (FileNotFoundError, NotADirectoryError):
        whole = not final.exists()
        if whole:
            return None
    except OSError as error:  # says nothing of what is there, which other processes may be reading
        raise unreadable(str(final), error, _STAYS) from error
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        _discard(final)
        return None
    with suppress(OSError):  # a read-only cache will do
        os.utime(final / _META)
    return PreparedRows(final, meta)


def _hashes(directory: Path, files: Mapping[str, int], final: Path, report: _Report | None) -> dict[str, str]:
    """Return the hash of each file, kept under its path in `final`, so that it is not read again after the rename."""
    found: dict[str, str] = {}
    before, total = 0, sum(files.values())
    for name, size in files.items():

        def report_all(done: int, before: int = before) -> None:
            if report is not None:
                report(before + done, total)

        with open(directory / name, "rb") as opened:
            found[name] = hash_once(opened.fileno(), str(final / name), report_all)
        before += size
    return found


def _discard(final: Path) -> None:
    # Renamed first, so that no other process finds half of it.
    away = final.with_name(f"{final.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        final.rename(away)
    except FileNotFoundError:
        return
    except OSError as error:
        raise DataError(f"{final} is damaged and cannot be removed ({error.strerror}); remove it yourself") from error
    shutil.rmtree(away, ignore_errors=True)
    # Otherwise this process would go on reading the files it has open.
    OPEN.clear()
    DECODED.clear()
    TABLES.clear()


def unwritable(cache: Path, shown: str, error: OSError) -> DataError:
    """Return the DataError for what the cache cannot take."""
    reason = error.strerror or str(error)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    way_out = "free space there, or change" if full else "make it writable, or change"
    return DataError(f"{shown}: cannot be prepared in the cache {cache} ({reason}); {way_out} data.cache.path")
