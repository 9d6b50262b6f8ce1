"""Training as a story: take a global batch, train one step on it, and when it is time log, evaluate, save or stop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from raytune_fsdp.base.batch import StepBatches, Stop
from raytune_fsdp.base.beat import beat
from raytune_fsdp.base.measured import StepMetrics
from raytune_fsdp.checkpoint.state import RunState
from raytune_fsdp.config import FinetuneConfig, ParallelConfig
from raytune_fsdp.data.census import SkippedRows
from raytune_fsdp.model.compile_layers import COMPILED, EAGER, Compiler
from raytune_fsdp.model.objective.objective import Objective
from raytune_fsdp.plan.plan import Plan
from raytune_fsdp.record import names
from raytune_fsdp.record.tracker import Tracker
from raytune_fsdp.run.evaluation.early_stop import EarlyStop
from raytune_fsdp.run.evaluation.evaluation import Evaluation
from raytune_fsdp.run.length import stopped_there
from raytune_fsdp.run.measure.digests import StepDigests
from raytune_fsdp.run.measure.documents import DocumentRecord
from raytune_fsdp.run.measure.meter import Meter
from raytune_fsdp.run.saving import Saves, stopped
from raytune_fsdp.step.optim.schedule import lr_factor
from raytune_fsdp.step.optim.update import Optimizer
from raytune_fsdp.step.profiling import StepProfiler
from raytune_fsdp.step.sums import Sums
from raytune_fsdp.step.train_step import LossScale, train_step


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRun:
    """Everything a run is made of, on one rank."""

    config: FinetuneConfig
    plan: Plan
    device: torch.device
    model: PreTrainedModel
    parallel: ParallelConfig
    """The config's `parallel`, as this attempt applies it."""
    objective: Objective
    sums: Sums
    compilers: Mapping[str, Compiler]
    """The compilers of layers and of updates, if these are compiled, by their names in the record."""
    generates_with: str
    """The attention of transformers that writes answers."""
    tokenizer: PreTrainedTokenizerBase
    optimizer: Optimizer
    scale: LossScale
    batches: Iterator[StepBatches]
    exam: Evaluation
    """What the ranks measure at an evaluation."""
    meter: Meter
    documents: DocumentRecord
    digests: StepDigests
    profiler: StepProfiler
    skipped: SkippedRows
    saves: Saves
    tracker: Tracker
    state: RunState
    """The state of the run before its next batch."""
    last_step: int
    """The step after which the attempt ends, if nothing ends it before."""
    not_evaluated: bool
    """Whether the evaluation that is due at the run's current step is not on record."""
    early_stop: EarlyStop


def train(parts: RankRun, stop: Stop) -> RunState:
    """Train to the end of the plan, or until evaluations no longer improve (`eval.early_stop`).

    If a rank has a reason to `stop`, or at `run.stop_after`, commit and raise Interrupted. Collective.
    """
    plan, meter, state = parts.plan, parts.meter, parts.state
    if parts.not_evaluated:
        _evaluate(parts, step=state.step)
    meter.restart_clock()
    waiting_since = time.perf_counter()
    for batches in parts.early_stop.until(parts.batches):
        data_seconds = time.perf_counter() - waiting_since
        # On hosts only, before the step is queued: the ranks agree while the device still works on the step before.
        boundary = parts.saves.agree(stop())
        step = batches.step
        beat(step)
        last = boundary.stop is not None or step == parts.last_step
        factor = lr_factor(step, parts.config.optim, plan)
        with parts.profiler.of(step):
            tensors = train_step(
                parts.model, parts.optimizer, parts.scale, batches,
                plan=plan, parallel=parts.parallel, optim=parts.config.optim,
                lr_factor=factor, seed=parts.config.run.seed, objective=parts.objective,
                sums=parts.sums,
            )  # fmt: skip
        meter.add(batches, tensors, lr=parts.config.optim.lr * factor, data_seconds=data_seconds)
        evaluating = plan.due(step, plan.eval_every)
        saving = last or parts.saves.due(boundary, plan.due(step, plan.save_every), step)
        # The only place where training waits for the device: every train.log_every steps, for those before the latest.
        whole = evaluating or saving or parts.digests.due(step)
        if plan.due(step, plan.log_every) or whole:
            _log(parts, step, last=whole)
        if saving:
            # Before the evaluation: if that fails, the weights are unharmed and the step is saved already.
            state = _state_after(parts, state, step)
            (parts.saves.last if last else parts.saves.begin)(state)
            meter.restart_clock()
        if boundary.stop is not None and step < plan.steps:
            # At once: a machine may be gone in seconds. The next attempt makes up an evaluation that is due here.
            raise stopped(boundary.stop, step)
        if evaluating:
            _evaluate(parts, step)
        waiting_since = time.perf_counter()
    over = parts.early_stop.over
    state = _saved(parts, state, state.step if over is None else over["step"])
    if over is None and state.step < plan.steps:
        raise stopped_there(state.step)
    return state


