"""What a run writes about itself: its directory, its attempts, and the trackers that follow them."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

import torch
import torch.distributed as dist

from raytune_fsdp.base.batch import Progress
from raytune_fsdp.base.collectives import on_all_ranks
from raytune_fsdp.base.durable import replace_durably, take_from_others, update_durably
from raytune_fsdp.base.errors import RaytuneError, in_one_line, pip_install
from raytune_fsdp.base.mark import MOST_BYTES, with_mark
from raytune_fsdp.base.redaction import redact, redact_text
from raytune_fsdp.base.untrusted import read_file
from raytune_fsdp.checkpoint.catalogue import set_aside
from raytune_fsdp.checkpoint.form import began_with
from raytune_fsdp.checkpoint.location import storage_at
from raytune_fsdp.checkpoint.model_files import put_model_files
from raytune_fsdp.config import FinetuneConfig, HeldOutConfig
from raytune_fsdp.config.load import recorded_text
from raytune_fsdp.config.recorded import differing, recorded
from raytune_fsdp.config.sections.method import AdapterMethod
from raytune_fsdp.config.text import dump
from raytune_fsdp.data.census import events_of_rows
from raytune_fsdp.data.duplicates import left_out_of
from raytune_fsdp.data.open import HELD_OUT
from raytune_fsdp.model.adapters.config_file import put_adapter_config
from raytune_fsdp.model.attention.choose import KernelChoice
from raytune_fsdp.model.directory.files import WeightFiles, commit_of
from raytune_fsdp.model.network import build_network
from raytune_fsdp.plan.run_dir import MARK_FILE, RECIPE_FILE, RunDir, mlflow_database
from raytune_fsdp.record import names
from raytune_fsdp.record.console import ConsoleTracker, event_in_words
from raytune_fsdp.record.copies.following import Follower
from raytune_fsdp.record.copies.mlflow import MlflowTracker, mlflow_installed
from raytune_fsdp.record.copies.mlflow_model import register
from raytune_fsdp.record.copies.tensorboard import TensorboardTracker
from raytune_fsdp.record.copies.wandb import WandbTracker
from raytune_fsdp.record.jsonl import JsonlTracker, append_event, read_events, repair_event, steps_after
from raytune_fsdp.record.lineage import known_lineage, put_lineage
from raytune_fsdp.record.repair import is_whole, truncate
from raytune_fsdp.record.report.card import recipe_of
from raytune_fsdp.record.report.history import data_of
from raytune_fsdp.record.tracker import Composite, RunStart, Tracker, flatten
from raytune_fsdp.run.described import (
    BITS,
    bits_digest,
    computed_on,
    used_data,
    versions,
    why_bits_changed,
    why_bits_differ,
    why_bits_differed,
)
from raytune_fsdp.run.evaluation.owed import described, evaluation_of_run
from raytune_fsdp.run.forks.parent import lineage_of
from raytune_fsdp.run.forks.pins import is_pinned
from raytune_fsdp.run.resume import changed_settings, last_config
from raytune_fsdp.run.resume_point import ResumePoint, RunInputs
from raytune_fsdp.run.saving import lost_seconds, uncommitted_seconds

logger = logging.getLogger(__name__)

RANKS_WAIT_SECONDS = 30.0
"""How long rank 0 waits for MLflow after its last step, while all ranks hold their devices; it stops after five tries
that have failed. The command waits longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What was found when the run's directory was opened."""

    changed: Mapping[str, list[Any]]
    """The old and the new value of each setting that differs from the last attempt."""
    aside: Sequence[Mapping[str, str]]
    """The damaged checkpoints that were set aside: path, problem, and where each is now."""
    lost: float
    """Seconds that earlier attempts have trained since the checkpoint from which this one continues."""
    cut: Sequence[Mapping[str, Any]]
    """What is on record of the steps after that checkpoint, by attempt; they are removed from it."""
    uncommitted: float
    """Seconds that they have trained since the newest checkpoint that outlives the command."""


