"""What a run writes down about itself: its directory, its attempts, and who is told of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TextIO

import torch.distributed as dist

from raytune_fsdp.checkpoint.commit import PLACE_FILE, committed, set_aside
from raytune_fsdp.checkpoint.export import MODEL_FILES, RECIPE_FILE, leave_model_files
from raytune_fsdp.checkpoint.storage import storage_at
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.load import dump_config
from raytune_fsdp.data.skipped import told
from raytune_fsdp.durable import replace_durably
from raytune_fsdp.errors import pip_install
from raytune_fsdp.plan import Plan
from raytune_fsdp.prepare import Prepared
from raytune_fsdp.report.card import recipe_of
from raytune_fsdp.resume import changed_settings
from raytune_fsdp.tracking import names
from raytune_fsdp.tracking.console import ConsoleTracker
from raytune_fsdp.tracking.jsonl import EVENTS_FILE, JsonlTracker, read_events
from raytune_fsdp.tracking.mlflow import MlflowTracker, mlflow_installed, sqlite_location
from raytune_fsdp.tracking.redaction import redact
from raytune_fsdp.tracking.tracker import Composite, NullTracker, RunStart, Tracker, flatten
from raytune_fsdp.types import Census

MLFLOW_ID_FILE = "mlflow_run_id"


def next_attempt(plan: Plan) -> int:
    """The number of the attempt that is starting: 1 in a new run."""
    earlier = [line["attempt"] for line in read_events(plan.run_dir / EVENTS_FILE)]
    earlier += [found.attempt for found in committed(plan.checkpoints)]
    return 1 + max(earlier, default=0)


def open_run(
    config: FinetuneConfig, prepared: Prepared, attempt: int | None
) -> tuple[int, dict[str, list[Any]], list[dict[str, str]]]:
    """Write what describes the run and remove what earlier attempts left unfinished. Rank 0.

    Returns the number of this attempt, the settings that are other than in the last one, and the checkpoints that were
    set aside.
    """
    run_dir = prepared.plan.run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    changed = changed_settings(run_dir, config)
    storage_at(prepared.plan.checkpoints).clean()
    aside = []
    if prepared.resume is not None:
        for found, now in set_aside(prepared.damaged, prepared.resume):
            aside.append({"path": found.path, "problem": prepared.damaged[found], "now": now})
    replace_durably(run_dir / "config.yaml", dump_config(config))
    if config.checkpoint.storage is not None:
        replace_durably(run_dir / PLACE_FILE, prepared.plan.checkpoints)
    replace_durably(run_dir / "plan.json", json.dumps(prepared.plan.to_dict(), indent=1))
    model_files = run_dir / MODEL_FILES
    prepared.hf_config.save_pretrained(model_files)
    prepared.tokenizer.save_pretrained(model_files)
    if prepared.generation_config is not None:
        # Not save_pretrained: it refuses combinations that well-known models have.
        prepared.generation_config.to_json_file(model_files / "generation_config.json")
    recipe = recipe_of(redact(config.model_dump(mode="json")), _version(), run_dir)
    replace_durably(model_files / RECIPE_FILE, recipe)
    leave_model_files(model_files, prepared.plan.checkpoints)
    return attempt or next_attempt(prepared.plan), changed, aside


def _version() -> str | None:
    try:
        return version("raytune-fsdp")
    except PackageNotFoundError:  # run from its source, without an installation
        return None


def start_tracker(
    config: FinetuneConfig,
    prepared: Prepared,
    attempt: int,
    changed: Mapping[str, Any],
    aside: Sequence[Mapping[str, str]],
    console: TextIO | None,
) -> Tracker:
    """Rank 0 tracks; the other ranks talk to a tracker that does nothing."""
    if dist.get_rank() != 0:
        return NullTracker()
    plan = prepared.plan
    trackers: list[Tracker] = [JsonlTracker(plan.run_dir)]
    if config.tracking.console:
        trackers.append(ConsoleTracker(console))
    if config.tracking.mlflow.enabled and mlflow_installed():
        trackers.append(mlflow_tracker(config, plan))
    tracker = Composite(trackers)
    tracker.start(run_start(config, prepared, attempt))
    tracker.event(
        names.ATTEMPT_STARTED, world_size=plan.layout.world, resumed_from=prepared.state.step, **asdict(plan.layout)
    )
    if config.tracking.mlflow.enabled and not mlflow_installed():
        tracker.event(names.NOT_SENT_TO_MLFLOW, because=f"it is not installed: {pip_install('mlflow')}")
    for fields in aside:
        tracker.event(names.CHECKPOINT_DAMAGED, **fields)
    if changed:
        tracker.event(names.SETTINGS_CHANGED, **changed)
    if prepared.windows_built:
        tracker.event(names.WINDOWS_BUILT, windows=prepared.windows_built, steps=None)
    if prepared.census is not None and prepared.state.step == 0:
        _tell_of_dropped_rows(tracker, prepared.census)
    return tracker


def mlflow_tracker(config: FinetuneConfig, plan: Plan) -> MlflowTracker:
    uri, artifacts = sqlite_location(plan.run_dir.parent)
    chosen = config.tracking.mlflow.uri
    return MlflowTracker(
        chosen or uri,
        experiment=config.tracking.mlflow.experiment,
        artifact_root=None if chosen else artifacts,
        id_file=plan.run_dir / MLFLOW_ID_FILE,
    )


def run_start(config: FinetuneConfig, prepared: Prepared, attempt: int) -> RunStart:
    """What trackers are told when an attempt starts."""
    return RunStart(
        name=config.run.name,
        attempt=attempt,
        resumed_from=prepared.state.step,
        total_steps=prepared.plan.steps,
        config=dump_config(config),
        plan=prepared.plan.to_dict(),
        params=flatten(config.model_dump()),
        state=prepared.state.tracking,
    )


def _tell_of_dropped_rows(tracker: Tracker, census: Census) -> None:
    total = census.total
    if total.dropped or total.truncated or total.cut:
        tracker.event(names.ROWS_DROPPED, **total.dropped, truncated=total.truncated, cut=total.cut, rows=total.rows)
    for fields in told(census.skipped):
        tracker.event(names.ROWS_SKIPPED, **fields)
