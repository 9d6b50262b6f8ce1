"""Everything of a run's state that is not a tensor, as JSON: readable, and safe to read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint
from raytune_fsdp.checkpoint.location import storage_at
from raytune_fsdp.checkpoint.storage import STATE_FILE
from raytune_fsdp.errors import ResumeError
from raytune_fsdp.types import Cursor

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run stands after a step."""

    step: int = 0
    samples: int = 0
    """Packed samples consumed so far; not a multiple of the global batch if the last step was short."""
    cursor: Cursor = field(default_factory=Cursor)
    schedule_steps: int | None = None
    """The length over which the learning-rate schedule was planned."""
    skipped_in_row: int = 0
    """Updates skipped in a row up to this step."""
    loss_scale: float | None = None
    good_steps: int = 0
    identity: Mapping[str, Any] = field(default_factory=dict)
    """What decides the trajectory: a run continues only with the same identity."""
    files: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of the files whose hashes are in `identity`, by its keys. Only for messages."""
    tracking: Mapping[str, str] = field(default_factory=dict)
    attempt: int = 0
    world_size: int = 0

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, sort_keys=True)


def read_state(found: CommittedCheckpoint) -> RunState:
    """The state in a committed checkpoint."""
    values = json.loads(storage_at(found.root).read(found.name, STATE_FILE))
    version = values.pop("format")
    if version != FORMAT:
        raise ResumeError(
            f"{found.path} has checkpoint format {version}, but this version reads format {FORMAT}: use the "
            "version that wrote it"
        )
    values["cursor"] = Cursor(**values["cursor"])
    return RunState(**values)
