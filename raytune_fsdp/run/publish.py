"""Write a checkpoint in the form that others use: a Hugging Face model directory with its card, on the hub if asked."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from raytune_fsdp.base.beat import beat
from raytune_fsdp.base.errors import RaytuneError, ResumeError
from raytune_fsdp.base.row_hashes import root
from raytune_fsdp.base.threads import READERS
from raytune_fsdp.base.urls import is_url
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, committed, verify
from raytune_fsdp.checkpoint.contents import INITIAL, MODEL
from raytune_fsdp.checkpoint.form import WrittenAs, sees, written_of
from raytune_fsdp.checkpoint.merged import base_of, check_rows_stored, merged_weights, named_class, saved_network
from raytune_fsdp.checkpoint.model_files import model_files
from raytune_fsdp.checkpoint.state import read_state
from raytune_fsdp.checkpoint.weights import CheckpointWeights
from raytune_fsdp.config import ExportConfig
from raytune_fsdp.model.directory.files import WeightFiles
from raytune_fsdp.model.directory.named_class import NamedClass
from raytune_fsdp.model.export.adapter import check_found_by_others, export_adapter, stored_adapter
from raytune_fsdp.model.export.write import MeanTensors, export, stored_model
from raytune_fsdp.model.weights.digests import digests_of
from raytune_fsdp.plan.run_dir import EVENTS_FILE, checkpoints_below, checkpoints_of, is_place_of_exports
from raytune_fsdp.record import names
from raytune_fsdp.record.console import event_in_words
from raytune_fsdp.record.jsonl import append_event
from raytune_fsdp.record.report.card import is_of_same_run, model_card, with_digest
from raytune_fsdp.run.trials.export_proof import check_acts

logger = logging.getLogger(__name__)

_AVERAGED = 3
"""How many checkpoints are averaged, if nobody says."""


def publish(
    checkpoint: CommittedCheckpoint,
    destination: Path,
    chosen: ExportConfig,
    *,
    trust_remote_code: bool = False,
    verified: bool = False,
    base: str | None = None,
    events: Path | None = None,
) -> str | None:
    """Export to `destination`, then push that under the name `chosen.push`.

    Return its URL on the hub; None if no name is set. `base`: where the base of the adapters is now, or the model that
    a run of all weights began with. `events`: the run's events, if they are not next to its checkpoints.
    """
    found = read_state(checkpoint).base
    if chosen.push is not None and found is not None and not chosen.merge:
        check_found_by_others(base or found["path"], chosen.push)
    export_checkpoint(
        checkpoint, destination, chosen,
        trust_remote_code=trust_remote_code, verified=verified, base=base, events=events,
    )  # fmt: skip
    if chosen.push is None:
        return None
    from raytune_fsdp.model.directory.hub_push import push

    return push(destination, chosen.push, private=chosen.private, message=f"step {checkpoint.step}")


def export_checkpoint(
    checkpoint: CommittedCheckpoint,
    destination: Path,
    chosen: ExportConfig,
    *,
    trust_remote_code: bool = False,
    verified: bool = False,
    base: str | None = None,
    events: Path | None = None,
) -> None:
    """Write a checkpoint as a model directory, after comparing it with its manifest, unless it is `verified`.

    The adapters of a run are written alone, unless they are to be merged (`export.merge`).
    """
    if not verified:
        _check_whole(checkpoint)
    files = model_files(checkpoint)
    found = read_state(checkpoint).base
    if found is not None and not chosen.merge:
        network, named = _adapted(checkpoint, files, base)
        # The class that an adapter's names belong to, if that is not the run's own.
        kind, sentence = type(named.network).__name__, None
        if named.unbuilt is not None:
            sentence = f"Its names are those of a `{kind}`, the language model alone: load it on top of that one."
        elif not named.is_own and named.outputs is None:
            known = "the class that the base's config names"
            sentence = f"Its names are those of a `{kind}`, {known}: load it on top of that one."
        export_adapter(
            CheckpointWeights(checkpoint),
            CheckpointWeights(checkpoint, INITIAL),
            network,
            named,
            files,
            destination,
            base=base or found["path"],
            revision=None if base else found["revision"],
            card=partial(with_digest, model_card(checkpoint, files, dtype="fp32", adapter=True, sentence=sentence)),
            prove=partial(check_acts, network=network, named=named),
        )
        return
    written = _whole(checkpoint, files, base)
    card = model_card(checkpoint, files, dtype=chosen.dtype, sentence=written.sentence)
    merged = None if found is None else digest_of_weights(checkpoint)
    # An export by a version that left no mark is known by its place, or by its card's hash.
    place, state = Path(os.path.realpath(destination)), read_state(checkpoint)
    export(
        written.source,
        files,
        destination,
        dtype=chosen.dtype,
        max_file_bytes=chosen.max_file_bytes,
        card=partial(with_digest, card, merged=merged),
        form=written.form,
        trust_remote_code=trust_remote_code,
        adopt=is_place_of_exports(place) or is_of_same_run(place, state),
    )
    _say_alone(checkpoint, written, destination, events)


def digests_as_export(
    checkpoint: CommittedCheckpoint, chosen: ExportConfig, *, base: str | None = None
) -> dict[str, str]:
    """Return the digest of each tensor that `export_checkpoint` would write, without writing it."""
    files, digests = model_files(checkpoint), dict[str, str]()
    if read_state(checkpoint).base is not None and not chosen.merge:
        network, named = _adapted(checkpoint, files, base)
        adapter, initial = CheckpointWeights(checkpoint), CheckpointWeights(checkpoint, INITIAL)
        stored = stored_adapter(adapter, initial, network, named)
    else:
        written = _whole(checkpoint, files, base)
        stored = stored_model(written.source, files, dtype=chosen.dtype, form=written.form)
    for _, tensor in stored.each(digests):
        del tensor
        beat()
    return digests


def digest_of_weights(checkpoint: CommittedCheckpoint) -> str:
    """Return the digest of a checkpoint's weights, as the ranks of an exact run put it into its manifest."""
    return root(digests_of(CheckpointWeights(checkpoint), MODEL))


