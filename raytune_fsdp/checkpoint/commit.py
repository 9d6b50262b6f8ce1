"""The directory of a checkpoint on storage: staged under another name, verified by a manifest, renamed, found, pruned.

Only rank 0 calls what is here, except `hash_files`, which every rank does for the files it has written.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from raytune_fsdp.durable import sync_directory, write_durably
from raytune_fsdp.errors import ResumeError, TrainingError

logger = logging.getLogger(__name__)

MANIFEST_FILE = "manifest.json"
STAGING = ".tmp"
DAMAGED = ".damaged"
_NAME = re.compile(r"step-(\d{8,})\.a(\d+)")
_CHUNK_BYTES = 1 << 24

FileSums = Mapping[str, tuple[int, str]]
"""Size and xxh3 of files, by name."""


@dataclass(frozen=True, slots=True, order=True)
class Found:
    """A committed checkpoint: ordered by step, then by attempt."""

    step: int
    attempt: int
    path: Path


def directory_name(step: int, attempt: int) -> str:
    return f"step-{step:08d}.a{attempt}"


def hash_files(directory: Path, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Size and xxh3_128 of files, read back from storage."""
    sums = {}
    for name in names:
        digest = xxhash.xxh3_128()
        with open(directory / name, "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
            sums[name] = (file.tell(), digest.hexdigest())
    return sums


def commit(staging: Path, final: Path, sums: FileSums) -> int:
    """Make a staged checkpoint visible, and say how many bytes it has. After the rename it is there for good."""
    files = {name: {"bytes": size, "xxh3": digest} for name, (size, digest) in sorted(sums.items())}
    present = {entry.name for entry in staging.iterdir()}
    if present != set(files):
        raise TrainingError(
            f"{staging} holds {sorted(present)} but {sorted(files)} were written; "
            "is another process writing to this run's storage?"
        )
    manifest = staging / MANIFEST_FILE
    write_durably(manifest, json.dumps({"format": 1, "files": files}, indent=1))
    sync_directory(staging)
    staging.rename(final)
    sync_directory(final.parent)
    return sum(size for size, _ in sums.values())


def committed(directory: Path) -> list[Found]:
    """All committed checkpoints below `directory`, oldest first."""
    if not directory.is_dir():
        return []
    found = []
    for entry in os.scandir(directory):
        match = _NAME.fullmatch(entry.name)
        if match and os.path.exists(os.path.join(entry.path, MANIFEST_FILE)):
            found.append(Found(int(match[1]), int(match[2]), Path(entry.path)))
    return sorted(found)


def newest(directory: Path) -> Found | None:
    """The newest checkpoint whose files are what the manifest says; None where there never was one.

    Checkpoints that are there and all damaged are an error: starting anew would throw away the run.
    """
    problems = []
    for found in reversed(committed(directory)):
        problem = verify(found.path)
        if problem is None:
            return found
        problems.append(f"{found.path.name}: {problem}")
        logger.warning("checkpoint %s is damaged (%s); looking for an older one", found.path, problem)
    if problems:
        raise ResumeError(
            f"{directory}: every checkpoint is damaged ({'; '.join(problems)}): restore one of them, or move the "
            "directory away to start anew"
        )
    return None


def set_aside_newer(directory: Path, chosen: Found) -> list[Path]:
    """Take damaged checkpoints behind the chosen one out of the way: pruning, by step, would keep them instead."""
    aside = []
    for found in committed(directory):
        if found > chosen:
            target = found.path.with_name(found.path.name + DAMAGED)
            found.path.rename(target)
            aside.append(target)
    return aside


def verify(checkpoint: Path) -> str | None:
    """What is wrong with a committed checkpoint, None if nothing: sizes and hashes of all files."""
    try:
        files = json.loads((checkpoint / MANIFEST_FILE).read_text())["files"]
        for name, wanted in files.items():
            size = (checkpoint / name).stat().st_size
            if size != wanted["bytes"]:
                return f"{name} has {size} bytes instead of {wanted['bytes']}"
        for name, (_, digest) in hash_files(checkpoint, files).items():
            if digest != files[name]["xxh3"]:
                return f"the content of {name} is not what was written"
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    except OSError as error:  # storage that cannot be read now may be read later: no verdict on the checkpoint
        raise ResumeError(f"{checkpoint} cannot be read: {error}; try again when the storage answers") from error
    return None


def remove_staging(directory: Path) -> None:
    """Remove what earlier attempts left behind, unfinished."""
    if directory.is_dir():
        for entry in directory.iterdir():
            if entry.name.endswith(STAGING):
                shutil.rmtree(entry, ignore_errors=True)


def prune(directory: Path, keep_last: int) -> None:
    """Delete all but the newest checkpoints. Renamed first: a half-deleted one must not be taken for a checkpoint."""
    for found in committed(directory)[:-keep_last]:
        doomed = found.path.with_name(found.path.name + STAGING)
        found.path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
