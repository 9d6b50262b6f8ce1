"""Choose the storage at a location: a directory, or a URL of an object store."""

from __future__ import annotations

from raytune_fsdp.base.urls import is_url
from raytune_fsdp.checkpoint.storage import PosixStorage, Storage


def storage_at(location: str) -> Storage:
    """Return the storage of a directory or URL, without touching either."""
    from raytune_fsdp.checkpoint.objects import ObjectStorage

    return ObjectStorage(location) if is_url(location) else PosixStorage(location)