def open_run(config: FinetuneConfig, prepared: RunInputs, standing: ResumePoint) -> Opened:
    """Write the files that describe the run, and remove what earlier attempts left unfinished. Call on rank 0.

    Raises, and changes nothing, if another command has taken over the run.
    """
    place = prepared.place
    if prepared.lease is not None:
        prepared.lease.check()  # a newcomer may be writing the draft that would be removed here
    place.path.mkdir(parents=True, exist_ok=True)
    keep_from_others(place)
    cut = steps_after(place.metrics, standing.state.step)
    changed, lost = changed_settings(place, config), lost_seconds(place, standing.state.step, cut)
    uncommitted = uncommitted_seconds(place, standing, lost, cut) if standing.from_peers else lost
    # Before the first save of this attempt: nothing else is being written.
    storage_at(place.checkpoints).clean(partial(is_pinned, place))
    goes_on = standing.commit is not None or standing.from_peers
    renamed = set_aside(standing.damaged, place.checkpoints, standing.commit) if goes_on else []
    aside = [{"path": found.path, "problem": standing.damaged[found], "now": now} for found, now in renamed]
    if standing.begins:  # the evaluations of checkpoints that are gone
        place.evaluations.unlink(missing_ok=True)
    if config.run.fork is None:  # of a run that was here before
        place.lineage.unlink(missing_ok=True)
    elif standing.parent is not None:
        put_lineage(place.path, lineage_of(config, standing.parent, standing.state, prepared.identity))
    replace_durably(place.config, recorded_text(config), private=True)
    if config.checkpoint.storage is not None:
        replace_durably(place.checkpoints_at, place.checkpoints, private=True)
    replace_durably(place.plan, json.dumps(_plan_in_full(prepared, standing), indent=1), private=True)
    if prepared.census is not None:
        replace_durably(place.data, data_of(prepared.census), private=True)
    _put_model(config, prepared)
    shown, commit = redact(config.model_dump(mode="json")), _commit_of_model(config, prepared, standing)
    lineage = known_lineage(place.path)
    recipe = recipe_of(shown, versions(), place.path, prepared.parameters, commit, lineage)
    replace_durably(place.model_files / RECIPE_FILE, recipe, private=True)
    put_mark(prepared)
    if prepared.started_by:
        append_event(place.attempts, names.STARTED_BY, attempt=standing.attempt, fields=prepared.started_by)
    put_model_files(place.model_files, place.checkpoints)
    return Opened(changed=changed, aside=aside, lost=lost, cut=cut, uncommitted=uncommitted)


def _put_model(config: FinetuneConfig, prepared: RunInputs) -> None:
    """Write config and tokenizer into the run's `model/`, file by file, each as a whole.

    The next start may read them there, and so may a fork at any time, but this process may be killed at any time.
    """
    with TemporaryDirectory() as directory:
        made = Path(directory)
        prepared.hf_config.save_pretrained(made)
        prepared.tokenizer.save_pretrained(made)
        for name, text in prepared.code.items():
            if not (made / name).exists():  # transformers writes the code of the config and of the tokenizer only
                (made / name).write_bytes(text)
        if isinstance(config.method, AdapterMethod):
            network = build_network(copy.deepcopy(prepared.hf_config), config, adapted=prepared.adapted)
            put_adapter_config(network, made)
        if prepared.generation_config is not None:
            # Not save_pretrained: it refuses combinations of settings that well-known models ship with.
            prepared.generation_config.to_json_file(made / "generation_config.json")
        for file in sorted(each for each in made.rglob("*") if each.is_file()):
            update_durably(prepared.place.model_files / file.relative_to(made), file.read_bytes())


