"""Make the objects of a prepared run on this rank, in the order in which data flows. They are made only here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TextIO, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from raytune_fsdp.base.batch import Saved, StepBatches
from raytune_fsdp.base.collectives import on_rank0
from raytune_fsdp.base.predicted import NotPredicted, Predicted
from raytune_fsdp.checkpoint.reading import load_into
from raytune_fsdp.checkpoint.room import node_without_room
from raytune_fsdp.checkpoint.saver import Saver
from raytune_fsdp.checkpoint.state import RunState
from raytune_fsdp.config import FinetuneConfig, ParallelConfig
from raytune_fsdp.config.sections.method import QloraMethod
from raytune_fsdp.config.sections.optimizers import state_bytes
from raytune_fsdp.data.batches import rank_batches
from raytune_fsdp.data.census import SkippedRows
from raytune_fsdp.data.shared_batches import from_first, own_parts
from raytune_fsdp.data.stream import Stream
from raytune_fsdp.data.to_device import to_device
from raytune_fsdp.model.adapters.attach import is_adapted, keep_initial_adapters
from raytune_fsdp.model.adapters.principal import pairs_of
from raytune_fsdp.model.attention.choose import KernelChoice, generating
from raytune_fsdp.model.compile_layers import COMPILED, Compiler
from raytune_fsdp.model.fill import fill
from raytune_fsdp.model.layers import set_training_forward
from raytune_fsdp.model.network import MASTER_DTYPE, build_network
from raytune_fsdp.model.objective.documents import DocumentLosses
from raytune_fsdp.model.objective.objective import Objective
from raytune_fsdp.model.objective.routers import watch_routers
from raytune_fsdp.model.offload_activations import Copies, Offload
from raytune_fsdp.model.pieces.pieces import TENSOR
from raytune_fsdp.model.precision.fp8 import compute_in_fp8
from raytune_fsdp.model.precision.quantized import quantize_layers
from raytune_fsdp.model.split.tensor import split_layers
from raytune_fsdp.plan.plan import Layout
from raytune_fsdp.record import names
from raytune_fsdp.record.jsonl import read_evaluations
from raytune_fsdp.record.tracker import Tracker
from raytune_fsdp.run.base_model import agree_on_base
from raytune_fsdp.run.evaluation.early_stop import EarlyStop, ended_by
from raytune_fsdp.run.evaluation.evaluation import Evaluation
from raytune_fsdp.run.evaluation.losses import check_computation, check_split_tokens
from raytune_fsdp.run.evaluation.owed import evaluation_of_run, is_missing
from raytune_fsdp.run.fetching import brought
from raytune_fsdp.run.loop import RankRun
from raytune_fsdp.run.measure.against_prediction import Forecast, bytes_kept
from raytune_fsdp.run.measure.documents import DocumentRecord
from raytune_fsdp.run.measure.meter import Meter
from raytune_fsdp.run.open_record import open_run, start_tracker
from raytune_fsdp.run.resume_point import ResumePoint, RunInputs
from raytune_fsdp.run.saving import open_saves
from raytune_fsdp.run.starting_weights import fill_mode, first_weights
from raytune_fsdp.run.trials.cut import try_split
from raytune_fsdp.run.trials.kernels import kernels_of
from raytune_fsdp.step.accumulation import add_gradients
from raytune_fsdp.step.flops import Architecture
from raytune_fsdp.step.operations import count_architecture
from raytune_fsdp.step.optim.build import build_optimizer
from raytune_fsdp.step.optim.update import Optimizer
from raytune_fsdp.step.own_time import OwnTime
from raytune_fsdp.step.parallel import (
    SharingGroups,
    Unit,
    describe,
    for_one_rank,
    is_wrapped,
    make_groups,
    make_mesh,
    memory_of,
    shard,
    sharding_units,
)
from raytune_fsdp.step.precision import compute_dtype, store_frozen
from raytune_fsdp.step.profiling import StepProfiler
from raytune_fsdp.step.reduce_by_node import ranks_together
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


def assemble(
    config: FinetuneConfig,
    prepared: RunInputs,
    standing: ResumePoint,
    device: torch.device,
    hooks: LauncherHooks | None = None,
) -> RankRun:
    """Build everything that a rank trains with. Collective: needs the process group."""
    hooks, plan, state = hooks or LauncherHooks(), standing.plan, standing.state
    learner = _learner(config, prepared, standing, device, partial(print, file=hooks.console, flush=True))
    # Checked on the model itself: some architectures take position_ids and still let packed documents see each other.
    dtype = compute_dtype(config.parallel.precision)
    check_computation(learner.model, config.data.packing, device, dtype)
    if learner.groups.sequence is not None:
        check_split_tokens(learner.model, learner.groups.sequence, device, dtype)
    hooks.reached("model")
    # Nothing is written before this line: what is refused until here leaves the run as it was.
    opened = on_rank0(lambda: open_run(config, prepared, standing), what="write to the run's storage")
    tracker = start_tracker(config, prepared, standing, opened, learner.kernels, device, hooks.console, hooks.trackers)
    stream = Stream(prepared.train, seed=config.run.seed)
    batches = _batches(hooks, standing, stream, learner.groups.together)
    exam = evaluation_of_run(config, prepared.evals, prepared.tasks, dry=prepared.dry)
    saves = open_saves(
        config, prepared, standing, learner.model, learner.optimizer, tracker,
        saved=hooks.saved, lost=opened.lost, notices=hooks.notices,
    )  # fmt: skip
    _report(tracker, learner, saves.saver, hooks.predicted)
    own = OwnTime(learner.units, device, storage=lambda: saves.saver.own_seconds) if plan.layout.world > 1 else None
    return RankRun(
        config=config,
        plan=plan,
        device=device,
        model=learner.model,
        parallel=learner.parallel,
        objective=learner.objective,
        compiler=learner.compiler,
        generates_with=generating(learner.model, prepared.needs),
        tokenizer=prepared.tokenizer,
        optimizer=saves.saver.guard(learner.optimizer, device),
        scale=LossScale.start(
            enabled=config.parallel.precision == "fp16",
            device=device,
            value=state.loss_scale or FIRST_SCALE,
            good_steps=state.good_steps,
        ),
        batches=to_device(batches, device),
        exam=exam,
        meter=_meter(config, prepared, standing, learner, device, own, hooks.predicted),
        documents=DocumentRecord(learner.objective.documents, prepared.place.documents, standing.attempt),
        profiler=StepProfiler(config.profile.steps, prepared.place.profile, device, dist.get_rank()),
        skipped=SkippedRows(stream, state.cursor, counted=prepared.census is not None or dist.get_rank() != 0),
        saves=saves,
        tracker=tracker,
        state=_next_state(prepared, standing, learner),
        not_evaluated=_not_evaluated(config, prepared, standing, exam),
        early_stop=_early_stop(config, prepared, standing),
    )


def _batches(
    hooks: LauncherHooks, standing: ResumePoint, stream: Stream, together: dist.ProcessGroup | None
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
    return whole if together is None else own_parts(whole, plan.layout, rank)


def _meter(
    config: FinetuneConfig,
    prepared: RunInputs,
    standing: ResumePoint,
    learner: _Learner,
    device: torch.device,
    own: OwnTime | None,
    predicted: Predicted | NotPredicted | None,
) -> Meter:
    kept = partial(bytes_kept, learner.model, learner.optimizer, device)
    return Meter(
        standing.plan, learner.architecture, device,
        windows=prepared.train.count, cursor=standing.state.cursor, datasets=prepared.train.names,
        max_skipped=config.optim.max_skipped, checkpoints=prepared.place.checkpoints,
        skipped_in_row=standing.state.skipped_in_row, experts=learner.objective.experts, own=own,
        forecast=Forecast(predicted, kept, gpu=device.type == "cuda", last=standing.plan.steps),
    )  # fmt: skip


def _report(tracker: Tracker, learner: _Learner, saver: Saver, predicted: Predicted | NotPredicted | None) -> None:
    """Report how the attempt uses the memory of devices and nodes. Collective."""
    match predicted:
        case Predicted():
            tracker.event(
                names.PREDICTED, kept_bytes=predicted.kept, peak_bytes=predicted.peak, where=predicted.where,
                beside_bytes=predicted.assumed, checkpoint_bytes=predicted.checkpoint, step_seconds=predicted.seconds,
            )  # fmt: skip
        case NotPredicted():
            tracker.event(names.PREDICTED, because=predicted.because)
    if learner.sharding is not None:
        tracker.event(names.SHARDED, **learner.sharding)
    if cramped := node_without_room(saver.nbytes_staged()):
        tracker.event(names.MEMORY_SHORT, **cramped)


def _not_evaluated(config: FinetuneConfig, prepared: RunInputs, standing: ResumePoint, exam: Evaluation) -> bool:
    """Return whether an evaluation is due at the run's step and was not completed by an earlier attempt. Collective."""
    step, plan = standing.state.step, standing.plan
    if step == 0:
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


