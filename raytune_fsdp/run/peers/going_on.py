"""Whether a run goes on from a peer copy, because it is newer than the newest checkpoint."""

from __future__ import annotations

import logging
from dataclasses import replace

from raytune_fsdp.base.errors import RaytuneError, ResumeError, in_one_line
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, Damaged, committed, verify
from raytune_fsdp.checkpoint.location import storage_at
from raytune_fsdp.checkpoint.state import read_state
from raytune_fsdp.checkpoint.storage import Storage
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record import names
from raytune_fsdp.record.jsonl import read_events, read_step
from raytune_fsdp.run.resume import Resumed, check_same_run
from raytune_fsdp.run.resume_point import ResumePoint, RunInputs, look, resume_point_of

logger = logging.getLogger(__name__)


def look_with_peers(config: FinetuneConfig, prepared: RunInputs, world: int, storage: Storage) -> ResumePoint:
    """Return where the run is now, in a peer copy or a checkpoint: see `look`. Call on rank 0."""
    try:
        standing = look(config, prepared, world)
    except ResumeError as error:
        place = prepared.place
        there = committed(place.checkpoints)
        if not there and not storage_at(place.checkpoints).has_damaged():
            raise  # they are not damaged but gone, as where their storage is not mounted on this node
        # A copy that is newer than all that were ever made is all that is left of the run.
        saved = [each["fields"].get("step") for each in read_events(place.events) if each["event"] == names.SAVED]
        after = max([*(found.step for found in there), *(step for step in saved if isinstance(step, int))], default=0)
        damaged = {found: verify(found, hashes=False) or "" for found in there}
        copy = _newest_copy(config, prepared, world, storage, after=after, damaged=damaged)
        if copy is None or not all(damaged.values()):
            raise
        logger.warning("%s; the run goes on from its peer copy of step %d", in_one_line(error), copy.state.step)
        return copy
    return with_peers(config, prepared, standing, storage)


def with_peers(config: FinetuneConfig, prepared: RunInputs, standing: ResumePoint, storage: Storage) -> ResumePoint:
    """Return where the run is by its newest peer copy, if that is newer than its newest checkpoint; else `standing`.

    Call on rank 0. Whether the copy is whole, all ranks find out together.
    """
    world, step = standing.plan.layout.world, standing.state.step
    copy = _newest_copy(config, prepared, world, storage, after=step, damaged=standing.damaged)
    if copy is None:
        return standing
    return replace(copy, attempt=standing.attempt, windows_built=standing.windows_built, behind=standing.commit)


def _newest_copy(
    config: FinetuneConfig, prepared: RunInputs, world: int, storage: Storage, *, after: int, damaged: Damaged
) -> ResumePoint | None:
    for found in sorted(committed(storage.location), key=lambda each: (each.attempt, each.step), reverse=True):
        try:
            if found.step <= after or not _is_on_record(prepared.place, found):
                continue
            resumed = Resumed(checkpoint=found, state=read_state(found), damaged=damaged)
            check_same_run(resumed, prepared.identity, prepared.files_of_data)
            return resume_point_of(config, prepared, world, resumed)
        except RaytuneError as error:
            logger.warning("the peer copy of step %d is not used: %s", found.step, in_one_line(error))
    return None


def _is_on_record(place: RunDir, found: CommittedCheckpoint) -> bool:
    """Return whether the step on record is the one of which this is a copy.

    If an attempt has gone on from somewhere else since, its line is gone, or there is another one: what follows from
    the copy is then another trajectory than the one on record, if only in the last bits.
    """
    line = read_step(place.metrics, found.step)
    return line is not None and line.get("attempt") == found.attempt
