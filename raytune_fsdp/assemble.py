"""From a prepared run to its parts on this rank, in the order of the data's flow: they are made here and only here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TextIO

import torch
import torch.distributed as dist

from raytune_fsdp.checkpoint.commit import committed, remove_staging, set_aside_newer
from raytune_fsdp.checkpoint.export import MODEL_FILES
from raytune_fsdp.checkpoint.state import RunState
from raytune_fsdp.checkpoint.store import Store, load, on_rank0
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.load import dump_config
from raytune_fsdp.data.batches import rank_batches
from raytune_fsdp.data.skipped import SkippedRows, told
from raytune_fsdp.data.stream import Division, Stream
from raytune_fsdp.durable import replace_durably
from raytune_fsdp.errors import ModelError
from raytune_fsdp.evaluate import check_packing
from raytune_fsdp.loop import Parts
from raytune_fsdp.metrics import Meter
from raytune_fsdp.model.fill import fill
from raytune_fsdp.model.skeleton import build_skeleton, count_architecture
from raytune_fsdp.model.weights import FileWeights, GrownWeights, RandomWeights, Weights
from raytune_fsdp.optim import build_optimizer
from raytune_fsdp.parallel import make_mesh, shard
from raytune_fsdp.plan import Plan
from raytune_fsdp.prepare import Prepared
from raytune_fsdp.resume import changed_settings
from raytune_fsdp.step import FIRST_SCALE, LossScale
from raytune_fsdp.tracking import names
from raytune_fsdp.tracking.console import ConsoleTracker
from raytune_fsdp.tracking.jsonl import EVENTS_FILE, JsonlTracker, read_events
from raytune_fsdp.tracking.mlflow import MlflowTracker, sqlite_location
from raytune_fsdp.tracking.tracker import Composite, NullTracker, RunStart, Tracker, flatten
from raytune_fsdp.types import Census, Saved, StepBatches

MLFLOW_ID_FILE = "mlflow_run_id"


def _nobody(_: object) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What a launcher lends to a rank; everything has a default, which is to do without."""

    attempt: int | None = None
    """The number of this attempt. None: the next one."""
    batches: Iterator[StepBatches] | None = None
    """This rank's batches, from the step on where the run stands. None: it makes them itself."""
    console: TextIO | None = None
    """Where a person follows the run. None: stdout."""
    saved: Callable[[Saved], None] = _nobody
    """Told on every rank of every committed checkpoint."""
    reached: Callable[[str], None] = _nobody
    """Told how far this rank has come before its first step."""


def assemble(config: FinetuneConfig, prepared: Prepared, device: torch.device, host: Host | None = None) -> Parts:
    """Build everything. Collective: needs the process group, all ranks must call this."""
    host = host or Host()
    plan, state = prepared.plan, prepared.state
    model = build_skeleton(prepared.hf_config, config.model, config.parallel.precision)
    architecture = count_architecture(model)
    shard(model, make_mesh(plan.layout, device), config.parallel)
    if prepared.resume is None:
        fill(model, _weights(config, prepared), _fill_mode(config, prepared), device)
    else:
        fill(model, None, "empty", device)  # the checkpoint has every tensor
    optimizer = build_optimizer(model, config.optim)
    if prepared.resume is not None:
        load(model, optimizer, prepared.resume.path)
    if config.data.packing != "none":
        check_packing(model, config.data.packing)
    host.reached("model")
    attempt, changed = on_rank0(lambda: _open_run(config, prepared, host.attempt))  # nothing is written before this
    stream = Stream(prepared.train, seed=config.run.seed)
    batches = host.batches or rank_batches(
        stream, division_of(prepared), cursor=state.cursor, rank=dist.get_rank(), device=device
    )
    return Parts(
        config=config,
        plan=plan,
        device=device,
        model=model,
        tokenizer=prepared.tokenizer,
        optimizer=optimizer,
        scale=LossScale.start(
            enabled=config.parallel.precision == "fp16",
            device=device,
            value=state.loss_scale or FIRST_SCALE,
            good_steps=state.good_steps,
        ),
        batches=batches,
        evals=prepared.evals,
        meter=Meter(
            plan,
            architecture,
            device,
            windows=prepared.train.count,
            cursor=state.cursor,
            max_skipped=config.optim.max_skipped,
            skipped_in_row=state.skipped_in_row,
        ),
        skipped=SkippedRows(stream, state.cursor, counted=prepared.census is not None or dist.get_rank() != 0),
        store=Store(directory=plan.checkpoint_dir, attempt=attempt, keep_last=config.checkpoint.keep_last),
        tracker=_start_tracker(config, prepared, attempt, changed, host.console),
        saved=host.saved,
        state=_next_state(prepared, attempt),
    )


