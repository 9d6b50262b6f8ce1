"""The file systems that URLs name: S3 and GCS through pyarrow, all others through fsspec."""

from __future__ import annotations

import os
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.fs

from raytune_fsdp.base.bounded import Bounded
from raytune_fsdp.base.urls import split_query

# One for each bucket: a client takes connections and threads, and a mixture reads many files of few buckets.
_FILE_SYSTEMS = Bounded(16)


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, which this process keeps open, and the path in it."""
    scheme, rest = url.split("://", 1)
    if scheme not in ("s3", "gs"):
        system, path = fsspec.core.url_to_fs(url)
        return pa.fs.PyFileSystem(pa.fs.FSSpecHandler(system)), path
    rest, query = split_query(rest)
    bucket, slash, path = rest.partition("/")
    # Opened by the bucket's URL without the path, which would have to be quoted, and is not.
    place = f"{scheme}://{bucket}{query}"
    # What a client takes from the environment when it is opened: a notebook may later name another store.
    settings = tuple(sorted(item for item in os.environ.items() if item[0].startswith(("AWS_", "GOOGLE_"))))
    system = _FILE_SYSTEMS.get((place, settings), lambda: pa.fs.FileSystem.from_uri(place)[0])
    return system, bucket.rpartition("@")[2] + slash + path
