"""Whether training itself has failed, or something around it; the first is put on record, for whoever compares runs."""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.distributed as dist

from raytune_fsdp.base.errors import RaytuneError, RowError, TrainingError, in_one_line
from raytune_fsdp.base.lease import Lease
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record import names
from raytune_fsdp.record.jsonl import append_event, each_event


def is_of_training(error: TrainingError) -> bool:
    """Return whether training itself has failed, and not something around it, such as storage or another process.

    It raises its error as such. One of another cause is about that: a file that was damaged, a record that cannot be
    kept.
    """
    own = (type(None), torch.OutOfMemoryError, RowError)
    return type(error) is TrainingError and isinstance(error.__cause__, own)


def put_failure(error: TrainingError, place: RunDir, attempt: int, lease: Lease | None) -> None:
    """Put on record how training itself has failed, if it has. What goes wrong with that must not hide the error."""
    if not is_of_training(error) or (lease is not None and lease.lost()):
        return
    with suppress(RaytuneError, OSError):
        known = (
            each["event"] == names.TRAINING_FAILED and each["attempt"] == attempt for each in each_event(place.events)
        )
        if not any(known):  # all ranks diverge together, and one line is enough
            fields = {"rank": dist.get_rank(), "cause": in_one_line(error)}
            append_event(place.events, names.TRAINING_FAILED, attempt=attempt, fields=fields)
