"""Files in object stores, and in whatever else fsspec opens; and the content of any file, decompressed."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs

from raytune_fsdp.base.batch import Progress
from raytune_fsdp.base.errors import DataError
from raytune_fsdp.base.file_systems import file_system
from raytune_fsdp.base.untrusted import check_size
from raytune_fsdp.base.urls import split_query, without_secrets
from raytune_fsdp.data.sources.handles import check_unchanged, content_hash
from raytune_fsdp.data.sources.prepared import key_of, unwritable
from raytune_fsdp.data.sources.source import File, compression_of, has_wildcard, is_wanted, matcher, reading

# Names that file systems give to a value that changes with the content, best first.
_VERSIONS = (
    "ETag", "etag", "sha256", "blob_id", "xet_hash", "checksum", "Content-MD5", "Digest", "md5Hash", "generation",
)  # fmt: skip
_TIMES = ("mtime", "LastModified", "last_modified", "Last-Modified", "updated", "created")

UNKNOWN = "unknown"
"""The version of a file whose store tells nothing about it that changes with the content."""

SIDE_FILE_BYTES = 64 << 20
"""The most bytes of a README.md, or of a file by `Dataset.save_to_disk` that holds no rows."""

# Also the size of a request to a store.
_CHUNK_BYTES = 8 << 20


def with_version(file: File) -> File:
    """Ask the store for the version of a file; return the file with it."""
    if file.version:
        return file
    with reading(file.shown):
        system, path = file_system(file.url)
        facts: Mapping[str, Any]
        if isinstance(system, pa.fs.PyFileSystem):
            facts = system.handler.fs.info(path)
        else:
            with system.open_input_stream(path, compression=None) as stream:
                found = stream.metadata()
            facts = {
                "ETag": (found.get("ETag") or b"").decode(),
                "mtime": system.get_file_info(path).mtime_ns,
            }
        name = next((name for name in (*_VERSIONS, *_TIMES) if facts.get(name)), None)
        return replace(file, version=f"{name}={facts[name]}" if name else UNKNOWN)


def check_version(file: File) -> None:
    """Raise DataError if a file in a store is another one than when its version was asked for."""
    with reading(file.shown):
        system, path = file_system(file.url)
        if isinstance(system, pa.fs.PyFileSystem):
            system.handler.fs.invalidate_cache(path)  # else some clients answer from the listing that found the file
    if with_version(replace(file, version="")).version != file.version:
        raise DataError(
            f"{file.shown}: was replaced while it was copied; start again with the final file, or, if its store names "
            "another version whenever it is asked, copy the file to a disk"
        )


def remote_files(url: str, pattern: str, choose: Callable[..., list[str]]) -> list[File]:
    """Return the file at a URL, the files matching a pattern, or those that `choose` picks in a directory."""
    shown = without_secrets(url)
    with reading(shown, "check the URL and its credentials, and install the package that this kind of URL needs"):
        if has_wildcard(split_query(url)[0]):
            return _matching(pattern)
        system, path = file_system(url)
        info = system.get_file_info(path)
        if info.type == pa.fs.FileType.NotFound:
            raise DataError(f"{shown}: no such file; correct the dataset's path, or its credentials")
        if info.type == pa.fs.FileType.File:
            return [File(shown, url, info.size, "")]
        top = path.rstrip("/")
        below = {found[len(top) + 1 :]: size for found, size in _list(system, top, recursive=True)}

        def read(name: str) -> bytes:
            with system.open_input_stream(f"{top}/{name}", compression=None) as stream:
                content: bytes = stream.read(SIDE_FILE_BYTES + 1)
                check_size(len(content), SIDE_FILE_BYTES)
                return content

        return [_file(url, system, f"{top}/{name}", below[name]) for name in choose(list(below), read)]


def _matching(url: str) -> list[File]:
    system, pattern = file_system(url)
    parts = pattern.split("/")
    fixed = next(index for index, part in enumerate(parts) if has_wildcard(part))
    matches = matcher(pattern)
    try:
        found = sorted(_list(system, "/".join(parts[:fixed]), recursive=fixed < len(parts) - 1))
    except FileNotFoundError:
        # fsspec also raises this for a store that did not answer. Asked about the folder itself, it says why.
        system.get_file_info("/".join(parts[:fixed]))
        return []
    return [_file(url, system, path, size) for path, size in found if matches(path) and is_wanted(path, pattern)]


def _list(system: Any, folder: str, *, recursive: bool) -> Iterator[tuple[str, int]]:
    for info in system.get_file_info(pa.fs.FileSelector(folder, recursive=recursive)):
        if info.type == pa.fs.FileType.File:
            yield info.path, info.size


def _file(url: str, system: Any, path: str, size: int) -> File:
    if isinstance(system, pa.fs.PyFileSystem):
        found = system.handler.fs.unstrip_protocol(path)
    else:
        # Keep the user before the bucket, and the options of the store after the path.
        scheme, rest = url.split("://", 1)
        rest, query = split_query(rest)
        user, at, _ = rest.partition("/")[0].rpartition("@")
        found = f"{scheme}://{user}{at}{path}{query}"
    return File(without_secrets(found), found, size, "")


# The content of a file, decompressed.
#
# Some stores name no version of their files, such as an HTTP server without ETag, Content-MD5 and Last-Modified. Only
# the content shows whether such a file has changed. So the process that opens the data reads the file into the cache
# once per command, and what is prepared from it is identified by the content's hash. All other processes get the opened
# data and ask no store.


@contextmanager
def with_content(file: File, *, cache: Path, progress: Progress | None) -> Iterator[File]:
    """Yield the file with its version. If the store names none, fetch the file: its content's hash is the version."""
    file = with_version(file)
    if file.version != UNKNOWN:
        yield file
        return
    # Named like a directory of the cache that is being made, so that a clean-up finds what a killed process leaves.
    directory = cache / "files" / f"{key_of(file.identity)}.{uuid.uuid4().hex[:12]}.tmp"
    try:
        try:
            directory.mkdir(parents=True)
            path = directory / "fetched"
            _copy(file, path, progress=progress)
            with open(path, "rb") as opened:
                content = content_hash(opened.fileno())
        except OSError as error:
            raise unwritable(cache, file.shown, error) from error
        yield replace(file, version=f"content={content}", fetched=str(path))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def write_content(file: File, path: Path, *, progress: Progress | None) -> None:
    """Write the decompressed content of a file to `path`. If it was fetched, only link it there."""
    if not file.fetched:
        _copy(file, path, progress=progress)
        # In a store each piece comes from what the object is then. A copy of two would be kept under the first's ETag.
        (check_version if file.remote else check_unchanged)(file)
        return
    try:
        os.link(file.fetched, path)
    except OSError:  # a file system without hard links
        shutil.copyfile(file.fetched, path)


def _copy(file: File, path: Path, *, progress: Progress | None) -> None:
    """Write the decompressed content of a file to `path`, chunk by chunk."""
    with open(path, "wb") as target:
        for chunk in _chunks(file, progress):
            target.write(chunk)


def _chunks(file: File, progress: Progress | None) -> Iterator[bytes]:
    # A generator, so that `reading` covers errors of the file, but not those of writing the copy between two chunks.
    codec = compression_of(file.url)
    with reading(file.shown), _stream(file) as raw:
        stream = pa.CompressedInputStream(raw, codec) if codec else raw
        while chunk := stream.read(_CHUNK_BYTES):
            yield chunk
            if progress is not None:
                progress(file.shown, raw.tell(), file.size)


def _stream(file: File) -> Any:
    if not file.remote:
        return pa.OSFile(file.url, "rb")
    system, path = file_system(file.url)
    # Not open_input_stream: a stream cannot tell its position, which progress needs.
    return system.open_input_file(path)
