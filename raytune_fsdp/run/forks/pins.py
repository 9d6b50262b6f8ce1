"""Pins: files in a run's directory that name the checkpoints with which its forks began, so that they stay.

A fork looks for its checkpoint after it has pinned it, and pruning looks for pins after it has hidden a checkpoint and
before it deletes it (`Storage.remove`). So if both happen at once, the fork finds nothing, or pruning finds the pin. A
client of NFS may see either file late; then the fork is refused when its ranks read the checkpoint, or, if it has not
yet saved anything when it is started again, then.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from raytune_fsdp.base.durable import replace_durably
from raytune_fsdp.base.errors import ResumeError
from raytune_fsdp.base.untrusted import UnsoundError, check_format, read_json_object, reason, shown
from raytune_fsdp.checkpoint.location import storage_at
from raytune_fsdp.checkpoint.storage import MANIFEST_FILE, parse_directory_name
from raytune_fsdp.plan.run_dir import PINS, RunDir
from raytune_fsdp.run.forks.parent import Parent, steps_there

logger = logging.getLogger(__name__)

_BYTES, _ENDING = 64 << 10, ".json"
_LOOKS, _LOOK_SECONDS = 10, 0.2
"""A checkpoint that its run has hidden, and not deleted because of the pin, is back at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """What a pin says."""

    child: str
    """The directory of the fork, when it began."""
    checkpoint: str
    """The name of the checkpoint."""


def pin_name(child: Path) -> str:
    """Return what the pin of a fork is called, without its ending."""
    return xxhash.xxh3_128_hexdigest(os.fsencode(child.absolute()))


def pin(child: RunDir, parent: Parent) -> None:
    """Keep the parent's checkpoint from being pruned. ResumeError, and no pin, if that has happened."""
    file = parent.place.pins / f"{pin_name(child.path)}{_ENDING}"
    values = {"format": 1, "child": str(child.path), "checkpoint": parent.checkpoint.name}
    try:
        file.parent.mkdir(exist_ok=True)
        replace_durably(file, json.dumps(values))  # whoever trains the parent must be able to read it
    except OSError as error:
        raise ResumeError(
            f"{file} cannot be written ({error.strerror or error}): without it, {parent.place.path} could prune the "
            "checkpoint that this run begins with; make it writable, or copy that run and name the copy in run.fork.run"
        ) from error
    if not _is_there(parent):
        file.unlink(missing_ok=True)
        raise ResumeError(
            f"run.fork.step={parent.checkpoint.step}: {parent.checkpoint.path} was pruned while this run was prepared; "
            f"{steps_there(parent.place)}"
        )


def look_again(child: RunDir, parent: Parent, problem: str, *, again: bool) -> None:
    """Return if the parent's checkpoint is there, although the ranks have found a problem: pruning hides one for a
    moment before it asks for pins. ResumeError, and no pin, if it is not, or if they have looked `again`."""
    if not again and _is_there(parent):
        return
    with suppress(OSError):
        unpin(parent.place.path, pin_name(child.path))
    raise ResumeError(
        f"run.fork.step={parent.checkpoint.step}: {parent.checkpoint.path} is damaged: {problem}; "
        f"{steps_there(parent.place)}"
    )


def _is_there(parent: Parent) -> bool:
    storage = storage_at(parent.checkpoint.root)
    for look in range(_LOOKS):
        if MANIFEST_FILE in storage.sizes(parent.checkpoint.name):
            return True
        time.sleep(_LOOK_SECONDS * (look < _LOOKS - 1))
    return False


def is_pinned(place: RunDir, checkpoint: str) -> bool:
    """Return whether a fork of the run at this place began with a checkpoint. If a pin cannot be read, it may have."""
    try:
        files = _files(place.path)
    except OSError as error:
        logger.warning("%s cannot be read (%s), so nothing is pruned", place.pins, error.strerror or error)
        return True
    for file in files:
        try:
            if read_pin(file).checkpoint == checkpoint:
                return True
        except FileNotFoundError:  # unpinned meanwhile
            continue
        except (OSError, ValueError) as error:
            logger.warning(
                "%s does not say which checkpoint it keeps (%s), so none is pruned: remove it if no fork needs it",
                file, reason(error),
            )  # fmt: skip
            return True
    return False


def read_pin(file: Path) -> Pin:
    """Return what a pin says. ValueError if it is not one."""
    values = read_json_object(file, limit=_BYTES)
    check_format(values.get("format"))
    child, checkpoint = values.get("child"), values.get("checkpoint")
    if not isinstance(child, str) or not isinstance(checkpoint, str) or parse_directory_name(checkpoint) is None:
        raise UnsoundError(f"names the checkpoint {shown(checkpoint)} and the run {shown(child)}")
    return Pin(child=child, checkpoint=checkpoint)


def pins_of(run: Path) -> Iterator[Pin]:
    """Yield the pins in a run's directory that can be read."""
    for file in _files(run):
        with suppress(OSError, ValueError):
            yield read_pin(file)


def unpin(run: Path, name: str) -> Path | None:
    """Remove the pin of this name from a run's directory, and return its path; None if there is none."""
    file = run / PINS / f"{name}{_ENDING}"
    try:
        file.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return file


def _files(run: Path) -> list[Path]:
    try:
        return sorted(file for file in (run / PINS).iterdir() if file.name.endswith(_ENDING))
    except (FileNotFoundError, NotADirectoryError):
        return []
