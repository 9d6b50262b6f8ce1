"""Make the objects of a prepared run on this rank, in the order in which data flows. They are made only here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TextIO, cast

import torch
import torch.distributed as dist

from raytune_fsdp.base.batch import StepBatches
from raytune_fsdp.base.collectives import on_rank0
from raytune_fsdp.base.measured import NotPredicted, Predicted, Saved
from raytune_fsdp.checkpoint.peers.storage import PeerStorage
from raytune_fsdp.checkpoint.reading import load_into
from raytune_fsdp.checkpoint.room import node_without_room
from raytune_fsdp.checkpoint.saver import Saver
from raytune_fsdp.checkpoint.state import RunState
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.data.batches import rank_batches
from raytune_fsdp.data.census import SkippedRows
from raytune_fsdp.data.reference import Given
from raytune_fsdp.data.shared_batches import from_first, own_parts
from raytune_fsdp.data.stream import Stream
from raytune_fsdp.data.teacher import Lessons
from raytune_fsdp.data.to_device import to_device
from raytune_fsdp.model.adapters.attach import is_adapted, keep_initial_adapters
from raytune_fsdp.model.adapters.principal import pairs_of
from raytune_fsdp.model.attention.choose import generating
from raytune_fsdp.model.fill import fill
from raytune_fsdp.model.objective.distillation import Distillation
from raytune_fsdp.model.objective.documents import DocumentLosses
from raytune_fsdp.model.objective.objective import Objective
from raytune_fsdp.model.objective.own_loss import load_code
from raytune_fsdp.record import names
from raytune_fsdp.record.jsonl import read_evaluations
from raytune_fsdp.record.tracker import Tracker
from raytune_fsdp.run.base_model import agree_on_base
from raytune_fsdp.run.build import Build, Site, build, optimizer_of, sums_of
from raytune_fsdp.run.evaluation.early_stop import EarlyStop, ended_by
from raytune_fsdp.run.evaluation.evaluation import Evaluation
from raytune_fsdp.run.evaluation.owed import evaluation_of_run, is_missing
from raytune_fsdp.run.fetching import brought
from raytune_fsdp.run.loop import RankRun
from raytune_fsdp.run.measure.against_prediction import Forecast
from raytune_fsdp.run.measure.digests import StepDigests
from raytune_fsdp.run.measure.documents import DocumentRecord
from raytune_fsdp.run.measure.meter import Meter
from raytune_fsdp.run.measure.out_of_memory import bytes_kept
from raytune_fsdp.run.open_record import open_run, start_tracker
from raytune_fsdp.run.reference.attempt import Reference, loss_of_groups, open_reference
from raytune_fsdp.run.resume_point import ResumePoint, RunInputs
from raytune_fsdp.run.saving import Saves, open_saves
from raytune_fsdp.run.starting_weights import fill_mode, first_weights
from raytune_fsdp.run.teacher.attempt import Teacher, open_teacher
from raytune_fsdp.run.trials.computation import check_computation, check_split_tokens
from raytune_fsdp.run.trials.kernels import kernels_of
from raytune_fsdp.step.optim.update import Optimizer
from raytune_fsdp.step.own_time import OwnTime
from raytune_fsdp.step.precision import compute_dtype
from raytune_fsdp.step.profiling import StepProfiler
from raytune_fsdp.step.train_step import FIRST_SCALE, LossScale


def _nobody(_: object) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherHooks:
    """What a launcher provides to a rank. Every field has a default, which does without it."""

    batches: Iterator[StepBatches | None] | None = None
    """This rank's batches on the host, starting with the next step. Of ranks that share micro-batches, the first gets
    them all and the others get None for each step. None: the rank makes its batches itself."""
    console: TextIO | None = None
    """Where the progress of the run is printed. None: stdout."""
    trackers: Sequence[Tracker] = ()
    """Trackers of rank 0, in addition to those of the config."""
    saved: Callable[[Saved], None] = _nobody
    """Called on every rank for every committed checkpoint."""
    reached: Callable[[str], object] = _nobody
    """Called with the name of each phase before the first step, when this rank has finished it."""
    predicted: Predicted | NotPredicted | None = None
    """What was predicted for a rank. None: nobody asked."""
    notices: Mapping[str, float] = field(default_factory=dict)
    """Seconds that each cause of an early end leaves for a last checkpoint."""
    peers: PeerStorage | None = None
    """Where peer copies go. None: there are none."""


def assemble(
    config: FinetuneConfig,
    prepared: RunInputs,
    standing: ResumePoint,
    device: torch.device,
    hooks: LauncherHooks | None = None,
) -> RankRun:
    """Build everything that a rank trains with. Collective: needs the process group."""
    hooks, plan, state = hooks or LauncherHooks(), standing.plan, standing.state
    say = partial(print, file=hooks.console, flush=True)
    reference = open_reference(config, prepared, standing, device, say)
    teacher = open_teacher(config, prepared, standing, device, say)
    built = build(
        config, prepared.hf_config, prepared.needs, Site.of_rank(plan, device),
        lambda network: kernels_of(config, prepared, standing, network, device),
        added=prepared.added, adapted=prepared.adapted,
    )  # fmt: skip
    model, documents = built.model, DocumentLosses() if config.tracking.documents else None
    base = _fill(config, prepared, standing, built, say)
    optimizer = optimizer_of(built, config)
    if standing.checkpoint is not None:
        load_into(model, optimizer, standing.checkpoint)
    # Checked on the model itself: some architectures take position_ids and still let packed documents see each other.
    dtype = compute_dtype(config.parallel.precision)
    check_computation(model, config.data.packing, device, dtype)
    if built.groups.sequence is not None:
        check_split_tokens(model, built.groups.sequence, device, dtype)
    groups = loss_of_groups(config, prepared, standing, built, reference, say)
    loss = load_code(prepared.codes, config.train.loss_columns, device, dtype)
    objective = Objective.of(config.train, built.routers, documents, loss, groups, Distillation.of(config))
    hooks.reached("model")
    # Nothing is written before this line: what is refused until here leaves the run as it was.
    opened = on_rank0(lambda: open_run(config, prepared, standing), what="write to the run's storage")
    tracker = start_tracker(config, prepared, standing, opened, built.kernels, device, hooks.console, hooks.trackers)
    stream = Stream(prepared.train, seed=config.run.seed)
    given = None if reference is None else reference.given()
    batches = _batches(hooks, standing, stream, built.groups.together, given if teacher is None else teacher.lessons)
    exam = replace(evaluation_of_run(config, prepared.evals, prepared.tasks, groups, dry=prepared.dry), given=given)
    saves = open_saves(
        config, prepared, standing, model, optimizer, tracker,
        saved=hooks.saved, uncommitted=opened.uncommitted, notices=hooks.notices, peers=hooks.peers,
    )  # fmt: skip
    _report(tracker, built, saves, hooks.predicted, None if given is None else reference, teacher)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # a step's peak is on record, not that of a reference's pass
    return RankRun(
        config=config,
        plan=plan,
        device=device,
        model=model,
        parallel=built.parallel,
        objective=objective,
        sums=sums_of(built, config, plan),
        compilers={what: each for what, each in (("blocks", built.compiler), ("update", built.updates)) if each},
        generates_with=generating(model, prepared.needs),
        tokenizer=prepared.tokenizer,
        optimizer=saves.saver.guard(optimizer, device),
        scale=LossScale.start(
            enabled=config.parallel.precision == "fp16",
            device=device,
            value=state.loss_scale or FIRST_SCALE,
            good_steps=state.good_steps,
        ),
        batches=to_device(batches, device),
        exam=exam,
        meter=_meter(config, prepared, standing, built, optimizer, objective, saves.saver, hooks.predicted),
        documents=DocumentRecord(documents, prepared.place.documents, standing.attempt),
        digests=StepDigests(config.run, saves.saver),
        profiler=StepProfiler(config.profile.steps, prepared.place.profile, device, dist.get_rank()),
        skipped=SkippedRows(stream, state.cursor, counted=prepared.census is not None or dist.get_rank() != 0),
        saves=saves,
        tracker=tracker,
        state=_next_state(prepared, standing, built, base, reference or teacher),
        last_step=standing.last_step,
        not_evaluated=_not_evaluated(config, prepared, standing, exam),
        early_stop=_early_stop(config, prepared, standing),
    )


def _batches(
    hooks: LauncherHooks,
    standing: ResumePoint,
    stream: Stream,
    together: dist.ProcessGroup | None,
    given: Given | Lessons | None,
) -> Iterator[StepBatches]:
    """Return the batches that this rank trains on. Taking one is collective where ranks share micro-batches."""
    plan, rank = standing.plan, dist.get_rank()
    if hooks.batches is None:
        whole = rank_batches(
            stream, plan.division, standing.steps_left,
            cursor=standing.state.cursor, data_rank=plan.layout.data_rank(rank),
        )  # fmt: skip
    elif together is None:
        whole = cast(Iterator[StepBatches], hooks.batches)
    else:
        whole = from_first(hooks.batches, together)
    if given is not None:
        whole = given.steps(whole)
    return whole if together is None else own_parts(whole, plan.layout, rank)


def _meter(
    config: FinetuneConfig,
    prepared: RunInputs,
    standing: ResumePoint,
    built: Build,
    optimizer: Optimizer,
    objective: Objective,
    saver: Saver,
    predicted: Predicted | NotPredicted | None,
) -> Meter:
    device, own = built.site.device, None
    if standing.plan.layout.world > 1:
        modules = [module for unit in built.units for module in unit.modules]
        own = OwnTime(modules, device, storage=lambda: saver.own_seconds)
    kept = partial(bytes_kept, built.model, optimizer, device)
    return Meter(
        standing.plan, built.counts.architecture, device,
        windows=prepared.train.count, cursor=standing.state.cursor, datasets=prepared.train.names,
        max_skipped=config.optim.max_skipped, checkpoints=prepared.place.checkpoints,
        skipped_in_row=standing.state.skipped_in_row, objective=config.train.objective, experts=objective.experts,
        own=own, forecast=Forecast(predicted, kept, gpu=device.type == "cuda", last=standing.plan.steps),
    )  # fmt: skip


def _report(
    tracker: Tracker,
    built: Build,
    saves: Saves,
    predicted: Predicted | NotPredicted | None,
    reference: Reference | None,
    teacher: Teacher | None,
) -> None:
    """Report how the attempt uses the memory of devices and nodes, and what other models have said of the run's
    documents. Collective."""
    match predicted:
        case Predicted():
            tracker.event(
                names.PREDICTED, kept_bytes=predicted.kept, peak_bytes=predicted.peak, where=predicted.where,
                beside_bytes=predicted.assumed, checkpoint_bytes=predicted.checkpoint, step_seconds=predicted.seconds,
            )  # fmt: skip
        case NotPredicted():
            tracker.event(names.PREDICTED, because=predicted.because)
    if built.sharding is not None:
        tracker.event(names.SHARDED, **built.sharding)
    kept = 0 if saves.copies is None else saves.copies.nbytes(saves.saver)
    if cramped := node_without_room(saves.saver.nbytes_staged() + kept):
        tracker.event(names.MEMORY_SHORT, **cramped, **({"peer_copies": kept} if kept else {}))
    if reference is not None:
        tracker.event(names.REFERENCE, **reference.event())
    if teacher is not None:
        tracker.event(names.TEACHER, **teacher.event())


def _not_evaluated(config: FinetuneConfig, prepared: RunInputs, standing: ResumePoint, exam: Evaluation) -> bool:
    """Return whether an evaluation is due at the run's step and was not completed by an earlier attempt. Collective."""
    step, plan = standing.state.step, standing.plan
    if standing.begins:
        return config.eval.at_start
    if standing.owes_evaluation or not plan.due(step, plan.eval_every):
        return standing.owes_evaluation
    return on_rank0(lambda: is_missing(prepared.place, step, exam), what="read the record")


