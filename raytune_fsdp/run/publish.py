"""A checkpoint in the form that others use: a Hugging Face model directory with its card, also on the hub if asked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, committed, verify
from raytune_fsdp.checkpoint.model_files import model_files
from raytune_fsdp.checkpoint.state import RunState, read_state
from raytune_fsdp.checkpoint.tensors import INITIAL
from raytune_fsdp.checkpoint.weights import CheckpointWeights
from raytune_fsdp.checkpoint.whole import base_of, check_rows_stored, named_class, saved_network, whole_weights
from raytune_fsdp.config import ExportConfig
from raytune_fsdp.errors import ResumeError
from raytune_fsdp.model.export import export
from raytune_fsdp.model.export_adapter import check_found_by_others, export_adapter
from raytune_fsdp.model.mean import MeanTensors
from raytune_fsdp.report.card import is_of_same_run, model_card
from raytune_fsdp.rundir import checkpoints_below, checkpoints_of, is_place_of_exports
from raytune_fsdp.threads import READERS
from raytune_fsdp.urls import is_url

_AVERAGED = 3
"""How many checkpoints a mean is of, if nobody says."""


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
    beside = read_state(checkpoint).base
    if chosen.push is not None and beside is not None and not chosen.merge:
        check_found_by_others(base or beside["path"], chosen.push)
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
    if not verified:
        _check_whole(checkpoint)
    files = model_files(checkpoint)
    found = read_state(checkpoint).base
    if found is not None and not chosen.merge:
        check_rows_stored(checkpoint, files, base)
        export_adapter(
            CheckpointWeights(checkpoint),
            CheckpointWeights(checkpoint, INITIAL),
            saved_network(checkpoint, files),
            named_class(files, base or found["path"], None if base else found["revision"]),
            files,
            destination,
            base=base or found["path"],
            revision=None if base else found["revision"],
            card=model_card(checkpoint, files, dtype="fp32", adapter=True),
        )
        return
    card = model_card(checkpoint, files, dtype=chosen.dtype)
    export(
        whole_weights(checkpoint, files, base_of(checkpoint, base)),
        files,
        destination,
        dtype=chosen.dtype,
        max_file_bytes=chosen.max_file_bytes,
        card=card,
        trust_remote_code=trust_remote_code,
        adopt=_is_older_export(Path(os.path.realpath(destination)), read_state(checkpoint)),
    )


def checkpoints_to_average(run: str, *, steps: Sequence[int] | None, last: int | None) -> list[CommittedCheckpoint]:
    """The checkpoints of a run of these `steps`, or the `last` ones, oldest first, all of them whole.

    Without steps and a number the last three, or both where there are two. Where two attempts have saved a step, the
    later one counts.
    """
    root = checkpoints_below(run) if is_url(run) else checkpoints_of(Path(run).resolve())
    there = {found.step: found for found in committed(root)}
    missing = [step for step in steps or () if step not in there]
    if missing or not there:
        has = f"it has {', '.join(map(str, there))}" if there else "it has none"
        what = f"no checkpoint of step {missing[0]}" if missing else "no checkpoint"
        raise ResumeError(f"{run} has {what} ({has}): name a run, and steps that it has")
    chosen = [there[step] for step in (sorted(set(steps)) if steps else sorted(there)[-(last or _AVERAGED) :])]
    if len(chosen) < 2:
        raise ResumeError(f"{run} has only the checkpoint of step {chosen[0].step}: the mean of one is an export of it")
    if last is not None and len(chosen) < last:
        raise ResumeError(
            f"--last {last}: {run} has only {len(there)} checkpoints, from step {min(there)} to step {max(there)}: use "
            f"--last {len(there)}"
        )
    for found in chosen:
        _check_whole(found)
    return chosen


def average(
    checkpoints: Sequence[CommittedCheckpoint],
    destination: Path,
    chosen: ExportConfig,
    *,
    trust_remote_code: bool = False,
    base: str | None = None,
) -> None:
    """Write the mean of checkpoints of one run, oldest first, as a model directory; adapters are merged before."""
    newest = checkpoints[-1]
    files, beside = model_files(newest), base_of(newest, base)  # one base for all: a run goes on beside no other
    card = model_card(newest, files, dtype=chosen.dtype, mean_of=[found.step for found in checkpoints])
    export(
        MeanTensors([whole_weights(found, files, beside) for found in checkpoints]),
        files,
        destination,
        dtype=chosen.dtype,
        max_file_bytes=chosen.max_file_bytes,
        card=card,
        trust_remote_code=trust_remote_code,
    )


def _check_whole(checkpoint: CommittedCheckpoint) -> None:
    problem = verify(checkpoint, hashes=True, threads=READERS)
    if problem is not None:
        raise ResumeError(f"checkpoint {checkpoint.path} is damaged, so it is not exported: {problem}; use another one")


def _is_older_export(destination: Path, state: RunState) -> bool:
    """Whether an export of a version that left no mark may have written this: by its place, or by its card's hash."""
    return is_place_of_exports(destination) or is_of_same_run(destination, state)
