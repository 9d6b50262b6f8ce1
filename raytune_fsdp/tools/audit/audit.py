"""The audit itself: two checkpoints, what is on record between them, and the same steps trained again."""

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
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.run.beginning import adapters_of, put_beginning
from raytune_fsdp.run.length import plan_on_record
from raytune_fsdp.tools.audit.comparison import Audit, compare
from raytune_fsdp.tools.audit.repeat import repeat_of
from raytune_fsdp.tools.audit.segment import Segment, steps_of, taken


def audit(
    config: FinetuneConfig,
    place: RunDir,
    segment: Segment,
    directory: Path,
    progress: Progress | None = None,
    *,
    use_cache: bool = False,
) -> Audit:
    """Train the segment again in `directory`, which is empty, and compare. `config` is the run's, read from it.

    `use_cache`: take tokenized rows from the run's cache instead of its data. Whoever calls this has checked the places
    that the run leads to. Raises what keeps it from being trained
    at all, such as a model that is not there; all else is a finding.
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
    # Both: the run may go on meanwhile, and prune them.
    after = None if segment.after is None else taken(segment.after, directory / "audited")
    repeat = repeat_of(config, place, replace(segment, after=after), directory, use_cache=use_cache)
    again = RunDir.of(repeat)
    before = None if segment.before is None else taken(segment.before, Path(again.checkpoints))
    if before is not None:  # else these steps would be taken for more than the run was to have
        replace_durably(again.plan, json.dumps(asdict(plan_on_record(place))))
    found.segment = replace(segment, before=before, after=after)
    if before is None and (kept := committed(place.checkpoints)):  # else that checkpoint says how it was begun
        put_beginning(again, read_state(kept[-1]), adapters_of(CheckpointWeights(kept[-1]).shapes()))
    try:
        finetune(repeat, progress, trust_places=True)
    except OtherRunError as error:  # another seed, other data: what decides the trajectory has changed since
        found.difference = str(error)
        return found
    compare(found, config, place, again, record)
    return found
