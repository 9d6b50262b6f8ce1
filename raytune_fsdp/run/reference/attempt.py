"""What an attempt has of the reference when it begins and computes before it trains, and the loss that compares."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from raytune_fsdp.base.collectives import on_rank0
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.data.reference import Given, Known, ReferenceFiles
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.model.objective.groups import GroupObjective
from raytune_fsdp.model.objective.scores import LossOfGroups, ScoreObjective
from raytune_fsdp.plan.identity import REFERENCE_ALSO, REFERENCE_OF, REFERENCE_VALUES
from raytune_fsdp.run.build import Build
from raytune_fsdp.run.fetching import Say
from raytune_fsdp.run.reference.during import asked_in_steps, is_within
from raytune_fsdp.run.reference.network import build_reference, let_go
from raytune_fsdp.run.reference.passes import Task, compute, look, places_of_run
from raytune_fsdp.run.reference.unchanged import KeptBy, check_unchanged, digest_now, digest_of_how, how_computed
from raytune_fsdp.run.resume_point import ResumePoint, RunInputs
from raytune_fsdp.run.starting_weights import ReferenceModel


@dataclass(slots=True, kw_only=True)
class Reference:
    """The reference of an attempt: what of it is there, and what a pass has to compute."""

    standing: ResumePoint
    kept: KeptBy
    """By which digests of everything that decides its values, but the data, they are kept."""
    tasks: list[Task]
    say: Say
    device: torch.device
    seconds: float = 0.0
    computed: int = 0
    """Windows that this attempt has computed."""
    record: dict[str, Any] = field(default_factory=dict)
    """What checkpoints record of it, once it is complete."""

    @property
    def is_complete(self) -> bool:
        return not any(task.lacking for task in self.tasks)

    def complete(self, model: PreTrainedModel, objective: GroupObjective) -> None:
        """Compute what is lacking with this network, which has the reference's values. Collective."""
        started, plan = time.perf_counter(), self.standing.plan
        for task in self.tasks:
            if task.lacking:
                self.computed += len(task.lacking)
                micro_batch = plan.division.micro_batch
                compute(
                    task, model, objective,
                    micro_batch=micro_batch, layout=plan.layout, device=self.device, say=self.say,
                )  # fmt: skip
        self.seconds += time.perf_counter() - started
        if self.is_complete:
            found = self.kept.record(REFERENCE_OF, REFERENCE_ALSO, used=any(task.uses_now for task in self.tasks))
            digests = {name: digest for task in self.tasks for name, digest in task.digests.items()}
            self.record = {**found, **({REFERENCE_VALUES: self.tasks[0].checked(digests)} if self.tasks else {})}

    def given(self) -> Given | None:
        """Return its values; None: every step asks for its own."""
        return Given(Known.of((task.known.names, task.known.values) for task in self.tasks)) if self.tasks else None

    def event(self) -> dict[str, Any]:
        """Return the fields of the event that describes it."""
        return {
            "path": str(self.tasks[0].now.directory), "documents": sum(len(task.known.names) for task in self.tasks),
            "windows": sum(len(task.places) for task in self.tasks), "computed": self.computed,
            "seconds": round(self.seconds, 2),
        }  # fmt: skip


def open_reference(
    config: FinetuneConfig, prepared: RunInputs, standing: ResumePoint, device: torch.device, say: Say
) -> Reference | None:
    """Find out what is known of the reference's values; None: nothing is compared with kept ones. Collective.

    What is lacking is computed here, by a network of its own, unless the run begins now and from the reference itself.
    """
    model, kept = prepared.reference, config.reference.when == "before"
    if model is None or (not kept and is_within(config)):
        return None
    by, recorded = _kept(config, prepared, standing, model, device, say), standing.state.identity.get(REFERENCE_VALUES)
    tasks = [
        Task(
            name=name, windows=windows, places=places, recorded=recorded if isinstance(recorded, dict) else {},
            files=[ReferenceFiles.of(windows, {"of": of}) for of in by.every],
        )
        for name, windows, places in (_data(config, prepared, standing) if kept else ())
    ]  # fmt: skip
    for task in tasks:
        look(task)
    found = Reference(standing=standing, kept=by, tasks=tasks, say=say, device=device)
    if not found.is_complete and not (model.is_start and standing.checkpoint is None):
        if model.is_start:  # of another model `_kept` has hashed the files already
            _check_unchanged(config, prepared, model, by.first, device, say)
        network, objective = build_reference(model, prepared, standing, device, say)
        found.complete(network, objective)
        del network
        let_go(device)
    return found


def _data(
    config: FinetuneConfig, prepared: RunInputs, standing: ResumePoint
) -> Iterator[tuple[str, Windows, list[tuple[int, int]]]]:
    """Yield the data that is compared: names, windows, and which of these the run reads."""
    train, plan = prepared.train, standing.plan
    # By rank 0 alone: it reads every window, to count its samples.
    places = on_rank0(lambda: places_of_run(train, plan, config.run.seed), what="read the prepared data")
    yield "the training data", train, places
    for name, windows in ({} if prepared.dry else prepared.evals).items():
        if windows.kind is not None:
            yield name, windows, [(0, k) for k in range(windows.count(0))]


def _kept(
    config: FinetuneConfig,
    prepared: RunInputs,
    standing: ResumePoint,
    model: ReferenceModel,
    device: torch.device,
    say: Say,
) -> KeptBy:
    """Return by which digests of the reference its values are kept, if it is still the same one. Collective."""
    identity, how = standing.state.identity, how_computed(config, device)
    before = identity.get(REFERENCE_OF)
    if before is None:
        now = digest_now(model, prepared.identity, how, say).of
    else:
        if not model.is_start or config.reference.when != "before":  # it is read now, and may be another model today
            _check_unchanged(config, prepared, model, str(before), device, say)
        now = digest_of_how(how)
    return KeptBy.of(before, identity.get(REFERENCE_ALSO), now)


def _check_unchanged(
    config: FinetuneConfig, prepared: RunInputs, model: ReferenceModel, before: str, device: torch.device, say: Say
) -> None:
    """Refuse a run whose reference is another model than before. Collective."""
    where = f"reference.model={model.config.model.path}"
    if model.is_start:
        where = f"model.path={model.config.model.path}"
        where += f" or method.adapter={adapter}" if (adapter := getattr(model.config.method, "adapter", None)) else ""
    now = digest_now(model, prepared.identity, how_computed(config, device), say)
    check_unchanged(before, now, f"{where} is not the model that this run compares with")


def loss_of_groups(
    config: FinetuneConfig,
    prepared: RunInputs,
    standing: ResumePoint,
    built: Build,
    reference: Reference | None,
    say: Say,
) -> LossOfGroups | None:
    """Return the loss of the run's groups of documents; None: they stand alone.

    What a kept reference lacks is computed with this network, which has its values if the run begins now. Collective.
    """
    if config.train.objective.rows is None:
        return None
    if config.train.objective.scores:
        return ScoreObjective.of(config.train.objective, built.groups.sequence)
    groups = GroupObjective.of(config.train.objective, built.groups.sequence, judged=prepared.judged)
    if reference is not None:
        reference.complete(built.model, groups)
    return asked_in_steps(groups, config, prepared, standing, built.site.device, say)
