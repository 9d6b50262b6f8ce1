"""Repair Ray Train's own list of checkpoints, which must not keep a run from continuing.

Ray keeps `checkpoint_manager_snapshot.json` in the run directory and reads it when `fit()` starts. It is written in
place, so a crash can truncate it, and it still names checkpoints that we have pruned since: on either `fit()` fails at
once. Our manifests decide where a run continues; here the list is only made readable for Ray. Needs no Ray: its schema
is repeated below, as Ray checks it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveFloat, ValidationError, model_validator

from raytune_fsdp.base.durable import replace_durably, sync_directory
from raytune_fsdp.base.errors import ResumeError, in_one_line
from raytune_fsdp.checkpoint.catalogue import committed
from raytune_fsdp.checkpoint.storage import DAMAGED
from raytune_fsdp.plan.run_dir import CHECKPOINTS

SNAPSHOT_FILE = "checkpoint_manager_snapshot.json"


def repair_registry(run_dir: Path) -> str | None:
    """Make Ray's list readable before every `fit()`. Return what was done if the list was broken, else None.

    Dropping pruned checkpoints from it is normal, and not reported.
    """
    path = run_dir / SNAPSHOT_FILE
    try:
        if not path.exists():
            return None
        try:
            if not path.is_file():
                raise ValueError("not a file")
            snapshot = _Snapshot.model_validate(json.loads(path.read_bytes().decode("utf-8")))
            snapshot.model_dump_json()  # Ray writes it again at the next checkpoint, and would fail there
        except (OSError, ValueError, RecursionError) as error:
            return _set_aside(path, error)
        there = committed(str(run_dir / CHECKPOINTS))
        kept = _only(snapshot, {f"{CHECKPOINTS}/{found.name}" for found in there})
        if kept != snapshot:
            replace_durably(path, kept.model_dump_json())
    except OSError as error:
        raise ResumeError(
            f"{path}: Ray's list of checkpoints cannot be repaired: {error}; make {run_dir} writable, or remove the "
            "file: the run continues without it"
        ) from error
    return None


class _AsRayHasIt(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Result(_AsRayHasIt):
    version: int = 0
    checkpoint_dir_name: str
    """A path relative to the run directory."""
    metrics: dict[Any, Any]


class _Validation(_AsRayHasIt):
    fn_kwargs: dict[str, Any] | None = None
    timeout_s: PositiveFloat | None = None


class _Snapshot(_AsRayHasIt):
    """Ray's `_CheckpointManagerState`, with what Ray assumes of it."""

    ray_version: str = ""
    checkpoint_results: list[_Result]
    checkpoint_report_indices: list[int]
    latest_checkpoint_result: _Result | None = None
    pending_training_results: list[_Result]
    pending_validation_specs: list[bool | _Validation]
    current_report_index: int
    validated_checkpoint_dir_names: list[str]
    timed_out_validation_checkpoint_dir_names: list[str]
    failed_validation_checkpoint_dir_names: list[str]

    @model_validator(mode="after")
    def _lists_agree(self) -> _Snapshot:
        if len(self.checkpoint_results) != len(self.checkpoint_report_indices):
            raise ValueError("checkpoint_results and checkpoint_report_indices differ in length")
        if len(self.pending_training_results) != len(self.pending_validation_specs):
            raise ValueError("pending_training_results and pending_validation_specs differ in length")
        names = {result.checkpoint_dir_name for result in self.checkpoint_results}
        latest = [self.latest_checkpoint_result] if self.latest_checkpoint_result else []
        for result in [*latest, *self.pending_training_results]:
            if result.checkpoint_dir_name not in names:
                raise ValueError(f"{result.checkpoint_dir_name} is not among checkpoint_results")
        return self


def _only(snapshot: _Snapshot, names: set[str]) -> _Snapshot:
    """Return the snapshot without checkpoints other than these."""
    kept = [
        (result, index)
        for result, index in zip(snapshot.checkpoint_results, snapshot.checkpoint_report_indices, strict=True)
        if result.checkpoint_dir_name in names
    ]
    pending = [
        (result, spec)
        for result, spec in zip(snapshot.pending_training_results, snapshot.pending_validation_specs, strict=True)
        if result.checkpoint_dir_name in names
    ]
    latest = snapshot.latest_checkpoint_result
    if latest is not None and latest.checkpoint_dir_name not in names:
        latest = max(kept, key=lambda row: row[1])[0] if kept else None
    update: dict[str, Any] = {
        "checkpoint_results": [result for result, _ in kept],
        "checkpoint_report_indices": [index for _, index in kept],
        "latest_checkpoint_result": latest,
        "pending_training_results": [result for result, _ in pending],
        "pending_validation_specs": [spec for _, spec in pending],
    }
    for outcome in ("validated", "timed_out_validation", "failed_validation"):
        field = f"{outcome}_checkpoint_dir_names"
        update[field] = [name for name in getattr(snapshot, field) if name in names]
    return snapshot.model_copy(update=update)


def _set_aside(path: Path, error: Exception) -> str:
    aside, number = path.with_name(path.name + DAMAGED), 1
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"{path.name}{DAMAGED}.{number}")
    path.rename(aside)
    sync_directory(path.parent)
    why = str(error) if type(error) is ValueError else in_one_line(error)  # a bare ValueError is our own
    if isinstance(error, ValidationError):  # several lines, with links: only the first field and its problem
        first = error.errors()[0]
        why = ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))
    return (
        f"Ray's list of checkpoints could not be read ({why}), so {path.name} was moved to {aside.name}; the "
        "run's own manifests decide where it continues"
    )