def _early_stop(config: FinetuneConfig, prepared: RunInputs, standing: ResumePoint) -> EarlyStop:
    """Return the early stop with the evaluations of earlier attempts, equal on every rank. Collective."""
    rule, step = config.eval.early_stop, standing.state.step
    if rule is None:
        return EarlyStop(None)
    found = on_rank0(lambda: read_evaluations(prepared.place.metrics, step), what="read metrics.jsonl")
    return EarlyStop(rule, found, ended_by(rule, found))


def _next_state(
    prepared: RunInputs,
    standing: ResumePoint,
    built: Build,
    base: Mapping[str, Any] | None,
    asked: Reference | Teacher | None,
) -> RunState:
    """Return the state that this attempt starts from and saves: the checkpoint's, with today's identity and world."""
    return replace(
        standing.state,
        schedule_steps=standing.plan.schedule_steps,
        identity={**prepared.identity, **({} if asked is None else asked.record)},
        files=prepared.files_of_data,
        kernels={what: choice.name for what, choice in built.kernels.items()},
        base=base,
        attempt=standing.attempt,
        world_size=standing.plan.layout.world,
    )


def _fill(
    config: FinetuneConfig, prepared: RunInputs, standing: ResumePoint, built: Build, say: Callable[[str], None]
) -> Mapping[str, Any] | None:
    """Give the network the values that it begins with. Return what checkpoints record about the weights under the
    adapters; None: there are no adapters."""
    model, checkpoint, device = built.model, standing.checkpoint, built.site.device
    host = torch.device("cpu") if built.parallel.cpu_offload else None
    adapted = is_adapted(model)
    if checkpoint is not None and not adapted:
        fill(model, None, "empty", device, shards_at=host)  # the checkpoint holds every tensor
        return None
    origin, adapter = brought(config, prepared.origin, prepared.adapter if checkpoint is None else None, say)
    mode = fill_mode(config, origin, adapter)
    base = agree_on_base(config, origin, standing.state.base, mode) if adapted else None
    weights, beginning = first_weights(config, origin, model, mode, adapter, checkpoint)
    fill(model, weights, mode, device, shards_at=host, before=beginning.turn_to if beginning else None)
    if getattr(config.method, "init", "zero") != "zero":
        keep_initial_adapters(model, [name for pair in pairs_of(model).values() for name in (pair.a, pair.b)])
    return base
