"""Find which checkpoints a run has, which of them can be trusted, and which are kept. Reads no tensors."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from raytune_fsdp.base.errors import ResumeError, TransientError
from raytune_fsdp.base.untrusted import reason
from raytune_fsdp.checkpoint.location import storage_at
from raytune_fsdp.checkpoint.manifest import check_files, read_manifest
from raytune_fsdp.checkpoint.storage import (
    MANIFEST_BYTES,
    MANIFEST_FILE,
    Pinned,
    Storage,
    directory_name,
    not_pinned,
    parse_directory_name,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class CommittedCheckpoint:
    """A committed checkpoint. Sorts by step, then by attempt."""

    step: int
    attempt: int
    root: str
    """Directory or URL of all checkpoints of the run."""
    lasting: bool = True
    """False: a recovery point. The clock chose its step, so nothing may follow from it except that a run continues."""

    @property
    def name(self) -> str:
        return directory_name(self.step, self.attempt, self.lasting)

    @property
    def path(self) -> str:
        return storage_at(self.root).where(self.name)


def looks_like_checkpoint(path: str) -> bool:
    """Return whether a path or URL has the name of a checkpoint."""
    return parse_directory_name(path.rstrip("/").rpartition("/")[2]) is not None


def as_checkpoint(path: str) -> CommittedCheckpoint | None:
    """Return the committed checkpoint at a path or URL; None if it is not one."""
    root, _, name = path.rstrip("/").rpartition("/")
    found = parse_directory_name(name)
    return _at(found, root) if found is not None and MANIFEST_FILE in storage_at(root).sizes(name) else None


def committed(root: str) -> list[CommittedCheckpoint]:
    """Return all committed checkpoints in a directory or below a URL, oldest first."""
    return sorted(_at(found, root) for found in map(parse_directory_name, storage_at(root).names()) if found)


def checkpoint_at(found: Sequence[CommittedCheckpoint], step: int) -> CommittedCheckpoint | None:
    """Return the checkpoint of a step: that which the clock has not chosen, and of the newest attempt; None: none."""
    there = (each for each in found if each.step == step)
    return max(there, key=lambda each: (each.lasting, each.attempt), default=None)


def _at(found: tuple[int, int, bool], root: str) -> CommittedCheckpoint:
    step, attempt, lasting = found
    return CommittedCheckpoint(step, attempt, root, lasting)


def digest_of(found: CommittedCheckpoint) -> str:
    """Return the digest of a checkpoint's numbers, if its ranks have computed one, else that of its manifest, which has
    the hashes of all its files."""
    storage = storage_at(found.root)
    try:
        known = read_manifest(storage, found.name).digest.get("everything")
        return known or hashlib.sha256(storage.read(found.name, MANIFEST_FILE, MANIFEST_BYTES)).hexdigest()
    except ValueError as error:
        raise ResumeError(f"{found.path}/{MANIFEST_FILE} is not a manifest: {reason(error)}") from error


Damaged = Mapping[CommittedCheckpoint, str]
"""Checkpoints that cannot be used, and why."""


def newest(
    root: str, *, hashes: bool, damaged: Damaged | None = None, threads: int = 1
) -> tuple[CommittedCheckpoint | None, Damaged]:
    """Return the newest checkpoint whose files match its manifest, and the newer ones that do not.

    The first is None if there never was a checkpoint. It is an error if all are damaged: to start from scratch would
    throw the run away. Those known to be `damaged` are not checked again.
    """
    known = dict(damaged or {})
    for found in reversed(committed(root)):
        if found in known:
            continue
        problem = verify(found, hashes=hashes, threads=threads)
        if problem is None:
            for each in known.keys() - (damaged or {}).keys():  # if all are damaged, the error says so
                logger.warning("checkpoint %s is damaged (%s); looking for an older one", each.path, known[each])
            return found, known
        known[found] = problem
    if known or storage_at(root).has_damaged():
        why = "; ".join(f"{found.name}: {problem}" for found, problem in known.items()) or "they were set aside"
        raise ResumeError(
            f"{root}: every checkpoint is damaged ({why}): restore one of them, or start from scratch under another "
            "run.name"
        )
    return None, {}


def verify(
    found: CommittedCheckpoint, *, hashes: bool, share: tuple[int, int] = (0, 1), threads: int = 1
) -> str | None:
    """Return the problem with a committed checkpoint; None if it is intact. See `manifest.check`."""
    try:
        return check_files(storage_at(found.root), found.name, hashes=hashes, share=share, threads=threads)
    except OSError as error:  # this says nothing about the checkpoint: the storage may answer later
        raise TransientError(f"{found.path} cannot be read: {error}; try again when the storage answers") from error


def set_aside(damaged: Damaged, root: str, chosen: CommittedCheckpoint | None) -> list[tuple[CommittedCheckpoint, str]]:
    """Rename the damaged checkpoints newer than `chosen`, or all: pruning goes by step, and would keep them instead."""
    newer = [found for found in committed(root) if chosen is None or found > chosen]
    for found in newer:
        if found not in damaged:
            raise TransientError(
                f"{found.path} was committed meanwhile by another process of this run; run the command again"
            )
    return [(found, storage_at(root).set_aside(found.name)) for found in newer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Which checkpoints are kept after a commit."""

    last: int | None
    """The number of newest ones; at least two are kept. None: all."""
    every: int | None = None
    """Also those whose step is a multiple of this."""
    best: int = 0
    """Also this number of those that scored best."""
    lower_is_better: bool = True
    recovery: int = 2
    """The number of recovery points, as long as there is nothing else to go back to."""