def _log(parts: RankRun, step: int, *, last: bool) -> None:
    """Fetch and write the metrics of the steps since the last call.

    `last`: those of the latest step must be among them.
    """
    rows = _fetched(parts, step, last=last)
    parts.tracker.steps(rows, parts.plan.layout.world, parts.saves.saver.attempt)
    parts.documents.write(rows)
    for row in rows:
        if row.skipped:
            parts.tracker.event(names.SKIPPED_UPDATE, step=row.step, loss=row.loss, grad_norm=row.grad_norm)
        if row.digest is not None:
            found = row.digest
            parts.tracker.event(names.DIGESTED, step=row.step, digest=found.weights, everything=found.everything)
    built = sum(row.windows_built for row in rows)
    if built:
        parts.tracker.event(names.WINDOWS_BUILT, windows=built, steps=[rows[0].step, rows[-1].step])
    for fields in parts.skipped.up_to(parts.meter.cursor):
        parts.tracker.event(names.ROWS_SKIPPED, **fields)
    for what, compiler in parts.compilers.items():
        compiler.agree()
        graphs, failure = compiler.news()
        if graphs:
            parts.tracker.event(names.COMPILED, step=step, graphs=graphs)
        if failure is not None:
            parts.tracker.event(names.KERNELS_CHANGED, what=what, was=COMPILED, now=EAGER, why=failure)
    for fields in parts.meter.slow():
        parts.tracker.event(names.SLOW_RANK, step=step, **fields)
    for fields in parts.meter.forecast.news():
        parts.tracker.event(names.PREDICTION_CHECKED, **fields)
    for fields in parts.profiler.news():
        parts.tracker.event(names.PROFILED, **fields)
    parts.meter.check()


def _fetched(parts: RankRun, step: int, *, last: bool) -> list[StepMetrics]:
    """Fetch the metrics of the steps since the last call, the latest with its digest if it gets one. Collective."""
    rows = parts.meter.fetch(last=last)
    if parts.digests.due(step):
        rows = parts.digests.with_digest(rows, _state_after(parts, parts.state, step))
        parts.meter.restart_clock()
    return rows


def _evaluate(parts: RankRun, step: int) -> None:
    division = parts.plan.division
    values = parts.exam.values(
        parts.model, parts.tokenizer, micro_batch=division.micro_batch, layout=parts.plan.layout,
        device=parts.device, attention=parts.generates_with,
    )  # fmt: skip
    if values:
        parts.tracker.evaluation(step, values)
        parts.saves.scored(step, names.score(values, parts.config.checkpoint.best))
        ended = parts.early_stop.add(step, values)
        if ended is not None and step < parts.plan.steps:
            parts.tracker.event(names.STOPPED_EARLY, **ended)
    for answered in parts.exam.answers(
        parts.model, parts.tokenizer, device=parts.device, attention=parts.generates_with
    ):
        parts.tracker.event(names.ANSWERED, step=step, **answered)
    parts.meter.restart_clock()


def _saved(parts: RankRun, state: RunState, step: int) -> RunState:
    """Return the state after the step that the run ended with, and save it unless it is saved already. Collective."""
    if state.step < step:
        state = _state_after(parts, state, step)
    parts.saves.last(state)
    return state


def _state_after(parts: RankRun, before: RunState, step: int) -> RunState:
    """Return everything that is not a tensor, after a step whose metrics have been fetched."""
    scale = parts.scale
    gave_up = {what: EAGER for what, compiler in parts.compilers.items() if compiler.failure is not None}
    return replace(
        before,
        step=step,
        cursor=parts.meter.cursor,
        samples=parts.plan.division.samples_before(step + 1),
        skipped_in_row=parts.meter.skipped_in_row,
        loss_scale=scale.value.item() if scale.enabled else None,
        good_steps=int(scale.good_steps.item()),
        kernels={**before.kernels, **gave_up},
        tracking=parts.tracker.state(),
    )
