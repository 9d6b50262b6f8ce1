"""What a run writes about itself: its directory, its attempts, and the trackers that follow them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TextIO

import torch.distributed as dist

from raytune_fsdp.checkpoint.catalogue import set_aside
from raytune_fsdp.checkpoint.location import storage_at
from raytune_fsdp.checkpoint.model_files import put_model_files
from raytune_fsdp.config import FinetuneConfig, HeldOutConfig
from raytune_fsdp.config.load import dump_config
from raytune_fsdp.counts import Census
from raytune_fsdp.data.open_data import HELD_OUT
from raytune_fsdp.data.skipped import events_of_rows
from raytune_fsdp.durable import replace_durably
from raytune_fsdp.errors import pip_install
from raytune_fsdp.report.card import recipe_of
from raytune_fsdp.run.resume import changed_settings
from raytune_fsdp.run.standing import Prepared, Standing
from raytune_fsdp.rundir import RECIPE_FILE, RunDir, mlflow_database
from raytune_fsdp.tracking import names
from raytune_fsdp.tracking.console import ConsoleTracker
from raytune_fsdp.tracking.jsonl import JsonlTracker
from raytune_fsdp.tracking.mlflow import MlflowTracker, mlflow_installed
from raytune_fsdp.tracking.redaction import redact
from raytune_fsdp.tracking.tracker import Composite, NullTracker, RunStart, Tracker, flatten


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What was found when the run's directory was opened."""

    changed: Mapping[str, list[Any]]
    """Old and new value of the settings that differ from the last attempt."""
    aside: Sequence[Mapping[str, str]]
    """The damaged checkpoints that were set aside: path, problem, and where each is now."""


def open_run(config: FinetuneConfig, prepared: Prepared, standing: Standing) -> Opened:
    """Write the files that describe the run, and remove what earlier attempts left unfinished. Call on rank 0."""
    place = prepared.place
    place.path.mkdir(parents=True, exist_ok=True)
    changed = changed_settings(place, config)
    storage_at(place.checkpoints).clean()  # before the first save of this attempt: nothing else is being written
    aside = []
    if standing.checkpoint is not None:
        for found, now in set_aside(standing.damaged, standing.checkpoint):
            aside.append({"path": found.path, "problem": standing.damaged[found], "now": now})
    replace_durably(place.config, dump_config(config))
    if config.checkpoint.storage is not None:
        replace_durably(place.checkpoints_at, place.checkpoints)
    replace_durably(place.plan, json.dumps(standing.plan.to_dict(), indent=1))
    prepared.hf_config.save_pretrained(place.model_files)
    prepared.tokenizer.save_pretrained(place.model_files)
    if prepared.generation_config is not None:
        # Not save_pretrained: it refuses combinations of settings that well-known models ship with.
        prepared.generation_config.to_json_file(place.model_files / "generation_config.json")
    recipe = recipe_of(redact(config.model_dump(mode="json")), _version(), place.path)
    replace_durably(place.model_files / RECIPE_FILE, recipe)
    put_model_files(place.model_files, place.checkpoints)
    return Opened(changed=changed, aside=aside)


def _version() -> str | None:
    try:
        return version("raytune-fsdp")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return None


def start_tracker(
    config: FinetuneConfig, prepared: Prepared, standing: Standing, opened: Opened, console: TextIO | None
) -> Tracker:
    """Rank 0's trackers; the other ranks get one that does nothing."""
    if dist.get_rank() != 0:
        return NullTracker()
    trackers: list[Tracker] = [JsonlTracker(prepared.place.path)]
    if config.tracking.console:
        trackers.append(ConsoleTracker(console))
    if config.tracking.mlflow.enabled and mlflow_installed():
        trackers.append(mlflow_tracker(config, prepared.place))
    tracker = Composite(trackers)
    tracker.start(run_start(config, standing, standing.attempt))
    plan = standing.plan
    tracker.event(
        names.ATTEMPT_STARTED, world_size=plan.layout.world, resumed_from=standing.state.step, **plan.spread()
    )
    if config.tracking.mlflow.enabled and not mlflow_installed():
        tracker.event(names.NOT_SENT_TO_MLFLOW, because=f"it is not installed: {pip_install('mlflow')}")
    for fields in opened.aside:
        tracker.event(names.CHECKPOINT_DAMAGED, **fields)
    if opened.changed:
        tracker.event(names.SETTINGS_CHANGED, **opened.changed)
    if standing.windows_built:
        tracker.event(names.WINDOWS_BUILT, windows=standing.windows_built, steps=None)
    if isinstance(config.data.eval, HeldOutConfig) and standing.state.step == 0:
        held_out = prepared.evals[HELD_OUT]
        rows = {name: len(source) for name, source in zip(held_out.names, held_out.sources, strict=True)}
        tracker.event(names.ROWS_HELD_OUT, rows=rows)
    if prepared.census is not None and standing.state.step == 0:
        _report_lost_rows(tracker, prepared.census)
    return tracker


def mlflow_tracker(config: FinetuneConfig, place: RunDir) -> MlflowTracker:
    uri, artifacts = mlflow_database(place.path.parent)
    chosen = config.tracking.mlflow.uri
    return MlflowTracker(
        chosen or uri,
        experiment=config.tracking.mlflow.experiment,
        artifact_root=None if chosen else artifacts,
        id_file=place.mlflow_id,
    )


def run_start(config: FinetuneConfig, standing: Standing, attempt: int) -> RunStart:
    """What trackers are given when an attempt starts."""
    return RunStart(
        name=config.run.name,
        attempt=attempt,
        resumed_from=standing.state.step,
        total_steps=standing.plan.steps,
        config=dump_config(config),
        plan=standing.plan.to_dict(),
        params=flatten(config.model_dump()),
        state=standing.state.tracking,
    )


def _report_lost_rows(tracker: Tracker, census: Census) -> None:
    total = census.total
    if total.dropped or total.truncated or total.cut:
        lost = {**total.dropped, "truncated": total.truncated, "cut": total.cut}
        if total.without_targets:
            lost["pieces_without_targets"] = total.without_targets
        tracker.event(names.ROWS_DROPPED, **lost, rows=total.rows)
    for fields in events_of_rows(census.skipped):
        tracker.event(names.ROWS_SKIPPED, **fields)
