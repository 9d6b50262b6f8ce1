"""Compute the digest of the numbers in a checkpoint or a model: equal however many ranks wrote them, into which files.

A manifest has the hashes of files, which depend on who wrote which rows. base/row_hashes.py hashes rows.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from raytune_fsdp.base.errors import ResumeError
from raytune_fsdp.base.untrusted import reason
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint
from raytune_fsdp.checkpoint.contents import roots_of
from raytune_fsdp.checkpoint.location import storage_at
from raytune_fsdp.checkpoint.manifest import read_manifest
from raytune_fsdp.checkpoint.state import STATE, digest_of_state, read_state
from raytune_fsdp.checkpoint.weights import CheckpointWeights
from raytune_fsdp.model.directory.files import find_weights
from raytune_fsdp.model.export.adapter import WEIGHTS_FILE
from raytune_fsdp.model.weights.digests import digests_of
from raytune_fsdp.model.weights.source import FileWeights


def digests_of_checkpoint(found: CommittedCheckpoint) -> dict[str, str]:
    """Return the digest of each tensor of a checkpoint, and that of the state which decides what follows.

    Raise an error if its manifest has another one: the ranks hashed what they had, before it was written.
    """
    digests = {**digests_of(CheckpointWeights(found, "")), STATE: digest_of_state(read_state(found))}
    try:
        recorded = read_manifest(storage_at(found.root), found.name).digest
    except (OSError, ValueError) as error:
        raise ResumeError(f"{found.path}: its manifest is not what was written: {reason(error)}") from error
    here = asdict(roots_of(digests))
    for what, digest in recorded.items():
        if digest != here[what]:
            raise ResumeError(
                f"{found.path} has other numbers than the ranks had: the digest of its {what} is {here[what]}, and "
                f"{digest} in its manifest; take another checkpoint"
            )
    return digests


def digests_of_model(directory: Path) -> dict[str, str]:
    """Return the digest of each tensor in a model directory's files."""
    files = find_weights(directory, "adapter_model" if (directory / WEIGHTS_FILE).is_file() else "model")
    return digests_of(FileWeights(files, {key: key for key in files.file_of}))