def _next_state(prepared: RunInputs, standing: ResumePoint, learner: _Learner) -> RunState:
    """Return the state that this attempt starts from and saves: the checkpoint's, with today's identity and world."""
    return replace(
        standing.state,
        schedule_steps=standing.plan.schedule_steps,
        identity=prepared.identity,
        files=prepared.files_of_data,
        kernels={what: choice.name for what, choice in learner.kernels.items()},
        base=learner.base,
        attempt=standing.attempt,
        world_size=standing.plan.layout.world,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Learner:
    """The network and what trains it, before the attempt's first step."""

    model: PreTrainedModel
    units: Sequence[nn.Module]
    """The modules that are gathered and computed one after the other."""
    optimizer: Optimizer
    architecture: Architecture
    kernels: Mapping[str, KernelChoice]
    parallel: ParallelConfig
    """The config's `parallel`, changed where one rank alone does better otherwise."""
    objective: Objective
    compiler: Compiler | None
    sharding: Mapping[str, Any] | None
    """For people: what is gathered when. None: nothing is gathered."""
    base: Mapping[str, Any] | None
    """What checkpoints record about the weights under the adapters. None: there are no adapters."""
    groups: SharingGroups


def _learner(
    config: FinetuneConfig, prepared: RunInputs, standing: ResumePoint, device: torch.device, say: Callable[[str], None]
) -> _Learner:
    """Build the network, shard and fill it, and build its optimizer."""
    # A copy of the config, because building writes the attention into it.
    model = build_network(copy.deepcopy(prepared.hf_config), config, prepared.added)
    kernels = kernels_of(config, prepared, standing, model, device)
    architecture = count_architecture(model)  # before sharding: by the shapes of whole weights
    compiled = kernels["blocks"].name == COMPILED
    # Hooks would break the graphs of layers that are recomputed.
    layout, micro_batches = standing.plan.layout, standing.plan.division.full_rounds
    groups, mesh = make_groups(layout, device), make_mesh(layout, device)
    routers = None if compiled else watch_routers(model, config.train, groups.sequence)
    compiler = Compiler() if compiled else None
    parallel = as_stored(model, config, layout, memory_of(device), device.type)
    if layout.tensor > 1:
        try_split(config, prepared.hf_config, model, mesh[TENSOR], device)
        split_layers(model, mesh[TENSOR])
    units = sharding_units(model, parallel, ends=prepared.needs.ends)
    per_node = ranks_together(layout.shard_size) if parallel.reduce == "hierarchical" else None
    sharding = None
    if is_wrapped(parallel, layout.world):  # before sharding, as well
        sharding = describe(
            model, units, parallel, layout, micro_batches=micro_batches, heads=prepared.needs.heads,
            tokens=config.train.micro_batch * config.data.seq_len, per_node=per_node,
        )  # fmt: skip
    spread(model, units, parallel, mesh, compiler, device, per_node=per_node)
    host = torch.device("cpu") if parallel.cpu_offload else None
    adapted, checkpoint = is_adapted(model), standing.checkpoint
    base = None
    if checkpoint is None or adapted:
        origin, adapter = brought(config, prepared.origin, prepared.adapter if checkpoint is None else None, say)
        mode = fill_mode(config, origin, adapter)
        base = agree_on_base(config, origin, standing.state.base, mode) if adapted else None
        weights, beginning = first_weights(config, origin, model, mode, adapter, checkpoint)
        fill(model, weights, mode, device, shards_at=host, before=beginning.turn_to if beginning else None)
        if getattr(config.method, "init", "zero") != "zero":
            keep_initial_adapters(model, [name for pair in pairs_of(model).values() for name in (pair.a, pair.b)])
    else:
        fill(model, None, "empty", device, shards_at=host)  # the checkpoint holds every tensor
    add_gradients(kernels.get("gradients"), model, units, parallel, layout, micro_batches)
    optimizer = build_optimizer(model, config.optim, config.method, seed=config.run.seed)
    if checkpoint is not None:
        load_into(model, optimizer, checkpoint)
    return _Learner(
        model=model,
        units=[module for unit in units for module in unit.modules],
        optimizer=optimizer,
        architecture=architecture,
        kernels=kernels,
        parallel=parallel,
        objective=Objective.of(config.train, routers, DocumentLosses() if config.tracking.documents else None),
        compiler=compiler,
        sharding=sharding,
        base=base,
        groups=groups,
    )


def as_stored(model: PreTrainedModel, config: FinetuneConfig, layout: Layout, memory: int, kind: str) -> ParallelConfig:
    """Set compute and storage dtypes; return the parallel config for a device of this kind with `memory` bytes.

    The network is whole, on the meta device.
    """
    if isinstance(config.method, QloraMethod):
        quantize_layers(model, config.method.quantization)
    if config.parallel.precision == "fp8":
        compute_in_fp8(model, config.parallel.fp8_scaling, emulated=kind == "cpu")
    store_frozen(model, config.parallel.precision)
    kept = state_bytes(config.optim.optimizer, MASTER_DTYPE[config.parallel.precision].itemsize)
    return for_one_rank(config.parallel, layout, model, memory, state=kept)


def spread(
    model: PreTrainedModel,
    units: Sequence[Unit],
    parallel: ParallelConfig,
    mesh: DeviceMesh,
    compiler: Compiler | None,
    device: torch.device,
    copies: Copies | None = None,
    per_node: int | None = None,
) -> None:
    """Choose how the layers run in training, and shard the network.

    `copies` sends activations to the host. `per_node` is the number of ranks of a node that sum gradients first.
    """
    set_training_forward(
        model,
        recompute=parallel.activation_checkpointing,
        every=parallel.recompute_every,
        offload=Offload(device, copies) if parallel.activation_offload else None,
        compiler=compiler,
    )
    shard(model, mesh, parallel, units, per_node=per_node)
