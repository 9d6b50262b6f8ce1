"""Choose the storage at a location: a directory, a URL of an object store, or what this process holds in memory."""

from __future__ import annotations

import re
import uuid

from raytune_fsdp.base.urls import is_url
from raytune_fsdp.checkpoint.storage import PosixStorage, Storage

_IN_MEMORY = re.compile("peers:[0-9a-f]{32}")
"""The location of peer copies. No path of a run is one: those begin with a slash."""
_HELD: dict[str, Storage] = {}
"""Peer copies by their location, as the ranks of an attempt reach them."""


def new_location() -> str:
    """Return the location of the peer copies of one command, which no other has."""
    return f"peers:{uuid.uuid4().hex}"


def in_memory(location: str) -> bool:
    """Return whether this is the location of peer copies: what is there is no commit, and gone with its command."""
    return _IN_MEMORY.fullmatch(location) is not None


def hold(storage: Storage) -> None:
    """Let `storage_at` find these peer copies, in this process."""
    assert in_memory(storage.location), storage.location
    _HELD[storage.location] = storage


def storage_at(location: str) -> Storage:
    """Return the storage of a directory or URL, without touching either, or the peer copies at a location."""
    from raytune_fsdp.checkpoint.objects import ObjectStorage

    if in_memory(location):
        if location not in _HELD:
            raise FileNotFoundError(f"{location} is only known to the ranks of the command that made it")
        return _HELD[location]
    return ObjectStorage(location) if is_url(location) else PosixStorage(location)
