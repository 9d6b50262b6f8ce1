"""Evaluations during training (`eval.where: task`): a Ray task measures a checkpoint while training goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray

from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint
from raytune_fsdp.config import EvalConfig, FinetuneConfig
from raytune_fsdp.launch.ray.placement_groups import free_for_tasks, group_around, may_ever_fit
from raytune_fsdp.launch.ray.resources import nodes
from raytune_fsdp.launch.shared_storage import Token, check_seen
from raytune_fsdp.plan.cadence import times_due
from raytune_fsdp.plan.plan import Plan
from raytune_fsdp.record import names
from raytune_fsdp.record.console import evaluation_in_words
from raytune_fsdp.record.jsonl import append_evaluation, each_line
from raytune_fsdp.record.lines import step_of

if TYPE_CHECKING:
    from ray import ObjectRef

    from raytune_fsdp.run.resume_point import RunInputs

    Found = tuple[dict[str, float], list[dict[str, Any]], float]
    """The values, the answers, and the seconds it took."""


class Evaluations:
    """Measures checkpoints, as an `after_commit.Chore`.

    It measures the last one, and from each multiple of `eval.every` to the next the first one: a postponed save is not
    at the multiple itself. Evaluations are on record in the order of their steps, so one that has failed is made up for
    only as long as no later one is there.
    """

    what = "evaluation"
    reserves = True

    def __init__(
        self,
        config: FinetuneConfig,
        prepared: RunInputs,
        plan: Plan,
        token: Token,
        *,
        env: Mapping[str, Any] | None,
        event: Callable[..., None],
        say: Callable[[str], None],
    ) -> None:
        self.minutes = config.eval.task_minutes
        self._config = config
        self._prepared = prepared
        self._held: ObjectRef | None = None
        """The run's inputs in Ray's object store, for tasks that may run on any node."""
        self._plan = plan
        self._token = token
        self._env = env
        self._event = event
        self._say = say

    @staticmethod
    def off(chosen: EvalConfig) -> str | None:
        """Say why there are no such evaluations, where the group around this process has no room for any."""
        if may_ever_fit({"CPU": chosen.task_cpus, "GPU": chosen.task_gpus}):
            return None
        gpus = f" and eval.task_gpus={chosen.task_gpus}" if chosen.task_gpus else ""
        return (
            "eval.where=task: evaluations are off, as this process is in a placement group (of a trial, or a caller's) "
            f"with no room left for eval.task_cpus={chosen.task_cpus}{gpus}: add a bundle to the group, or set "
            "eval.where=ranks"
        )

    def due(self, checkpoint: CommittedCheckpoint, asked: Sequence[CommittedCheckpoint]) -> bool:
        there = [step_of(line) for line in each_line(self._prepared.place.evaluations) if line is not None]
        last, every = max([*there, *(found.step for found in asked)], default=0), self._plan.eval_every
        return checkpoint.step > last and (
            checkpoint.step == self._plan.steps or times_due(checkpoint.step, every) > times_due(last, every)
        )

    def missing(self, *, during_training: bool) -> str | None:
        # A CPU stays free: the data of the ranks is read and tokenized by tasks, and they would wait for their batches.
        chosen, spare = self._config.eval, int(during_training and group_around() is None)
        free = [(int(each.get("CPU", 0)), int(each.get("GPU", 0))) for each in free_for_tasks(nodes())]
        # On one node: a task is not spread. The spare one may be anywhere, and outside of a group around this process.
        fits = any(cpus >= chosen.task_cpus and gpus >= chosen.task_gpus for cpus, gpus in free)
        if fits and sum(cpus for cpus, _ in free) >= chosen.task_cpus + spare:
            return None
        on = f" and {chosen.task_gpus} GPU(s)" if chosen.task_gpus else ""
        more = ", and one CPU more for the data; it comes when they are free, at the latest after the last step"
        most = max(free, default=(0, 0))
        place = "node" if group_around() is None else "bundle of the placement group around it"
        return (
            f"it needs a {place} with {chosen.task_cpus} free CPU(s){on} (eval.task_cpus, eval.task_gpus); the most "
            f"that one has is {most[0]} and {most[1]}{more if during_training else ''}"
        )

    def begin(self, checkpoint: CommittedCheckpoint) -> ObjectRef:
        self._held = self._held or ray.put(self._prepared)
        chosen = self._config.eval
        task = ray.remote(
            num_cpus=chosen.task_cpus,
            num_gpus=chosen.task_gpus,
            max_retries=0,  # what has crashed once would again, and take the memory of others with it
            max_calls=1,  # its process has the model in its memory
            runtime_env=self._env,
        )(_measure)
        return task.remote(self._held, self._config, checkpoint, self._token)

    def record(self, checkpoint: CommittedCheckpoint, result: Any) -> None:
        if self._prepared.lease is not None:
            self._prepared.lease.check()  # another command may have taken over, and measured it, too
        # Also without a value, where only prompts were answered: it is on record that they were.
        append_evaluation(self._prepared.place.evaluations, checkpoint.step, result[0], attempt=checkpoint.attempt)

    def done(self, checkpoint: CommittedCheckpoint, result: Any) -> None:
        found: Found = result
        values, answered, seconds = found
        step = checkpoint.step
        self._event(names.EVALUATED, step=step, seconds=round(seconds, 2))
        self._say(f"eval step {step}  {evaluation_in_words(values)}")
        for fields in answered:
            self._event(names.ANSWERED, step=step, **fields)

    def failed(self, checkpoint: CommittedCheckpoint, problem: str) -> None:
        self._event(names.EVALUATION_FAILED, step=checkpoint.step, problem=problem)


def _measure(prepared: RunInputs, config: FinetuneConfig, checkpoint: CommittedCheckpoint, token: Token) -> Found:
    """Measure a checkpoint, in a Ray task."""
    from raytune_fsdp.launch.quiet import quiet

    quiet()
    import torch

    from raytune_fsdp.checkpoint.model_files import find_checkpoint, load_checkpoint
    from raytune_fsdp.checkpoint.state import read_state
    from raytune_fsdp.data.reference import given_of
    from raytune_fsdp.launch.examine import examine
    from raytune_fsdp.run.evaluation.evaluation import Evaluation

    check_seen(token, by="an evaluation")
    started = time.monotonic()
    chosen = config.eval
    device = torch.device("cuda", 0) if chosen.task_gpus else torch.device("cpu")
    if not chosen.task_gpus:
        torch.set_num_threads(chosen.task_cpus)
    whole = find_checkpoint(checkpoint.path)  # compared with its manifest
    trust = config.model.trust_remote_code or config.model.network is not None
    model = load_checkpoint(whole, device, trust_remote_code=trust)
    given = given_of(read_state(checkpoint).identity, prepared.evals)
    measured = replace(Evaluation.of(config, prepared.evals, prepared.tasks), given=given)
    values, answered = examine(config, model, prepared.tokenizer, measured, device)
    return values, answered, time.monotonic() - started
