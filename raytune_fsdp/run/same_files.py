"""Check that all ranks see the same files of a model. Every node may have a copy of its own, and copies may differ."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress

import psutil
import torch.distributed as dist

from raytune_fsdp.base.collectives import on_all_ranks, on_rank0
from raytune_fsdp.base.errors import ModelError, TransientError
from raytune_fsdp.checkpoint.manifest import share_of
from raytune_fsdp.model.directory.files import WeightFiles


def check_copies(files: WeightFiles) -> None:
    """Refuse copies that differ, if there are several: a model would be put together out of two. Collective."""
    if len(set(_marks_of_all(files))) > 1:
        digests(files, alone=False)


def digests(files: WeightFiles, *, alone: bool) -> dict[str, str]:
    """Return the hash of each file, the same on all ranks. Collective.

    Ranks that see the very same files hash a part each, and copies are compared. `alone`: only rank 0 sees the files.
    """
    if alone:
        return on_rank0(lambda: _hashed(files, list(files.sizes())), what="hash the files of the model")
    marks, rank = _marks_of_all(files), dist.get_rank()
    readers = [each for each, found in enumerate(marks) if found == marks[rank]]
    sizes = {name: size for name, size, *_ in marks[rank]}
    parts = on_all_ranks(lambda: _hashed(files, share_of(sizes, readers.index(rank), len(readers))))
    known: dict[str, tuple[int, str]] = {}
    for reader, part in enumerate(parts):
        for name, digest in part.items():
            first, wanted = known.setdefault(name, (reader, digest))
            if digest != wanted:
                raise ModelError(
                    f"{files.directory / name} is not the same file for rank {reader} as for rank {first}, although of "
                    "the same size: put one copy on all nodes, or set model.fill=rank0"
                )
    return {name: digest for name, (_, digest) in known.items()}


Mark = tuple[str, int, int, int, str]
"""Name, size, inode and time of change of a file, and the machine if the disk is that machine's own: on machines that
began as one image, the rest is equal."""

_OWN = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}
"""File systems that belong to one machine."""


def _marks_of_all(files: WeightFiles) -> list[tuple[Mark, ...]]:
    def look() -> tuple[Mark, ...]:
        try:
            found = ((name, (files.directory / name).stat()) for name in files.sizes())
            place, all_mounts = f"{files.directory.resolve()}/", []
            with suppress(OSError):  # where mounts may not be read, every machine's copy counts as shared
                all_mounts = psutil.disk_partitions(all=True)
            mounts = [each for each in all_mounts if place.startswith(f"{each.mountpoint.rstrip('/')}/")]
            kind = max(mounts, key=lambda each: len(each.mountpoint)).fstype if mounts else ""
            host = socket.gethostname() if kind in _OWN else ""
            return tuple((name, stat.st_size, stat.st_ino, stat.st_mtime_ns, host) for name, stat in found)
        except OSError as error:
            raise TransientError(f"{files.directory} could not be read: {error}") from error

    return on_all_ranks(look)


def _hashed(files: WeightFiles, names: Sequence[str]) -> dict[str, str]:
    try:
        return files.digests(names)
    except OSError as error:
        raise TransientError(f"{files.directory} could not be read: {error}") from error