def _commit_of_model(config: FinetuneConfig, prepared: RunInputs, standing: ResumePoint) -> str | None:
    """Return the hub commit of the model that the run began with; None if it is not from the hub, or is not known."""
    if standing.checkpoint is None:
        stored = None if prepared.origin is None else prepared.origin.stored
        return commit_of(stored.directory) if isinstance(stored, WeightFiles) else None
    with suppress(RaytuneError):
        files = (prepared if standing.parent is None else standing.parent).place.model_files
        path, revision, _ = began_with(files)
        return revision if path == config.model.path else None
    return None


def put_mark(prepared: RunInputs) -> None:
    """Mark the places that the config names as chosen by the user of this command."""
    file = prepared.place.model_files / MARK_FILE
    if prepared.mark is not None:
        there = b""
        with suppress(OSError, ValueError):
            there = read_file(file, limit=MOST_BYTES)
        replace_durably(file, with_mark(there, prepared.mark), private=True)


def keep_from_others(place: RunDir) -> None:
    """Take away the permissions on private files that older versions left to others than owner and group."""
    for path in place.private:
        take_from_others(path)


def clean_config(place: RunDir) -> None:
    """Remove secrets, which older versions wrote, from the config.yaml of a complete run: no attempt rewrites it."""
    tree = last_config(place)
    clean = recorded(tree)
    with suppress(OSError):  # another user's run
        if tree and (clean != tree or place.config.stat().st_mode & 0o007):
            replace_durably(place.config, dump(clean), private=True)


def start_tracker(
    config: FinetuneConfig,
    prepared: RunInputs,
    standing: ResumePoint,
    opened: Opened,
    kernels: Mapping[str, KernelChoice],
    device: torch.device,
    console: TextIO | None,
    more: Sequence[Tracker] = (),
) -> Tracker:
    """Return rank 0's trackers, those of the config and `more`; other ranks get one that does nothing."""
    own = computed_on(device, kernels)
    computed = on_all_ranks(lambda: own) if config.run.exact else [own]
    if dist.get_rank() != 0:
        return Tracker()
    record = JsonlTracker(prepared.place.path, prepared.lease)
    shown = [ConsoleTracker(console, every=config.tracking.console_every)] if config.tracking.console else []
    followers = _followers(config, prepared.place, seconds=RANKS_WAIT_SECONDS)
    tracker = Composite([*more, *shown, *followers], record=record)
    tracker.start(run_start(config, prepared, standing, standing.attempt))
    if record.repaired:
        tracker.event(names.RECORD_REPAIRED, **record.repaired)
    plan, bits = standing.plan, {}
    events: list[dict[str, Any]] = []
    if config.run.exact:
        bits = {BITS: bits_digest(config, computed[0], kernels)}
        events = read_events(prepared.place.events)  # of the attempts before this one
    tracker.event(
        names.ATTEMPT_STARTED,
        world_size=plan.layout.world,
        resumed_from=standing.state.step,
        **plan.spread(),
        **computed[0],
        **bits,
        **({names.LOST_SECONDS: round(opened.lost, 1)} if opened.lost else {}),
        **({names.CUT: opened.cut} if opened.cut else {}),
        **({names.FROM_PEERS: True} if standing.from_peers else {}),
        **described(evaluation_of_run(config, prepared.evals, prepared.tasks, dry=prepared.dry)),
    )
    if standing.parent is not None and (lineage := known_lineage(prepared.place.path)) is not None:
        tracker.event(names.FORKED, **asdict(lineage.parent))
    _report_kernels(tracker, kernels, standing.state.kernels)
    if config.run.exact:
        _report_bits(tracker, standing.state.step, computed, bits[BITS], events)
    if config.tracking.mlflow.enabled and not mlflow_installed():
        tracker.event(names.NOT_SENT_TO_MLFLOW, because=f"it is not installed: {pip_install('mlflow')}")
    for fields in opened.aside:
        tracker.event(names.CHECKPOINT_DAMAGED, **fields)
    if opened.changed:
        tracker.event(names.SETTINGS_CHANGED, **opened.changed)
    if standing.windows_built:
        tracker.event(names.WINDOWS_BUILT, windows=standing.windows_built, steps=None)
    if standing.begins:
        _report_data(tracker, config, prepared)
    return tracker


