"""Storage with a quota that it does not show: what is free is what the disk has, and a write fails all the same."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from raytune_fsdp.checkpoint.storage import PosixDraft


def with_quota(room: Callable[[], float]) -> Callable[[PosixDraft, str], AbstractContextManager[Any]]:
    """In the place of `PosixDraft.create`. `room`: as many checkpoints fit; let some room be over, which the ranks
    fill, but not with half of a checkpoint. What the first one has taken is as much as any."""
    create, size = PosixDraft.create, 0

    @contextmanager
    def limited(draft: PosixDraft, file: str) -> Iterator[Any]:
        nonlocal size
        others = [path for path in draft.final.parent.glob("step-*") if path != draft.staging]
        there = sum(map(_bytes, others))
        size = size or there
        with create(draft, file) as sink:
            yield _Limited(sink, room() * size - there) if size else sink

    return limited


def _bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


class _Limited:
    def __init__(self, sink: Any, left: float) -> None:
        self._sink, self._left = sink, left

    def write(self, piece: Any) -> None:
        self._left -= len(piece)
        if self._left < 0:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        self._sink.write(piece)
