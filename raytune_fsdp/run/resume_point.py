"""Where a run is now: agreed at every start of a worker group, whatever its cause.

`RunInputs` holds what never changes during a command, a `ResumePoint` what does. All ranks get theirs in one place,
`agree`: rank 0 says where it believes the run to be, and all ranks verify that checkpoint together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from raytune_fsdp.base.collectives import on_rank0
from raytune_fsdp.base.errors import RaytuneError
from raytune_fsdp.base.lease import Lease
from raytune_fsdp.base.measured import ParameterCount
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, Damaged, verify
from raytune_fsdp.checkpoint.location import in_memory
from raytune_fsdp.checkpoint.reading import verify_together
from raytune_fsdp.checkpoint.state import RunState
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.data.questions import Questions
from raytune_fsdp.data.rows.own_code import OwnCode
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.model.attention.choose import KernelNeeds
from raytune_fsdp.plan.counts import Census
from raytune_fsdp.plan.plan import Plan, resolve
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.run.evaluation.early_stop import ended_on_record
from raytune_fsdp.run.evaluation.owed import evaluation_of_run, is_missing, owes
from raytune_fsdp.run.forks.parent import Fork, Parent
from raytune_fsdp.run.forks.pins import look_again, pin
from raytune_fsdp.run.length import check_extension, stopped_there
from raytune_fsdp.run.resume import Resumed, check_same_run, find_resume, next_attempt
from raytune_fsdp.run.starting_weights import AdapterFiles, ReferenceModel, StartingWeights, TeacherModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """What never changes during a command, found out before any rank is started. Picklable."""

    place: RunDir
    hf_config: PretrainedConfig
    generation_config: GenerationConfig | None
    tokenizer: PreTrainedTokenizerBase
    train: Windows
    evals: Mapping[str, Windows]
    census: Census | None
    """None if the run's length is given in steps: then nothing is counted."""
    origin: StartingWeights | None
    """None if `model.init=random`, or if the run's own checkpoints have replaced the weights it began with."""
    identity: Mapping[str, Any]
    files_of_data: Mapping[str, Sequence[str]]
    """Names of the files whose hashes are in the identity, by its keys."""
    adapter: AdapterFiles | None
    """The adapter that the run begins with; None: a new one, or none."""
    parameters: ParameterCount
    """The size of the network."""
    needs: KernelNeeds
    """What the network needs of its attention."""
    lease: Lease | None
    """Whether the run is still this command's; None where nothing says whose it is."""
    judged: tuple[int, int] | None = None
    """How many desirable and undesirable answers an epoch has; None: nothing asks for it."""
    tasks: Sequence[Questions] = ()
    """The questions of evaluations."""
    added: Collection[int] = ()
    """The ids of new tokens."""
    adapted: Collection[str] | None = None
    """The modules that have adapters in a run that goes on; None: it begins now, or has none."""
    dry: bool = False
    """A dry run: nothing is saved, and nothing evaluated."""
    mark: Mapping[str, Any] | None = None
    """This user's mark on the places that the config names (mark.py)."""
    codes: Sequence[OwnCode] = ()
    """The code of the user's that ranks import: a loss, a network."""
    code: Mapping[str, bytes] = field(default_factory=dict)
    """The Python files that come with the model, if their code may run, by their names."""
    reference: ReferenceModel | None = None
    """The model that the objective compares with; None: it compares with none."""
    teacher: TeacherModel | None = None
    """The model that the objective learns from; None: it learns from none."""
    fork: Fork | None = None
    """What the run is a fork of."""
    started_by: Mapping[str, Any] = field(default_factory=dict)
    """The command that trains the run: who started it, where, on which code (described.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where the run is now, and what follows from that for the next attempt. Picklable."""

    checkpoint: CommittedCheckpoint | None
    """The checkpoint to continue from; None at the beginning."""
    state: RunState
    """The state in it, or that of a run that has not begun."""
    damaged: Damaged
    """Newer checkpoints, and why the run does not continue from them."""
    plan: Plan
    """The plan for the attempt's number of ranks."""
    attempt: int = 0
    """The number of the attempt that begins here, from 1; 0 until the ranks `agree`."""
    ended_early: bool = False
    """Whether the run's evaluations have ended it (`eval.early_stop`)."""
    owes_evaluation: bool = False
    """Whether all steps are trained, and a crash has kept the last evaluation, or some answers, from being made."""
    windows_built: int = 0
    """Windows that were tokenized while the run was prepared."""
    stop_after: int | None = None
    """The step after which the run is to stop (`run.stop_after`)."""
    behind: CommittedCheckpoint | None = None
    """The newest committed checkpoint, if the run continues from a peer copy."""
    parent: Parent | None = None
    """The run whose checkpoint it is, if this one begins as its fork."""

    @property
    def from_peers(self) -> bool:
        """Whether the run continues from a peer copy, which is newer than what is committed."""
        return self.checkpoint is not None and in_memory(self.checkpoint.root)

    @property
    def commit(self) -> CommittedCheckpoint | None:
        """The run's newest checkpoint that outlives the command."""
        return self.behind if self.from_peers or self.parent is not None else self.checkpoint

    @property
    def begins(self) -> bool:
        """Whether nothing of the run's own is there to continue from."""
        return self.checkpoint is None or self.parent is not None

    @property
    def over(self) -> bool:
        """Whether all steps of the run are trained."""
        return self.ended_early or self.state.step >= self.plan.steps

    @property
    def last_step(self) -> int:
        """The step after which the next attempt ends, if nothing ends it before."""
        last = self.state.step if self.over else self.plan.steps
        return last if self.stop_after is None else max(self.state.step, min(self.stop_after, last))

    @property
    def steps_left(self) -> range:
        """The steps that the next attempt trains, unless something ends it before; steps count from 1."""
        return range(self.state.step + 1, self.last_step + 1)

    @property
    def complete(self) -> bool:
        # A run that has come to its end leaves more than a recovery point.
        lasting = self.checkpoint is None or self.checkpoint.lasting
        return self.over and not self.owes_evaluation and lasting