def _followers(
    config: FinetuneConfig, place: RunDir, *, seconds: float, progress: Progress | None = None
) -> Iterator[Follower]:
    chosen = config.tracking
    if chosen.mlflow.enabled and mlflow_installed():
        yield mlflow_tracker(config, place, seconds=seconds, progress=progress)
    if chosen.wandb.enabled:
        wandb = chosen.wandb
        yield WandbTracker(place.path, project=wandb.project, entity=wandb.entity, finish_seconds=seconds)
    if chosen.tensorboard.enabled:
        yield TensorboardTracker(place.path, finish_seconds=seconds)


def _report_kernels(tracker: Tracker, kernels: Mapping[str, KernelChoice], before: Mapping[str, str]) -> None:
    chosen = {what: choice.name for what, choice in kernels.items()}
    tracker.event(names.KERNELS, **chosen, **{f"{what}_why": choice.why for what, choice in kernels.items()})
    for what, choice in kernels.items():
        if before.get(what, choice.name) != choice.name:
            tracker.event(names.KERNELS_CHANGED, what=what, was=before[what], now=choice.name, why=choice.why)


def params_of(config: FinetuneConfig) -> dict[str, object]:
    """Return the settings that are not at their defaults, by dotted path, without secrets."""
    changed = differing(config)
    return {
        key: value
        for key, value in flatten(recorded(config.model_dump())).items()
        if any(key == path or key.startswith(f"{path}.") for path in changed)
    }


def mlflow_tracker(
    config: FinetuneConfig, place: RunDir, *, seconds: float = RANKS_WAIT_SECONDS, progress: Progress | None = None
) -> MlflowTracker:
    """Return a tracker for this run that waits at most `seconds` at the end."""
    uri, artifacts = mlflow_database(place.path.parent)
    chosen = config.tracking.mlflow.uri
    return MlflowTracker(
        chosen or uri,
        experiment=config.tracking.mlflow.experiment,
        parent=config.tracking.mlflow.parent,
        directory=place.path,
        artifact_root=None if chosen else artifacts,
        finish_seconds=seconds,
        progress=progress,
    )


def run_start(config: FinetuneConfig, prepared: RunInputs, standing: ResumePoint, attempt: int) -> RunStart:
    """Return what trackers are given when an attempt starts."""
    committed, lineage = 0 if standing.commit is None else standing.commit.step, known_lineage(prepared.place.path)
    return RunStart(
        name=config.run.name,
        attempt=attempt,
        resumed_from=standing.state.step,
        committed=committed if standing.from_peers or standing.parent is not None else None,
        begins_after=begins_after(config),
        forked_from=None if lineage is None else lineage.parent,
        total_steps=standing.plan.steps,
        config=recorded_text(config),
        plan=_plan_in_full(prepared, standing),
        params=params_of(config),
        datasets=used_data(config, prepared.train, prepared.evals),
        commit=prepared.started_by.get("commit"),
        state=standing.state.tracking,
        parameters=prepared.parameters,
    )


def begins_after(config: FinetuneConfig) -> int:
    """Return the step after which the record of a run begins: 0, or that of the checkpoint that it forks."""
    return 0 if config.run.fork is None else config.run.fork.step


def mend_record(config: FinetuneConfig, place: RunDir, standing: ResumePoint) -> None:
    """Mend the record of a complete run if it is broken, since no attempt will look at it."""
    steps, first = standing.state.step, begins_after(config)
    if not is_whole(place.metrics, steps, first):
        aside = place.metrics.with_name(f"{place.metrics.name}.damaged")
        fields = repair_event(truncate(place.metrics, steps, aside=aside, begins_after=first).problems, aside)
        append_event(place.events, names.RECORD_REPAIRED, attempt=standing.state.attempt, fields=fields)
        logger.warning("%s", event_in_words(names.RECORD_REPAIRED, fields))