def to_remove(
    found: Sequence[CommittedCheckpoint], keep: Keep, scores: Mapping[int, float]
) -> list[CommittedCheckpoint]:
    """Return the checkpoints that are not kept, oldest first. `found` is sorted; `scores` are by step.

    Recovery points push nothing out, and nothing is kept because of the step that one happens to have. They stay only
    while a run would continue from them, and only the newest one if there is another checkpoint.
    """
    lasting = [each for each in found if each.lasting]
    # Two: if the newest is damaged, a run falls back to the one before.
    kept = set(lasting if keep.last is None else lasting[-max(2, keep.last) :])
    if keep.every is not None:
        kept |= {each for each in lasting if each.step % keep.every == 0}
    sign = 1.0 if keep.lower_is_better else -1.0
    scored = [each for each in lasting if each.step in scores]
    scored.sort(key=lambda each: (sign * scores[each.step], -each.step))  # the later of equals
    kept |= set(scored[: keep.best])
    count = 1 if lasting else max(1, keep.recovery)
    kept |= {each for each in found[-count:] if not lasting or each.step > lasting[-1].step}
    return [each for each in found if each not in kept]


def in_the_way(found: Sequence[CommittedCheckpoint], *, lasting: bool) -> list[CommittedCheckpoint]:
    """Return what may be removed where storage has no room for another checkpoint. `found` is sorted.

    Recovery points, but not the newest checkpoint, from which the run would go on. `lasting`: the clock has not chosen
    the checkpoint that lacks room, so that it must not depend on the clock: then the newest, too, unless it is all that
    the run could go on from.
    """
    recovery = [each for each in found if not each.lasting]
    return recovery if lasting and len(recovery) < len(found) else [each for each in recovery if each != found[-1]]


def ways_out_of_divergence(root: str, step: int) -> str:
    """Return what a person can do if training went wrong after a step: the same run would take the same course."""
    return (
        "the same settings would end here again, and others make another run: give it a new run.name, lower optim.lr, "
        "raise optim.warmup_ratio or mend the data, and set model.init=pretrained and model.path to a checkpoint of "
        f"step {step} or earlier in {root}, or leave them as they are to start over"
    )


def prune(storage: Storage, keep: Keep, scores: Mapping[int, float], pinned: Pinned = not_pinned) -> None:
    """Delete the checkpoints that are not kept."""
    for found in to_remove(committed(storage.location), keep, scores):
        remove_unpinned(storage, found.name, pinned)


def remove_unpinned(storage: Storage, name: str, pinned: Pinned) -> bool:
    """Delete a checkpoint that no other run needs; return whether it is gone."""
    return not pinned(name) and storage.remove(name, partial(pinned, name))
