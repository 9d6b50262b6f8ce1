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
from raytune_fsdp.plan.identity import TEACHER_ALSO, TEACHER_OF, TEACHER_VALUES
from raytune_fsdp.run.fetching import Say
from raytune_fsdp.run.reference.passes import Place, places_of_run
from raytune_fsdp.run.reference.unchanged import (
    KeptBy,
    ModelDigest,
    check_unchanged,
    digest_now,
    how_computed,
    same_values,
)
from raytune_fsdp.run.resume_point import ResumePoint, RunInputs
from raytune_fsdp.run.starting_weights import TeacherModel
from raytune_fsdp.run.teacher.passes import SAID, TeacherTask, complete, joined, look

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
    started, plan, teacher = time.perf_counter(), standing.plan, prepared.teacher
    kept, found = _kept(config, prepared, standing, teacher, device, say), standing.state.identity.get(TEACHER_VALUES)
    recorded: Mapping[str, str] = found if isinstance(found, dict) else {}
    # By rank 0 alone: it reads every window, to count its samples.
    places = on_rank0(lambda: places_of_run(prepared.train, plan, config.run.seed), what="read the prepared data")
    by = {place: _by(kept, recorded, prepared.train.fingerprint, place) for place in places}
    expected = {place: recorded[name] for place, (_, name) in by.items() if name in recorded}
    earlier = _earlier(config, prepared, teacher, kept, by)
    left = [place for place in places if not any(place in task.said for task in earlier)]
    now = TeacherTask(
        files=_files(config, prepared, teacher, kept.now), windows=prepared.train, places=left, expected=expected
    )
    look(now)
    if lacking := len(now.lacking):
        complete(now, teacher.model, prepared, standing, device, say)
    tasks = [task for task in (*earlier, now) if task.places]
    said = {place: each for task in tasks for place, each in task.said.items()}
    rest: dict[str, Rest] = {}
    for place in places:
        for name, each in said[place].rest.items():
            rest[name] = rest.get(name, Rest()) + each
    values = {name: said[place].values for place, (_, name) in by.items()}
    known = same_values(recorded, values, now.files.directory / "windows", SAID)
    return Teacher(
        files=now.files, rest=rest, windows=len(places), computed=lacking, seconds=time.perf_counter() - started,
        lessons=tasks[0].lessons if len(tasks) == 1 else joined(tasks, places, plan.division.micro_batch),
        record={**kept.record(TEACHER_OF, TEACHER_ALSO, used=bool(left)), TEACHER_VALUES: known},
    )  # fmt: skip


def _by(kept: KeptBy, recorded: Mapping[str, str], fingerprint: str, place: Place) -> tuple[str, str]:
    """Return by which digest it is kept what the teacher says of a window, and the name that checkpoints have for that.

    A window that the run has not used is asked about by this attempt: what others have left decides nothing.
    """
    plain = TeacherFiles.window_name(fingerprint, *place)
    names = {of: plain if of == kept.first else f"{of}/{plain}" for of in kept.every}
    return next(((of, name) for of, name in names.items() if name in recorded), (kept.now, names[kept.now]))


def _earlier(
    config: FinetuneConfig,
    prepared: RunInputs,
    teacher: TeacherModel,
    kept: KeptBy,
    by: Mapping[Place, tuple[str, str]],
) -> list[TeacherTask]:
    """Return what is still there of what attempts have used that computed otherwise. Collective."""
    found: list[TeacherTask] = []
    for of in kept.every[:-1] if teacher.kept is None else ():
        mine = [place for place, (each, _) in by.items() if each == of]
        task = TeacherTask(files=_files(config, prepared, teacher, of), windows=prepared.train, places=mine)
        look(task)
        task.places = [*task.said]
        found += [task] if task.said else []
    return found


def _kept(
    config: FinetuneConfig,
    prepared: RunInputs,
    standing: ResumePoint,
    teacher: TeacherModel,
    device: torch.device,
    say: Say,
) -> KeptBy:
    """Return by which digests what the teacher says is kept, if it is still the same one. Collective."""
    identity = standing.state.identity
    before = identity.get(TEACHER_OF)
    if teacher.kept is not None:
        now = ModelDigest(of=teacher.kept.of, older=teacher.kept.of)
    else:
        assert teacher.model is not None, "it has a model, or is kept"
        how = {key: value for key, value in how_computed(config, device).items() if key not in _BESIDE}
        now = digest_now(teacher.model, prepared.identity, how, say)
    if before is not None:
        problem = f"teacher.model={_named(config)} is not the teacher that this run learns from"
        check_unchanged(str(before), now, problem)
    return KeptBy.of(before, identity.get(TEACHER_ALSO), now.of)


def _files(config: FinetuneConfig, prepared: RunInputs, teacher: TeacherModel, of: str) -> TeacherFiles:
    """Return the files of what the teacher says, by a digest of it and of how it computes."""
    if teacher.kept is not None:
        return teacher.kept
    return TeacherFiles.within(
        prepared.train.cache.root, of=of, form=teacher.form, tokenizer=teacher.tokenizer, model=_named(config)
    )


def _named(config: FinetuneConfig) -> str:
    return "" if config.teacher is None else redact(config.teacher.model)
