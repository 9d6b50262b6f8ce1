"""Everything of a run's state that is not a tensor, as JSON: readable, and safe to read."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any

from raytune_fsdp.base.batch import Cursor
from raytune_fsdp.base.errors import ConfigError, ResumeError, TransientError
from raytune_fsdp.base.untrusted import MAX_VALUES, UnsoundError, check_format, is_count, parse_json, reason, shown
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint
from raytune_fsdp.checkpoint.location import storage_at
from raytune_fsdp.checkpoint.storage import STATE_BYTES, STATE_FILE
from raytune_fsdp.data.mixture import is_known

FORMAT = 1
_MARGIN_BYTES, _MARGIN_VALUES = 1 << 20, 10_000
"""Room for what a state has besides the hashes and names of files."""


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
    kernels: Mapping[str, str] = field(default_factory=dict)
    """What the run computes with, where there is a choice: attention and loss. Older states lack it."""
    newest_order: int | None = None
    """The newest version of the order (data/mixture.py) that there was when the run was begun. Older states lack it."""
    base: Mapping[str, Any] | None = None
    """In a run that trains adapters: where the frozen weights are (`path`, `revision`), size and hash of their `files`,
    and the rows of tokens that were `added` to them. They are in no checkpoint."""
    attempt: int = 0
    world_size: int = 0

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, sort_keys=True)


STATE = "state"
"""The name under which the state counts among the digests of a checkpoint's tensors."""


def digest_of_state(state: RunState) -> str:
    """Return a hash of what decides, besides tensors and the run's identity, how the run goes on."""
    keys = ("step", "samples", "schedule_steps", "skipped_in_row", "loss_scale", "good_steps")
    decides = {**{key: getattr(state, key) for key in keys}, "cursor": asdict(state.cursor)}
    if state.base is not None:  # the frozen weights, wherever they are
        decides["base"] = {key: state.base.get(key) for key in ("files", "added")}
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def check_size(state: RunState) -> None:
    """Refuse, before it is saved, a state that would be refused as too large when it is read."""
    content = state.to_json().encode()
    num_files = sum(len(hashes) for hashes in state.identity.values() if isinstance(hashes, list))
    if len(content) + _MARGIN_BYTES > STATE_BYTES or content.count(b",") + _MARGIN_VALUES > MAX_VALUES:
        raise ConfigError(
            f"data.train has {num_files:,} files, and every checkpoint lists the hash of each, in {STATE_BYTES >> 20} "
            "MiB at most: join them into fewer files"
        )


def read_state(found: CommittedCheckpoint) -> RunState:
    """Return the state in a committed checkpoint."""
    file = f"{found.path}/{STATE_FILE}"
    try:
        content = storage_at(found.root).read(found.name, STATE_FILE, STATE_BYTES)
        values = parse_json(content, constants=True)  # an identity may name an infinity, as some configs do
        if not isinstance(values, dict):
            raise UnsoundError("is not a JSON object")
        check_format(values.pop("format", None))
        # Older versions wrote fewer.
        for key, value in values.items():
            if key not in _RULES:
                raise UnsoundError(f"has the unknown entry {shown(key)}")
            if not _RULES[key](value):
                raise UnsoundError(f"has the {key} {shown(value)}")
        missing = {"step", "samples", "cursor", "identity"} - values.keys()
        if missing:
            raise UnsoundError(f"has no {sorted(missing)[0]}")
        if values["step"] != found.step or values.get("attempt", found.attempt) != found.attempt:
            raise UnsoundError(f"is that of step {values['step']} of attempt {values.get('attempt')}")
        # The names of files are kept along with their hashes, for messages.
        if not all(_is_texts(values["identity"].get(key, [])) for key in values.get("files", {})):
            raise UnsoundError("has files without hashes")
        return RunState(**{**values, "cursor": Cursor(**values["cursor"])})
    except OSError as error:
        raise TransientError(f"{file} could not be read: {error}") from error
    except ValueError as error:
        raise ResumeError(
            f"{file} is not the state of a checkpoint ({reason(error)}); use another checkpoint, or the version that "
            "wrote this one"
        ) from error


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_base(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"path", "revision", "files", "added"}:
        return False
    if not _is_text(value["path"]) or not (value["revision"] is None or _is_text(value["revision"])):
        return False
    rows = partial(_is_map_of, lambda like: isinstance(like, list) and all(map(is_count, like)))
    added = _is_map_of(rows, value["added"]) and all(
        row.isdecimal() for each in value["added"].values() for row in each
    )
    return added and _is_map_of(_is_size_and_hash, value["files"])


def _is_size_and_hash(value: Any) -> bool:
    known = isinstance(value, dict) and value.keys() == {"bytes", "xxh3"}
    return known and is_count(value["bytes"]) and _is_text(value["xxh3"])


def _is_map_of(inner: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, dict) and all(map(inner, value.values()))


_RULES: dict[str, Callable[[Any], bool]] = {
    "step": is_count,
    "samples": is_count,
    "cursor": lambda value: _is_map_of(is_count, value) and value.keys() == {each.name for each in fields(Cursor)},
    "schedule_steps": lambda value: value is None or (is_count(value) and value > 0),
    "skipped_in_row": is_count,
    "loss_scale": lambda value: value is None or (type(value) in (int, float) and 0 < value < math.inf),
    "good_steps": is_count,
    "identity": lambda value: isinstance(value, dict) and all(key.isprintable() for key in value),
    "files": partial(_is_map_of, _is_texts),
    "tracking": partial(_is_map_of, _is_text),
    "kernels": partial(_is_map_of, _is_text),
    "newest_order": lambda value: value is None or is_known(value),
    "base": lambda value: value is None or _is_base(value),
    "attempt": is_count,
    "world_size": is_count,
}