def last_tracking(
    config: FinetuneConfig,
    prepared: RunInputs,
    before: ResumePoint,
    step: int,
    *,
    seconds: float,
    progress: Progress | None,
) -> list[Follower]:
    """Return trackers of a run that is complete at `step`. They send what their receivers lack; MLflow's, which comes
    first, also sends the report, at its end.

    `before` is where the run stood when the command began. MLflow is imported in the tracker's thread while the export
    is written.
    """
    found = list(_followers(config, prepared.place, seconds=seconds, progress=progress))
    attempt = max((event["attempt"] for event in read_events(prepared.place.events)), default=0)
    start = run_start(config, prepared, before, attempt)
    for tracker in found:
        tracker.start(replace(start, over=True, committed=step))
    return found


def register_export(config: FinetuneConfig, place: RunDir, step: int) -> str | None:
    """Register the export in MLflow, if that is asked for. Return the model and its version; None if there is none."""
    name = config.tracking.mlflow.register
    if name is None:
        return None
    uri = config.tracking.mlflow.uri or mlflow_database(place.path.parent)[0]
    try:
        run_id = read_file(place.mlflow_id, limit=1024).decode().strip()
        return f"{name}, version {register(uri, run_id, place.export, name, step)}"
    except Exception as error:  # the run is complete, whatever a registry says
        problem = redact_text(in_one_line(error))
        logger.warning("the export is not registered as %s: %s; the same command tries it again", name, problem)
        return None


def _plan_in_full(prepared: RunInputs, standing: ResumePoint) -> dict[str, Any]:
    """Return the plan, with what it cannot know of network and data, because it reads no path."""
    return {
        **standing.plan.to_dict(),
        "parameters": asdict(prepared.parameters),
        "order_version": prepared.train.order_version,
        "newest_order": standing.state.newest_order,
    }


def _report_bits(
    tracker: Tracker, step: int, computed: Sequence[Mapping[str, Any]], digest: str, events: Sequence[Mapping[str, Any]]
) -> None:
    started = [event for event in events if event["event"] == names.ATTEMPT_STARTED]
    last = started[-1] if started else None
    if (why := why_bits_differ(computed)) is not None:
        tracker.event(names.BITS_MAY_DIFFER, step=step, because=why, among_ranks=True)
    # Said by the attempt after it, and not again: the events keep it.
    elif last is not None and (before := why_bits_differed(events, last["attempt"], step)) is not None:
        tracker.event(names.BITS_MAY_DIFFER, step=before[1], because=before[0])
    if (why := why_bits_changed(computed[0], digest, last and last["fields"])) is not None:
        tracker.event(names.BITS_MAY_DIFFER, step=step, because=why)


def _report_data(tracker: Tracker, config: FinetuneConfig, prepared: RunInputs) -> None:
    if isinstance(config.data.eval, HeldOutConfig):
        held_out = prepared.evals[HELD_OUT]
        rows = {name: len(source) for name, source in zip(held_out.names, held_out.sources, strict=True)}
        tracker.event(names.ROWS_HELD_OUT, rows=rows)
    for column in dict.fromkeys(each for data in (prepared.train, *prepared.evals.values()) for each in data.unread):
        tracker.event(names.COLUMN_NOT_READ, **column.fields())
    if left_out := left_out_of(prepared.train.names, prepared.train.sources):
        before, after = ({name: each[i] for name, each in left_out.items()} for i in (0, 1))
        tracker.event(names.ROWS_LEFT_OUT, before=before, after=after)
    if prepared.census is not None:
        total = prepared.census.total
        if total.dropped or total.truncated or total.cut:
            lost = {**total.dropped, "truncated": total.truncated, "cut": total.cut}
            if total.without_targets:
                lost["pieces_without_targets"] = total.without_targets
            tracker.event(names.ROWS_DROPPED, **lost, rows=total.rows)
        for fields in events_of_rows(prepared.census.skipped):
            tracker.event(names.ROWS_SKIPPED, **fields)
