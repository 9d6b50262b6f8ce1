"""How long a run was planned to be, what a longer plan would train, and where it stops before (`run.stop_after`)."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from raytune_fsdp.base.batch import StopReason
from raytune_fsdp.base.errors import Interrupted, ResumeError
from raytune_fsdp.base.untrusted import is_count, read_json
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint
from raytune_fsdp.checkpoint.state import RunState
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.sections.method import AdapterMethod
from raytune_fsdp.plan.plan import Plan
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.run.forks.parent import Parent, steps_there
from raytune_fsdp.step.optim.schedule import lr_factor, multiplier

logger = logging.getLogger(__name__)

_PLAN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOnRecord:
    """What a run's plan.json says about its length."""

    steps: int
    total_samples: int | None
    schedule_steps: int


def plan_on_record(place: RunDir) -> PlanOnRecord:
    """Return the plan of the run's last attempt; raise ResumeError if there is none."""
    try:
        plan = read_json(place.plan, limit=_PLAN_BYTES)
    except (OSError, ValueError) as error:
        raise ResumeError(f"{place.plan} cannot be read ({error}): it says how long the run is") from error
    names = ("total_samples", "steps", "schedule_steps")
    total, steps, schedule = (plan.get(name) if isinstance(plan, dict) else None for name in names)
    if not (is_count(steps) and is_count(schedule) and (total is None or is_count(total))):
        raise ResumeError(f"{place.plan} is not the plan of a run: it does not say how long the run is")
    return PlanOnRecord(steps=steps, total_samples=total, schedule_steps=schedule)


def check_extension(
    config: FinetuneConfig,
    place: RunDir,
    plan: Plan,
    checkpoint: CommittedCheckpoint,
    state: RunState,
    parent: Parent | None = None,
) -> None:
    """Refuse to extend a run whose last step was short, and to add steps that would train nothing.

    `parent`: the run whose checkpoint it is, if this one begins as its fork.
    """
    if parent is not None:
        place = parent.place
        if state.step >= plan.steps:
            raise ResumeError(
                f"run.fork.step={state.step}: this run ends after step {plan.steps}, so it would train nothing; fork "
                "an earlier step, or make it longer (train.max_steps, train.epochs)"
            )
    whole = state.step * plan.division.global_batch
    if state.samples < whole and plan.division.total_samples != state.samples:
        # A run of that length would have a full step there.
        short = (
            f"a short step: {state.samples} packed samples are not a multiple of "
            f"train.global_batch={plan.division.global_batch}"
        )
        if parent is not None:
            raise ResumeError(
                f"run.fork.step={state.step}: {place.path} ended with {short}, so nothing can follow it; fork an "
                f"earlier step: {steps_there(place)}"
            )
        raise ResumeError(
            f"the run ended with {short}, so it cannot be extended (train.epochs={config.train.epochs}, "
            f"train.max_steps={config.train.max_steps}); start a run of the length you want under another run.name"
        )
    try:
        before = plan_on_record(place).steps
    except ResumeError:  # only the checkpoints are left, which know the length that the run had before it was extended
        before = state.schedule_steps or 0
    first = max(state.step, before) + 1
    if first <= plan.steps and _rates_are_zero(config, plan, first):
        # Some schedules reach their end in their last step, and not one later: a single step needs one more.
        rate = multiplier(first, config.optim, schedule_steps=plan.steps, warmup_steps=plan.warmup_steps)
        enough, train = plan.steps if rate else plan.steps + 1, config.train
        length = f"train.max_steps={train.max_steps}" if train.epochs is None else f"train.epochs={train.epochs:g}"
        raise ResumeError(
            f"{length} adds {_steps(first, plan.steps)} with a learning rate of 0: the schedule has ended "
            f"there (optim.schedule.type={config.optim.schedule.type} over {plan.schedule_steps} steps, floor 0), so "
            f"nothing would be trained; plan it again with --optim.schedule_steps {enough}, or start a run from these "
            f"weights with {_branch(config, place, checkpoint)}"
        )


def warn_of_schedule(config: FinetuneConfig, plan: Plan) -> None:
    """Warn of a new run whose last steps are planned to train nothing."""
    first = plan.schedule_steps + 1
    if first <= plan.steps and _rates_are_zero(config, plan, first):
        logger.warning(
            "optim.schedule_steps=%d: %s of this run have a learning rate of 0 and train nothing; leave "
            "optim.schedule_steps out, or set optim.schedule.floor to more than 0",
            plan.schedule_steps, _steps(first, plan.steps),
        )  # fmt: skip


def _rates_are_zero(config: FinetuneConfig, plan: Plan, first: int) -> bool:
    """Return whether all steps from `first` on have the rate 0: past its end, no schedule rises again."""
    return lr_factor(first, config.optim, plan) == 0.0 == lr_factor(plan.steps, config.optim, plan)


def _branch(config: FinetuneConfig, place: RunDir, checkpoint: CommittedCheckpoint) -> str:
    """Return the options that begin another run with the weights of this one."""
    if isinstance(config.method, AdapterMethod):
        return f"--run.name NAME --method.adapter DIR, where `raytune-fsdp export {place.path} DIR` writes them"
    options = "--model.init pretrained " if config.model.init != "pretrained" else ""
    options += "--model.architecture null " if config.model.architecture is not None else ""
    return f"--run.name NAME {options}--model.path {checkpoint.path}"


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def stopped_there(step: int) -> Interrupted:
    """Return the error that ends a command at `run.stop_after`."""
    return Interrupted(
        f"stopped {StopReason.ASKED.words} after step {step}, which is saved; with a later run.stop_after, or without "
        "it, the same command continues from there"
    )
