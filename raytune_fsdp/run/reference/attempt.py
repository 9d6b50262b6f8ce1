"""What an attempt has of the reference when it begins, and what it computes before it trains."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from transformers import PreTrainedModel

from raytune_fsdp.base.collectives import on_rank0
from raytune_fsdp.base.errors import OtherRunError, ResumeError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.data.cache import REFERENCE
from raytune_fsdp.data.reference import Given, Known, ReferenceFiles
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.model.objective.groups import GroupObjective
from raytune_fsdp.plan.identity import REFERENCE_OF, REFERENCE_VALUES
from raytune_fsdp.run.described import computed_on
from raytune_fsdp.run.fetching import Say, brought
from raytune_fsdp.run.reference.during import is_within
from raytune_fsdp.run.reference.network import build_reference, decided_by
from raytune_fsdp.run.reference.passes import Task, compute, look, places_of_evaluation, places_of_run
from raytune_fsdp.run.resume_point import ResumePoint, RunInputs
from raytune_fsdp.run.starting_weights import ReferenceModel, fill_mode


@dataclass(slots=True, kw_only=True)
class Reference:
    """The reference of an attempt: what of it is there, and what a pass has to compute."""

    standing: ResumePoint
    of: str
    """A digest of everything that decides its values but the data."""
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
            self.record = {REFERENCE_OF: self.of, **({REFERENCE_VALUES: self._checked()} if self.tasks else {})}

    def given(self) -> Given | None:
        """Return its values; None: every step asks for its own."""
        return Given(Known.of((task.known.names, task.known.values) for task in self.tasks)) if self.tasks else None

    def _checked(self) -> dict[str, str]:
        """Return the digests of all values that the run has ever used, by file. Refuse others than checkpoints name."""
        recorded = self.standing.state.identity.get(REFERENCE_VALUES)
        before: dict[str, str] = recorded if isinstance(recorded, dict) else {}
        now = {name: digest for task in self.tasks for name, digest in task.digests.items()}
        for name, digest in now.items():
            if before.get(name, digest) != digest:
                raise ResumeError(
                    f"{self.tasks[0].files.root / REFERENCE / name}: these log-probabilities of the reference are not "
                    "those that this run began with: they were computed anew, with other kernels or on another kind of "
                    "device, and it would not be the same run; restore the file from before, or start again under "
                    "another run.name"
                )
        return {**before, **now}

    def event(self) -> dict[str, Any]:
        """Return the fields of the event that describes it."""
        return {
            "path": str(self.tasks[0].files.directory), "documents": sum(len(task.known.names) for task in self.tasks),
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
    of = _of(config, prepared, standing, model, device, say)
    tasks = [
        Task(name=name, windows=windows, places=places, files=ReferenceFiles.of(windows, {"of": of}))
        for name, windows, places in (_data(config, prepared, standing) if kept else ())
    ]
    for task in tasks:
        look(task)
    found = Reference(standing=standing, of=of, tasks=tasks, say=say, device=device)
    if not found.is_complete and not (model.is_start and standing.checkpoint is None):
        if model.is_start:  # of another model `_of` has hashed the files already
            _check_unchanged(of, _now(config, prepared, model, device, say), model)
        network, objective = build_reference(model, prepared, standing, device, say)
        found.complete(network, objective)
        del network
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
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
            yield name, windows, places_of_evaluation(windows)


def _of(
    config: FinetuneConfig,
    prepared: RunInputs,
    standing: ResumePoint,
    model: ReferenceModel,
    device: torch.device,
    say: Say,
) -> str:
    """Return the digest of the reference: that of a run which goes on, if it still names the same one. Collective."""
    before = standing.state.identity.get(REFERENCE_OF)
    if before is None:
        return _now(config, prepared, model, device, say)
    if not model.is_start or config.reference.when != "before":  # it is read now, and may be another model today
        _check_unchanged(str(before), _now(config, prepared, model, device, say), model)
    return str(before)


def _now(config: FinetuneConfig, prepared: RunInputs, model: ReferenceModel, device: torch.device, say: Say) -> str:
    """Return the digest of the reference and of how it computes, as they are now. Collective."""
    origin, adapter = brought(model.config, model.origin, model.adapter, say)
    alone = fill_mode(model.config, origin, adapter) == "rank0"
    which = decided_by(model, prepared.identity, origin, adapter, alone=alone)
    how = on_rank0(lambda: _how(config, device), what="find out what it computes with")
    return "-".join(xxhash.xxh3_64_hexdigest(json.dumps(each, sort_keys=True).encode()) for each in (which, how))


def _how(config: FinetuneConfig, device: torch.device) -> dict[str, Any]:
    """Return what decides the last digits of values, but for what the network itself decides."""
    parallel, computed = config.parallel, computed_on(device, {})
    if not config.run.exact:  # ranks have other threads at each world, and only exact runs keep theirs
        del computed["threads"]
    return {
        **computed, "precision": parallel.precision, "fp8_scaling": parallel.fp8_scaling, "tf32": parallel.tf32,
        "mesh": [parallel.mesh.sequence, parallel.mesh.tensor], "micro_batch": config.train.micro_batch,
        "attention": config.model.attention, "loss": config.model.loss,
    }  # fmt: skip


def _check_unchanged(before: str, now: str, model: ReferenceModel) -> None:
    if before.partition("-")[0] != now.partition("-")[0]:
        where = f"reference.model={model.config.model.path}"
        if model.is_start:
            where = f"model.path={model.config.model.path}"
            where += (
                f" or method.adapter={adapter}" if (adapter := getattr(model.config.method, "adapter", None)) else ""
            )
        raise OtherRunError(
            f"{where} is not the model that this run compares with: its files have changed since the run began; put "
            "these back, or choose another run.name"
        )
