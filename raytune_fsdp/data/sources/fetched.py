"""Files in stores that name no version of them, such as an HTTP server without ETag, Content-MD5 and Last-Modified.

Only the content shows whether such a file has changed. So the process that opens the data reads the file into the cache
once per command, and what is prepared from it is identified by the content's hash. All other processes get the opened
data and ask no store.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from raytune_fsdp.base.batch import Progress
from raytune_fsdp.data.sources.handles import check_unchanged, content_hash
from raytune_fsdp.data.sources.places import copy
from raytune_fsdp.data.sources.prepared import key_of, unwritable
from raytune_fsdp.data.sources.remote import UNKNOWN, check_version, with_version
from raytune_fsdp.data.sources.source import File


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
            copy(file, path, progress=progress)
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
        copy(file, path, progress=progress)
        # In a store each piece comes from what the object is then. A copy of two would be kept under the first's ETag.
        (check_version if file.remote else check_unchanged)(file)
        return
    try:
        os.link(file.fetched, path)
    except OSError:  # a file system without hard links
        shutil.copyfile(file.fetched, path)
