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
_VERSIONS = {"data.order_version": "the order of samples", "data.document_version": "the tokens of documents"}


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


def check_identity(saved: RunState, now: Mapping[str, Any], where: str, files: Mapping[str, Sequence[str]]) -> None:
    """Refuse to continue a run as another one, naming every difference. `files`: the current ones, as in RunState."""
    before = saved.identity
    for key, what in _VERSIONS.items():
        if before.get(key) != now.get(key):
            raise ResumeError(
                f"{where}: this run was begun with version {before.get(key, 1)} of {what}, and this raytune_fsdp makes "
                f"version {now.get(key)}: it would continue on other samples. Continue it with the version of "
                "raytune_fsdp that began it, or start anew under another run.name"
            )
    differences = [
        f"{key}: {_changed_files(before.get(key), now.get(key), saved.files[key], files[key])}"
        if key in saved.files and key in files
        else f"{key}: was {before.get(key, 'not set')!r}, is {now.get(key, 'not set')!r}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]
    if differences:
        raise ResumeError(
            f"{where} was trained with other settings: continuing it would be neither the old run nor a new one; "
            "set these back, or choose another run.name:\n  " + "\n  ".join(differences)
        )


def _changed_files(
    before: Sequence[str] | None, now: Sequence[str] | None, old_names: Sequence[str], new_names: Sequence[str]
) -> str:
    """Which files were added, removed or changed."""
    old, new = dict(zip(old_names, before or (), strict=False)), dict(zip(new_names, now or (), strict=False))
    found = {
        "changed": [name for name in new if name in old and old[name] != new[name]],
        "removed": [name for name in old if name not in new and old[name] not in new.values()],
        "added": [name for name in new if name not in old and new[name] not in old.values()],
    }
    words = [f"{what} {_some(names)}" for what, names in found.items() if names]
    return "; ".join(words) or "the same files in another order"


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + rest