def _adapted(checkpoint: CommittedCheckpoint, files: Path, base: str | None) -> tuple[PreTrainedModel, NamedClass]:
    """Return the network of a checkpoint of adapters, and the class whose names an export of them alone has."""
    found = read_state(checkpoint).base
    assert found is not None, f"{checkpoint.path} holds no adapters"
    check_rows_stored(checkpoint, files, base)
    named = named_class(files, base or found["path"], None if base else found["revision"])
    return saved_network(checkpoint, files), named


def _whole(checkpoint: CommittedCheckpoint, files: Path, base: str | None) -> WrittenAs:
    """Return what is written of a checkpoint as a whole model: adapters are merged."""
    moved, frozen = _bases(checkpoint, files, base)
    source = merged_weights(checkpoint, files, frozen)
    return written_of(checkpoint, files, source, base_files=frozen, moved=moved)


def checkpoints_to_average(run: str, *, steps: Sequence[int] | None, last: int | None) -> list[CommittedCheckpoint]:
    """Return the checkpoints of a run of these `steps`, or the `last` ones, oldest first, all of them whole.

    Without steps and a number, these are the last three, or both where there are two. Where two attempts have saved a
    step, the later one counts.
    """
    if not is_url(run) and not Path(run).exists():
        raise ResumeError(f"{run} does not exist; name a run, <run.storage>/<run.name>")
    root = checkpoints_below(run) if is_url(run) else checkpoints_of(Path(run).resolve())
    # Of recovery points, only those that are named: the clock must not choose what a mean is of.
    there = {found.step: found for found in committed(root) if found.lasting or found.step in (steps or ())}
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
    """Write the mean of checkpoints of one run, oldest first, as a model directory. Adapters are merged before."""
    newest = checkpoints[-1]
    files = model_files(newest)
    moved, frozen = _bases(newest, files, base)  # one for all: a run never changes its base
    mean = MeanTensors([merged_weights(found, files, frozen) for found in checkpoints])
    written = written_of(newest, files, mean, base_files=frozen, moved=moved)
    steps = [found.step for found in checkpoints]
    card = model_card(newest, files, dtype=chosen.dtype, mean_of=steps, sentence=written.sentence)
    export(
        written.source,
        files,
        destination,
        dtype=chosen.dtype,
        max_file_bytes=chosen.max_file_bytes,
        card=partial(with_digest, card, mean=True),
        form=written.form,
        trust_remote_code=trust_remote_code,
    )
    _say_alone(newest, written, destination, None)


def _bases(checkpoint: CommittedCheckpoint, files: Path, base: str | None) -> tuple[str | None, WeightFiles | None]:
    """Return where the user says that a run of all weights has its base, or else the files of the adapters' base."""
    if base is not None and read_state(checkpoint).base is None and sees(files):
        return base, None
    return None, base_of(checkpoint, base)


def _say_alone(checkpoint: CommittedCheckpoint, written: WrittenAs, destination: Path, events: Path | None) -> None:
    """Warn, and note among the run's events, that an export has the language model alone."""
    if written.alone is None or written.form is None:
        return
    fields = {"step": checkpoint.step, "path": str(destination), "model": type(written.form.network).__name__,
              "because": written.alone}  # fmt: skip
    logger.warning(event_in_words(names.EXPORTED_ALONE, fields))
    if events is None and not is_url(checkpoint.root):
        events = Path(checkpoint.root).parent / EVENTS_FILE
    if events is not None and events.is_file():
        with suppress(RaytuneError):  # somebody else's run
            append_event(events, names.EXPORTED_ALONE, attempt=read_state(checkpoint).attempt, fields=fields)


def _check_whole(checkpoint: CommittedCheckpoint) -> None:
    problem = verify(checkpoint, hashes=True, threads=READERS)
    if problem is not None:
        raise ResumeError(f"checkpoint {checkpoint.path} is damaged, so it is not exported: {problem}; use another one")
