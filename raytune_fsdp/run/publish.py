"""A checkpoint in the form that others use: a Hugging Face model directory with its card, also on the hub if asked."""

from __future__ import annotations

import os
from pathlib import Path

from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, verify
from raytune_fsdp.checkpoint.model_files import model_files
from raytune_fsdp.checkpoint.state import read_state
from raytune_fsdp.checkpoint.weights import CheckpointWeights
from raytune_fsdp.checkpoint.whole import READERS, adapted_network, whole_weights
from raytune_fsdp.config import ExportConfig
from raytune_fsdp.errors import ResumeError
from raytune_fsdp.model.export import export
from raytune_fsdp.model.export_adapter import export_adapter
from raytune_fsdp.report.card import is_of_same_run, model_card
from raytune_fsdp.rundir import is_place_of_exports


def publish(
    checkpoint: CommittedCheckpoint,
    destination: Path,
    chosen: ExportConfig,
    *,
    trust_remote_code: bool = False,
    verified: bool = False,
    base: str | None = None,
) -> str | None:
    """Export to `destination`, then push that under the name `chosen.push`.

    Returns its URL on the hub, None if no name is set. `base`: where the model is now that adapters are beside.
    """
    export_checkpoint(
        checkpoint, destination, chosen, trust_remote_code=trust_remote_code, verified=verified, base=base
    )
    if chosen.push is None:
        return None
    from raytune_fsdp.model.hub import push

    return push(destination, chosen.push, private=chosen.private, message=f"step {checkpoint.step}")


def export_checkpoint(
    checkpoint: CommittedCheckpoint,
    destination: Path,
    chosen: ExportConfig,
    *,
    trust_remote_code: bool = False,
    verified: bool = False,
    base: str | None = None,
) -> None:
    """Write a checkpoint as a model directory, after comparing it with its manifest, unless it is `verified`.

    A run of adapters has those written alone, unless they are to be merged (`export.merge`).
    """
    problem = None if verified else verify(checkpoint, hashes=True, threads=READERS)
    if problem is not None:
        raise ResumeError(f"checkpoint {checkpoint.path} is damaged, so it is not exported: {problem}; use another one")
    files = model_files(checkpoint)
    found = read_state(checkpoint).base
    if found is not None and not chosen.merge:
        export_adapter(
            CheckpointWeights(checkpoint),
            adapted_network(files),
            files,
            destination,
            base=base or found["path"],
            revision=None if base else found["revision"],
            card=model_card(checkpoint, files, dtype="fp32", adapter=True),
        )
        return
    card = model_card(checkpoint, files, dtype=chosen.dtype)
    export(
        whole_weights(checkpoint, files, base),
        files,
        destination,
        dtype=chosen.dtype,
        max_file_bytes=chosen.max_file_bytes,
        card=card,
        trust_remote_code=trust_remote_code,
        adopt=_is_older_export(Path(os.path.realpath(destination)), card),
    )


def _is_older_export(destination: Path, card: str) -> bool:
    """Whether an export of a version that left no mark may have written this: by its place, or by its card's hash."""
    return is_place_of_exports(destination) or is_of_same_run(destination, card)
