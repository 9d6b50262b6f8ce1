"""Audit a run: train the steps between two checkpoints again, and compare them with the record."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from raytune_fsdp.base.batch import Progress
from raytune_fsdp.base.durable import replace_durably
from raytune_fsdp.base.errors import OtherRunError
from raytune_fsdp.checkpoint.catalogue import committed, verify
from raytune_fsdp.checkpoint.state import read_state
from raytune_fsdp.checkpoint.weights import CheckpointWeights
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch.finetune import finetune
from raytune_fsdp.model.adapters.attach import adapted_modules
from raytune_fsdp.plan.run_dir import CHECKPOINTS, RunDir
from raytune_fsdp.run.beginning import put_beginning
from raytune_fsdp.run.length import plan_on_record
from raytune_fsdp.tools.audit.chain import is_fork
from raytune_fsdp.tools.audit.comparison import Audit, compare
from raytune_fsdp.tools.audit.repeat import repeat_of
from raytune_fsdp.tools.audit.segment import Segment, copied_checkpoint, steps_of


def audit(
    config: FinetuneConfig,
    place: RunDir,
    segment: Segment,
    directory: Path,
    progress: Progress | None = None,
    *,
    use_cache: bool = False,
) -> Audit:
    """Train the segment again in `directory`, which must be empty, and compare. `config` is read from the run.

    `use_cache`: take tokenized rows from the run's cache instead of its data. The caller has checked the places that
    the run leads to. Raises an error if nothing can be trained, for example because the model is missing; any other
    problem is a finding.
    """
    found = Audit(segment=segment, use_cache=use_cache)
    for checkpoint in filter(None, (segment.before, segment.after)):
        if problem := verify(checkpoint, hashes=True):
            found.difference = f"{checkpoint.path} is damaged: {problem}"
            return found
    record = steps_of(place.metrics, segment)
    missing = [step for step in range(segment.first + 1, segment.last + 1) if step not in record]
    if missing:
        found.difference = f"step {missing[0]} is not on record: {place.metrics} has {len(record)} of the steps"
        return found
    # Take both checkpoints: the run may go on meanwhile, and prune them.
    after = None if segment.after is None else copied_checkpoint(segment.after, directory / "audited")
    # What the segment begins with, in the repetition or in its parent.
    home = directory / "audited" / "parent" if is_fork(segment, place) else None
    repeat = repeat_of(config, place, replace(segment, after=after), directory, use_cache=use_cache, parent=home)
    again = RunDir.of(repeat)
    begun = again if home is None else RunDir(home, str(home / CHECKPOINTS))
    before = None if segment.before is None else copied_checkpoint(segment.before, Path(begun.checkpoints))
    if before is not None:  # without the run's plan, these steps would count as more than the run was to have
        replace_durably(begun.plan, json.dumps(asdict(plan_on_record(place))))
    found.segment = replace(segment, before=before, after=after)
    if before is None and (kept := committed(place.checkpoints)):  # otherwise `before` says how the run was begun
        put_beginning(again, read_state(kept[-1]), adapted_modules(CheckpointWeights(kept[-1]).shapes()))
    try:
        finetune(repeat, progress, trust_places=True)
    except OtherRunError as error:  # something that decides the trajectory has changed since: the seed, the data
        found.difference = str(error)
        return found
    compare(found, config, place, again, record)
    return found