def resume_point_of(
    config: FinetuneConfig, prepared: RunInputs, world: int, found: Resumed, *, windows_built: int = 0
) -> ResumePoint:
    """Return the resume point of a run that continues from `found` on `world` ranks."""
    plan = resolve(config, world, prepared.census, planned_schedule=found.state.schedule_steps)
    if found.checkpoint is not None:
        check_extension(config, prepared.place, plan, found.checkpoint, found.state, found.parent)
    standing = ResumePoint(
        checkpoint=found.checkpoint,
        state=found.state,
        damaged=found.damaged,
        plan=plan,
        ended_early=found.parent is None and ended_on_record(config.eval.early_stop, prepared.place, found.state.step),
        windows_built=windows_built,
        parent=found.parent,
        stop_after=config.run.stop_after,
    )
    if not standing.over:
        return standing
    exam = evaluation_of_run(config, prepared.evals, prepared.tasks, dry=prepared.dry)
    return replace(standing, owes_evaluation=owes(prepared.place, found.state.step, exam))


def look(config: FinetuneConfig, prepared: RunInputs, world: int, damaged: Damaged | None = None) -> ResumePoint:
    """Return where the run is now. Checkpoints committed since the command began count, whatever `run.resume` says.

    Checkpoints known to be `damaged` are passed over.
    """
    found = find_resume(prepared.place, resume="auto", damaged=damaged, fork=prepared.fork)
    check_same_run(found, prepared.identity, prepared.files_of_data)
    return resume_point_of(config, prepared, world, found)


def on_world(config: FinetuneConfig, prepared: RunInputs, standing: ResumePoint, world: int) -> ResumePoint:
    """Return the same resume point for another number of ranks."""
    plan = resolve(config, world, prepared.census, planned_schedule=standing.state.schedule_steps)
    return replace(standing, plan=plan)


def agree(config: FinetuneConfig, prepared: RunInputs, begin: Callable[[], ResumePoint]) -> ResumePoint:
    """Return the resume point from which all ranks begin an attempt. Collective.

    `begin` is called on rank 0 and says where the run is. All ranks then verify that checkpoint together; if it is
    damaged, rank 0 looks for an older one, until one is intact.
    """
    standing = on_rank0(lambda: _numbered(prepared, begin()), what="find where the run stands")
    while (found := standing.checkpoint) is not None:
        problem = verify_together(found, hashes=config.checkpoint.verify == "hashes" or standing.from_peers)
        if problem is None:
            break
        without = partial(_look_without, config, prepared, standing, problem)
        standing = on_rank0(without, what="find where the run stands")
    return standing


def confirm_complete(config: FinetuneConfig, prepared: RunInputs, standing: ResumePoint) -> ResumePoint:
    """If the run is complete, verify its checkpoint in this process, as no rank will; step back if it is damaged."""
    while (found := standing.checkpoint) is not None and standing.complete:
        problem = verify(found, hashes=config.checkpoint.verify == "hashes")
        if problem is None:
            break
        standing = _look_without(config, prepared, standing, problem)
    return standing


def end_if_there(config: FinetuneConfig, prepared: RunInputs, standing: ResumePoint) -> None:
    """Raise Interrupted if the run has come to `run.stop_after`, and an attempt would find nothing to do there."""
    step, found = standing.state.step, standing.checkpoint
    if standing.stop_after is None or standing.over or standing.steps_left or not (found and found.lasting):
        return
    exam = evaluation_of_run(config, prepared.evals, prepared.tasks)
    try:
        missing = standing.plan.due(step, standing.plan.eval_every) and is_missing(prepared.place, step, exam)
    except RaytuneError:  # a broken record: the attempt mends it
        return
    if not missing:
        raise stopped_there(step)


def _numbered(prepared: RunInputs, standing: ResumePoint) -> ResumePoint:
    """Number the attempt that begins now, as late as possible: another start of the run may be near."""
    if standing.parent is not None:
        pin(prepared.place, standing.parent)  # before it is read
    return replace(standing, attempt=next_attempt(prepared.place))


def _look_without(config: FinetuneConfig, prepared: RunInputs, standing: ResumePoint, problem: str) -> ResumePoint:
    """Return where the run is without the checkpoint of this resume point, which is damaged."""
    found, parent = standing.checkpoint, standing.parent
    assert found is not None
    if parent is not None:  # the only one that it can begin with
        look_again(prepared.place, parent, problem, again=found in standing.damaged)
        return replace(standing, damaged={found: problem})
    logger.warning("checkpoint %s is damaged (%s); looking for an older one", found.path, problem)
    damaged = standing.damaged if standing.from_peers else {**standing.damaged, found: problem}
    again = look(config, prepared, standing.plan.layout.world, damaged)
    return replace(again, attempt=standing.attempt, windows_built=standing.windows_built)
