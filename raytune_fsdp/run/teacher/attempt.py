"""What an attempt has of its teacher's predictions when it begins, and what it computes before it trains."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from raytune_fsdp.base.collectives import on_rank0
from raytune_fsdp.base.redaction import redact
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.data.teacher import Lessons, Rest, TeacherFiles
from raytune_fsdp.plan.identity import TEACHER_OF, TEACHER_VALUES
from raytune_fsdp.run.fetching import Say
from raytune_fsdp.run.reference.passes import places_of_run
from raytune_fsdp.run.reference.unchanged import Digest, check_unchanged, digest_now, how_computed, same_values
from raytune_fsdp.run.resume_point import ResumePoint, RunInputs
from raytune_fsdp.run.starting_weights import TeacherModel
from raytune_fsdp.run.teacher.passes import TeacherTask, complete, look

_BESIDE = ("micro_batch", "mesh", "loss")
"""What changes the last digits of a prediction as its neighbours in a micro-batch do, which no key names either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """All that a run's teacher predicts."""

    files: TeacherFiles
    lessons: Lessons
    rest: Mapping[str, Rest]
    """What is not kept, by dataset."""
    windows: int
    computed: int
    """Windows for which this attempt has asked it."""
    seconds: float
    record: Mapping[str, Any]
    """What checkpoints record of it."""

    def event(self) -> dict[str, Any]:
        """Return the fields of the event that describes it."""
        return {
            "model": self.files.model, "path": str(self.files.directory), "top_k": self.files.form.top_k,
            "temperature": self.files.form.temperature, "documents": len(self.lessons.known.names),
            "windows": self.windows, "computed": self.computed, "seconds": round(self.seconds, 2),
            "not_kept": {name: {"mean": rest.mean, "largest": rest.largest} for name, rest in self.rest.items()},
        }  # fmt: skip


def open_teacher(
    config: FinetuneConfig, prepared: RunInputs, standing: ResumePoint, device: torch.device, say: Say
) -> Teacher | None:
    """Find out what is known of the teacher's predictions, and compute what is lacking; None: there is no teacher.

    Collective.
    """
    if prepared.teacher is None:
        return None
    started, plan = time.perf_counter(), standing.plan
    files = _files(config, prepared, standing, prepared.teacher, device, say)
    # By rank 0 alone: it reads every window, to count its samples.
    places = on_rank0(lambda: places_of_run(prepared.train, plan, config.run.seed), what="read the prepared data")
    task = TeacherTask(files=files, windows=prepared.train, places=places)
    look(task)
    lacking = len(task.lacking)
    if lacking:
        complete(task, prepared.teacher.model, prepared, standing, device, say)
    rest: dict[str, Rest] = {}
    for place in places:
        for name, each in task.said[place].rest.items():
            rest[name] = rest.get(name, Rest()) + each
    values = {files.window_name(prepared.train.fingerprint, *place): task.said[place].values for place in places}
    recorded = standing.state.identity.get(TEACHER_VALUES)
    known = same_values(recorded, values, files.directory / "windows", "these predictions of the teacher")
    return Teacher(
        files=files, lessons=task.lessons, rest=rest, windows=len(places), computed=lacking,
        seconds=time.perf_counter() - started, record={TEACHER_OF: files.of, TEACHER_VALUES: known},
    )  # fmt: skip


def _files(
    config: FinetuneConfig,
    prepared: RunInputs,
    standing: ResumePoint,
    teacher: TeacherModel,
    device: torch.device,
    say: Say,
) -> TeacherFiles:
    """Return the teacher's files: those of a run that goes on, if the teacher is still the same. Collective."""
    name = "" if config.teacher is None else redact(config.teacher.model)
    before = standing.state.identity.get(TEACHER_OF)
    if teacher.kept is not None:
        now = Digest(of=teacher.kept.of, older=teacher.kept.of)
    else:
        assert teacher.model is not None, "it has a model, or is kept"
        how = {key: value for key, value in how_computed(config, device).items() if key not in _BESIDE}
        now = digest_now(teacher.model, prepared.identity, how, say)
    if before is not None:
        check_unchanged(str(before), now, f"teacher.model={name} is not the teacher that this run learns from")
    if teacher.kept is not None:
        return teacher.kept
    return TeacherFiles.within(
        prepared.train.cache.root, of=now.of if before is None else str(before), form=teacher.form,
        tokenizer=teacher.tokenizer, model=name,
    )  # fmt: skip
