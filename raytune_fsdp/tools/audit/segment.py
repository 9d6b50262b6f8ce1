"""Choose the steps that are trained again, and read their lines on record."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raytune_fsdp.base.errors import ConfigError, ResumeError
from raytune_fsdp.base.untrusted import open_regular, reason
from raytune_fsdp.base.urls import is_url
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, committed
from raytune_fsdp.checkpoint.location import storage_at
from raytune_fsdp.checkpoint.manifest import read_manifest
from raytune_fsdp.checkpoint.storage import MANIFEST_FILE
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record.jsonl import each_line
from raytune_fsdp.record.lines import step_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The steps that are trained again."""

    first: int
    """The step before the segment; 0: the segment starts at the beginning."""
    last: int
    before: CommittedCheckpoint | None
    """The checkpoint of `first`; None: the beginning."""
    after: CommittedCheckpoint | None
    """The checkpoint of `last`; None: it has not been kept, so only the record is compared."""


def choose_segment(place: RunDir, first: int | None, last: int | None, begins_after: int = 0) -> Segment:
    """Choose the segment between two kept checkpoints; by default between the two newest.

    `begins_after`: the step of the checkpoint with which a fork began. A segment that begins there has no `before` yet.
    """
    check_mounted(place)
    kept = {each.step: each for each in committed(place.checkpoints)}
    there = ", ".join(map(str, sorted(kept))) or "none"
    lasting = [step for step, found in kept.items() if found.lasting]  # the others are at steps chosen by the clock
    last = max(lasting, default=0) if last is None else last
    first = max((step for step in lasting if step < last), default=begins_after) if first is None else first
    if first != begins_after and first not in kept:
        raise ConfigError(
            f"--from {first}: {place.checkpoints} has no checkpoint of that step; it has {there}, or {begins_after}"
        )
    if not first < last:
        raise ConfigError(f"--from {first} --to {last}: a segment has at least one step; kept checkpoints: {there}")
    reached = max((step_of(line) for line in each_line(place.metrics) if line and line["kind"] == "step"), default=0)
    if last > reached:
        raise ConfigError(f"--to {last}: the run has come to step {reached}")
    return Segment(first=first, last=last, before=kept.get(first), after=kept.get(last))


def check_mounted(place: RunDir) -> None:
    """Refuse to audit by checkpoints in an object store: the run's own, or those of its parent."""
    if is_url(place.checkpoints):
        raise ConfigError(
            f"{place.checkpoints} is in an object store, and an audit reads checkpoints from a file system: copy those "
            f"of the segment to {place.path}/checkpoints, and remove {place.checkpoints_at.name} there"
        )


def copied_checkpoint(checkpoint: CommittedCheckpoint, root: Path) -> CommittedCheckpoint:
    """Copy a committed checkpoint to another directory, where a run that goes on does not prune it."""
    target = root / checkpoint.name
    target.mkdir(parents=True)
    try:
        # Only files that the manifest names: a stranger's directory may have a link to a whole disk.
        listed = read_manifest(storage_at(checkpoint.root), checkpoint.name).files
        for name in (*listed, MANIFEST_FILE):
            _take(Path(checkpoint.path) / name, target / name)
    except (OSError, ValueError) as error:
        raise ResumeError(f"{checkpoint.path} cannot be read: {reason(error)}; name another segment") from error
    return replace(checkpoint, root=str(root))


def _take(source: Path, target: Path) -> None:
    """Put a file into another directory, by a link where the file system can: the files are large."""
    handle = open_regular(source)
    with open(handle, "rb") as file:
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError:
            with open(target, "xb") as copy:
                shutil.copyfileobj(file, copy, 1 << 20)


def steps_of(metrics: Path, segment: Segment) -> dict[int, Mapping[str, Any]]:
    """Return the lines of the segment's steps."""
    lines = ((step_of(line), line) for line in each_line(metrics) if line and line["kind"] == "step")
    return {step: line for step, line in lines if segment.first < step <= segment.last}