def division_of(prepared: Prepared) -> Division:
    """How the rest of the run is divided among its ranks."""
    plan = prepared.plan
    return Division(
        first_step=prepared.state.step + 1,
        last_step=plan.steps,
        total_samples=plan.total_samples,
        global_batch=plan.global_batch,
        micro_batch=plan.micro_batch,
        world=plan.layout.world,
    )


def next_attempt(plan: Plan) -> int:
    """The number of the attempt that is starting: 1 in a new run."""
    earlier = [line["attempt"] for line in read_events(plan.run_dir / EVENTS_FILE)]
    earlier += [found.attempt for found in committed(plan.checkpoint_dir)]
    return 1 + max(earlier, default=0)


def _next_state(prepared: Prepared, attempt: int) -> RunState:
    return replace(
        prepared.state,
        schedule_steps=prepared.plan.schedule_steps,
        identity=prepared.identity,
        files=prepared.files_of_data,
        attempt=attempt,
        world_size=prepared.plan.layout.world,
    )


def _open_run(config: FinetuneConfig, prepared: Prepared, attempt: int | None) -> tuple[int, dict[str, list[Any]]]:
    """Write what describes the run and remove what earlier attempts left unfinished. Rank 0.

    Returns the number of this attempt, and the settings that are other than in the last one.
    """
    run_dir = prepared.plan.run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    changed = changed_settings(run_dir, config)
    remove_staging(prepared.plan.checkpoint_dir)
    if prepared.resume is not None:
        set_aside_newer(prepared.plan.checkpoint_dir, prepared.resume)
    replace_durably(run_dir / "config.yaml", dump_config(config))
    replace_durably(run_dir / "plan.json", json.dumps(prepared.plan.to_dict(), indent=1))
    model_files = run_dir / MODEL_FILES
    prepared.hf_config.save_pretrained(model_files)
    prepared.tokenizer.save_pretrained(model_files)
    if prepared.generation_config is not None:
        # Not save_pretrained: it refuses combinations that well-known models have.
        prepared.generation_config.to_json_file(model_files / "generation_config.json")
    return attempt or next_attempt(prepared.plan), changed


def _weights(config: FinetuneConfig, prepared: Prepared) -> Weights:
    """Where this run's first weights come from. Opens no file yet: a rank may not see any."""
    if prepared.files is None:
        twin = build_skeleton(prepared.hf_config, config.model, config.parallel.precision)
        return RandomWeights(twin, config.run.seed)
    weights = FileWeights(prepared.files, prepared.key_of)
    return GrownWeights(weights, prepared.grown) if prepared.grown else weights


def _fill_mode(config: FinetuneConfig, prepared: Prepared) -> str:
    """`sharded` where every rank sees the files that rank 0 has found, or draws its own weights. Collective."""
    if prepared.files is None:
        return "sharded"
    if config.model.fill == "rank0":
        return "rank0"
    sizes = [prepared.files.sizes() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(sizes, src=0)
    try:
        sees = prepared.files.sizes() == sizes[0]
    except OSError:
        sees = False
    views: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(views, sees)
    if all(views):
        return "sharded"
    if config.model.fill == "sharded":
        blind = [rank for rank, view in enumerate(views) if not view]
        raise ModelError(
            f"model.fill=sharded, but rank(s) {blind} do not see the same files in {prepared.files.directory}: put the "
            "model on storage that all nodes share, or set model.fill=rank0"
        )
    return "rank0"


def _start_tracker(
    config: FinetuneConfig, prepared: Prepared, attempt: int, changed: Mapping[str, Any], console: TextIO | None
) -> Tracker:
    """Rank 0 tracks; the other ranks talk to a tracker that does nothing."""
    if dist.get_rank() != 0:
        return NullTracker()
    plan = prepared.plan
    trackers: list[Tracker] = [JsonlTracker(plan.run_dir)]
    if config.tracking.console:
        trackers.append(ConsoleTracker(console))
    if config.tracking.mlflow.enabled:
        trackers.append(mlflow_tracker(config, plan))
    tracker = Composite(trackers)
    tracker.start(run_start(config, prepared, attempt))
    tracker.event(
        names.ATTEMPT_STARTED, world_size=plan.layout.world, resumed_from=prepared.state.step, **asdict(plan.layout)
    )
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
