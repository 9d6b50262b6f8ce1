"""A pass over the data with the teacher, by all ranks: each keeps what it predicts in its share of the documents.

A prediction depends on the document's packed sample and on the micro-batch that it is computed in, which are those of
the first window that has it, and so never on the number of ranks. What is known already, whichever run has asked, is
not computed again: a pass that was killed goes on where it was.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from raytune_fsdp.base.batch import Cursor, MicroBatch, PackedSample, Taught
from raytune_fsdp.base.collectives import on_all_ranks, on_rank0
from raytune_fsdp.base.errors import ConfigError, DataError, RaytuneError, TrainingError
from raytune_fsdp.base.machine import free_space, nearest_existing
from raytune_fsdp.data.batches import filler, to_batch
from raytune_fsdp.data.reference import NAME, Names, names_of
from raytune_fsdp.data.shared_batches import own_part
from raytune_fsdp.data.teacher import (
    PART_BYTES,
    PART_DOCUMENTS,
    ROW_BYTES,
    KeptPart,
    Lessons,
    Predictions,
    Rest,
    TeacherFiles,
    WindowSaid,
    digest_of_window,
    rest_of,
)
from raytune_fsdp.data.to_device import map_tensors, to_device
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.model.objective.distillation import predictions
from raytune_fsdp.plan.plan import Layout
from raytune_fsdp.record.console import duration, gibibytes
from raytune_fsdp.run.build import Build
from raytune_fsdp.run.fetching import Say
from raytune_fsdp.run.reference.network import build_other, let_go
from raytune_fsdp.run.reference.passes import Place
from raytune_fsdp.run.reference.unchanged import same_values
from raytune_fsdp.run.resume_point import ResumePoint, RunInputs
from raytune_fsdp.run.starting_weights import ReferenceModel
from raytune_fsdp.step.parallel import evaluating

_SAY_SECONDS = 10.0
_SEEN_SECONDS = 60.0
"""For how long what another rank has written is looked for: network file systems remember that it was missing."""
SAID = "these predictions of the teacher"
_TYPES = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The documents of a window that have targets, in its order."""

    names: Names
    targets: np.ndarray[Any, np.dtype[np.int64]]
    """How many each has."""
    datasets: np.ndarray[Any, np.dtype[np.int64]]
    batches: np.ndarray[Any, np.dtype[np.int64]]
    """The micro-batch of each."""


@dataclass(slots=True, kw_only=True)
class TeacherTask:
    """The windows of a run, in the order in which they are read, and what is known of them."""

    files: TeacherFiles
    windows: Windows
    places: Sequence[Place]
    expected: Mapping[Place, str] = field(default_factory=dict)
    """The digests of what the run has used before, where it has."""
    lessons: Lessons = field(init=False)
    said: dict[Place, WindowSaid] = field(default_factory=dict)
    """The windows whose predictions are all there."""
    parts: dict[str, KeptPart] = field(default_factory=dict)
    """All parts that were found whole."""
    damaged: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lessons = Lessons(self.files)

    @property
    def lacking(self) -> list[Place]:
        return [place for place in self.places if place not in self.said]

    def check(self, place: Place, said: WindowSaid) -> None:
        """Refuse other predictions than the run has used before."""
        name = self.files.window_name(self.windows.fingerprint, *place)
        before = {name: self.expected[place]} if place in self.expected else {}
        same_values(before, {name: said.values}, self.files.directory / "windows", SAID)

    def learn(self) -> None:
        """Know what the windows' files say, in the order of the run, whoever has written which part when."""
        self.lessons.close()
        self.lessons = Lessons(self.files)
        named = (self.said[place].parts for place in self.places if place in self.said)
        self.lessons.add(self.parts[part] for parts in named for part in parts)


def look(task: TeacherTask) -> None:
    """Find out of which windows all is known, and verify that, each rank some of the parts. Collective."""
    files, fingerprint = task.files, task.windows.fingerprint

    def read() -> dict[Place, WindowSaid]:
        files.tidy()
        found = ((place, files.read_window(fingerprint, *place)) for place in task.places)
        return {place: said for place, said in found if said is not None}

    found = on_rank0(read, what="read what the teacher has predicted")
    _open(task, [part for said in found.values() for part in said.parts])
    task.said = {place: said for place, said in found.items() if all(part in task.parts for part in said.parts)}
    task.learn()


def _open(task: TeacherTask, names: Sequence[str]) -> None:
    """Open parts and verify them, each rank some. What is damaged counts as not there. Collective."""
    wanted = [name for name in dict.fromkeys(names) if name not in task.parts]
    mine = wanted[dist.get_rank() :: dist.get_world_size()]
    for found in on_all_ranks(lambda: {name: task.files.open(name) for name in mine}):
        task.parts |= {name: part for name, part in found.items() if part is not None}
    task.damaged += [name for name in wanted if name not in task.parts]


def complete(
    task: TeacherTask,
    model: ReferenceModel | None,
    prepared: RunInputs,
    standing: ResumePoint,
    device: torch.device,
    say: Say,
) -> None:
    """Ask the teacher what nobody has asked it yet, and keep it. Collective."""
    lacking, micro_batch = task.lacking, standing.plan.division.micro_batch
    others = on_rank0(task.files.parts, what="look for predictions of the teacher")
    _open(task, others)
    task.lessons.add(task.parts[part] for part in others if part in task.parts)
    mine = lacking[dist.get_rank() :: dist.get_world_size()]
    contents: dict[Place, Contents] = {}
    for found in on_all_ranks(lambda: {place: _contents(task.windows, place, micro_batch) for place in mine}):
        contents |= found
    names, first = np.unique(np.concatenate([contents[place].names for place in lacking]), return_index=True)
    targets = np.concatenate([contents[place].targets for place in lacking])[first][~task.lessons.known.has(names)]
    if len(targets):
        if model is None:
            raise _without_model(task, len(targets))
        on_rank0(partial(_announce, task.files, targets, say), what="look at the disk")
        built = build_other(model, prepared, standing, device, say)
        asking = _Asking(
            task=task, built=built, layout=standing.plan.layout, micro_batch=micro_batch,
            total=int(targets.sum()), say=say,
        )  # fmt: skip
        with evaluating(built.model):
            for place in lacking:
                asking.window(place, contents[place])
        del built, asking
        let_go(device)
    for place in task.lacking:
        _settle(task, place, contents[place], must=model is not None)
    task.learn()
    _check_seen(task, task.said[lacking[-1]].parts)


def joined(tasks: Sequence[TeacherTask], places: Sequence[Place], micro_batch: int) -> Lessons:
    """Return the lessons of a run that has gone on elsewhere. Collective.

    What is predicted in a document is what the first of the run's windows says that has it, which checkpoints record;
    whatever else lies in the same files decides nothing.
    """
    windows, mine = tasks[0].windows, places[dist.get_rank() :: dist.get_world_size()]
    names: dict[Place, Names] = {}
    for found in on_all_ranks(lambda: {place: _contents(windows, place, micro_batch).names for place in mine}):
        names |= found
    of, lessons = {place: task for task in tasks for place in task.said}, Lessons(tasks[-1].files)
    for place in places:
        lessons.add_documents([of[place].parts[part] for part in of[place].said[place].parts], names[place])
    return lessons


def _check_seen(task: TeacherTask, parts: Sequence[str]) -> None:
    """Refuse a cache that is not the same one on all ranks; wait until they see what was written last. Collective."""
    rank, until = dist.get_rank(), time.monotonic() + _SEEN_SECONDS

    def look() -> None:
        for path in map(task.files.path, parts):
            while not path.exists():
                if time.monotonic() > until:
                    raise ConfigError(
                        f"{path} is not there for rank {rank}, and another rank has just written it: the "
                        "predictions of a teacher need storage that all nodes share: set data.cache.path to it"
                    )
                with suppress(OSError):
                    os.listdir(path.parent)  # network file systems ask again for what is listed
                time.sleep(0.1)

    on_all_ranks(look)


def _contents(windows: Windows, place: Place, micro_batch: int) -> Contents:
    """Return the documents of a window."""
    samples = windows.get(*place)[0].samples
    empty = filler(1, seq_len=windows.seq_len, pad_id=windows.pad_id)
    batches = [empty, *(_batch(samples, index, micro_batch) for index in range(-(-len(samples) // micro_batch)))]
    many = [np.array(batch.targets.by_document, dtype=np.int64) for batch in batches]
    datasets = [
        batch.targets.datasets.numpy()[np.cumsum(each) - each] for batch, each in zip(batches, many, strict=True)
    ]
    return Contents(
        names=np.concatenate([names_of(batch, grouped=False) for batch in batches]),
        targets=np.concatenate(many),
        datasets=np.concatenate(datasets),
        batches=np.repeat([batch.index for batch in batches], [len(each) for each in many]),
    )


def _batch(samples: Sequence[PackedSample], index: int, micro_batch: int) -> MicroBatch:
    return to_batch(samples[index * micro_batch : (index + 1) * micro_batch], index=index, after=Cursor())


def _without_model(task: TeacherTask, documents: int) -> DataError:
    files, damaged = task.files, list(dict.fromkeys(task.damaged))
    broken = f": {files.path(damaged[0])} is missing or damaged" if damaged else ""
    if len(damaged) > 1:
        broken += f" (and {len(damaged) - 1} more)"
    return DataError(
        f"teacher.model={files.directory} has no predictions in {documents:,} documents of this run{broken}; copy it "
        f"again, or name the teacher itself, {files.model}, which will be asked"
    )


def _announce(files: TeacherFiles, targets: np.ndarray[Any, Any], say: Say) -> None:
    """Say how much will be kept; refuse if there is no room for it."""
    form, tokens, documents = files.form, int(targets.sum()), len(targets)
    size = tokens * form.target_bytes + documents * ROW_BYTES
    there = nearest_existing(files.directory)
    free = free_space(there)
    if size > free:
        raise ConfigError(
            f"teacher.top_k={form.top_k}: the teacher's predictions of {tokens:,} tokens take {gibibytes(size)} "
            f"({form.target_bytes:,} bytes for each), and {there} has room for {gibibytes(free)}: free space, set "
            "data.cache.path to a larger directory, or lower teacher.top_k"
        )
    say(
        f"the teacher is asked about {tokens:,} tokens of {documents:,} documents: {form.target_bytes:,} bytes for "
        f"each token, {gibibytes(size)} in {files.directory}, where {gibibytes(free)} are free"
    )


@dataclass(slots=True, kw_only=True)
class _Asking:
    """The teacher on this rank, and how far the pass is."""

    task: TeacherTask
    built: Build
    layout: Layout
    micro_batch: int
    total: int
    """Targets that it is asked about."""
    say: Say
    done: int = 0
    started: float = field(default_factory=time.monotonic)
    last: float = field(default_factory=time.monotonic)

    def window(self, place: Place, contents: Contents) -> None:
        """Ask about what is unknown in a window, and keep it. Collective."""
        if _adopted(self.task, place):  # another run with the same windows is faster
            return
        known = self.task.lessons.known.has(contents.names)
        first = np.zeros(len(known), dtype=bool)
        first[np.unique(contents.names, return_index=True)[1]] = True
        keeper = _Keeper(self.task.files)
        self._ask(place, contents, first & ~known, keeper)
        for parts in on_all_ranks(keeper.finish):
            self.task.parts |= {part.name: part for part in parts}
            self.task.lessons.add(parts)
        _settle(self.task, place, contents, must=True)

    def _ask(self, place: Place, contents: Contents, wanted: np.ndarray[Any, Any], keeper: _Keeper) -> None:
        form, layout, rank, windows = self.task.files.form, self.layout, dist.get_rank(), self.task.windows
        samples = windows.get(*place)[0].samples
        busy = np.unique(contents.batches[wanted]).tolist()
        mine = busy[layout.data_rank(rank) :: layout.data_ranks]
        rounds = -(-len(busy) // layout.data_ranks)
        empty = filler(self.micro_batch, seq_len=windows.seq_len, pad_id=windows.pad_id)
        whole = (_batch(samples, mine[each], self.micro_batch) if each < len(mine) else empty for each in range(rounds))
        parts = to_device((own_part(batch, layout, rank) for batch in whole), self.built.site.device)
        for number, part in enumerate(parts):
            found = predictions(
                self.built.model, part, top_k=form.top_k, temperature=form.temperature, dtype=_TYPES[form.dtype],
                tokens=form.vocabulary,
            )  # fmt: skip
            taught = _whole(found, layout, rank, self.built.groups.together)
            if taught is not None and number < len(mine):
                here = contents.batches == mine[number]
                keeper.add(contents.names[here], contents.targets[here], wanted[here], taught)
            asked = np.isin(contents.batches, busy[number * layout.data_ranks : (number + 1) * layout.data_ranks])
            self._progress(int(contents.targets[wanted & asked].sum()))

    def _progress(self, targets: int) -> None:
        self.done += targets
        now = time.monotonic()
        if dist.get_rank() == 0 and now - self.last > _SAY_SECONDS and self.done:
            self.last = now
            left = (now - self.started) / self.done * (self.total - self.done)
            self.say(
                f"the teacher has predicted {self.done:,} of {self.total:,} tokens ({self.done / self.total:.0%}); "
                f"about {duration(left)} are left"
            )


def _whole(taught: Taught, layout: Layout, rank: int, together: dist.ProcessGroup | None) -> Taught | None:
    """Return the predictions of a whole micro-batch on the first of the ranks that share it; None on the others.

    Collective among these.
    """
    mine = map_tensors(taught, lambda tensor: tensor.cpu())
    if together is None:
        return mine
    first = rank % layout.together == 0
    boxes: list[Any] | None = [None] * layout.together if first else None
    dist.gather_object(mine if layout.counts(rank) else None, boxes, group=together, group_dst=0)
    if boxes is None:
        return None
    parts = [each for each in boxes if each is not None]  # members follow one another, as their tokens do
    return Taught(
        ids=torch.cat([each.ids for each in parts]),
        log_probabilities=torch.cat([each.log_probabilities for each in parts]),
        rest=torch.cat([each.rest for each in parts]),
    )


@dataclass(slots=True)
class _Keeper:
    """Keeps what the teacher predicts in this rank's share of a window, part by part: memory holds one at a time."""

    files: TeacherFiles
    _names: list[Any] = field(default_factory=list)
    _said: list[bytes] = field(default_factory=list)
    _rest: list[Rest] = field(default_factory=list)
    _parts: list[KeptPart] = field(default_factory=list)
    _failure: RaytuneError | None = None
    """What has gone wrong here, which all ranks learn at the end of the window."""

    def add(self, names: Names, targets: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any], taught: Taught) -> None:
        """Keep some of a micro-batch's documents."""
        if self._failure is not None:
            return
        ends = np.cumsum(targets)
        if not torch.isfinite(taught.log_probabilities).all() or torch.isnan(taught.rest).any():
            self._failure = TrainingError(
                f"teacher.model={self.files.model} predicts what is no probability: its weights or parallel.precision "
                "are not fit for this data; try parallel.precision=bf16, or another teacher.model"
            )
            return
        for document in np.flatnonzero(wanted).tolist():
            here = slice(int(ends[document] - targets[document]), int(ends[document]))
            said = Predictions(
                ids=taught.ids[here].numpy(), log_probabilities=taught.log_probabilities[here].numpy(),
                rest=taught.rest[here].numpy(),
            )  # fmt: skip
            self._names.append(names[document])
            self._said.append(said.to_bytes(self.files.form))
            self._rest.append(rest_of(said.rest))
        if sum(map(len, self._said)) >= PART_BYTES or len(self._said) >= PART_DOCUMENTS:
            self._write()

    def finish(self) -> list[KeptPart]:
        """Return the parts that are written. Raise what has gone wrong."""
        if self._failure is None and self._said:
            self._write()
        if self._failure is not None:
            raise self._failure
        return self._parts

    def _write(self) -> None:
        try:
            self._parts.append(self.files.write(np.array(self._names, dtype=NAME), self._said, self._rest))
        except DataError as error:
            self._failure = error
        self._names, self._said, self._rest = [], [], []


def _adopted(task: TeacherTask, place: Place) -> bool:
    """Return whether a window is known meanwhile, as another run has asked about it. Collective."""
    read = partial(task.files.read_window, task.windows.fingerprint, *place)
    said = on_rank0(read, what="read what the teacher has predicted")
    if said is None:
        return False
    _open(task, said.parts)
    if not all(part in task.parts for part in said.parts):
        return False
    task.check(place, said)
    task.said[place] = said
    task.lessons.add(task.parts[part] for part in said.parts)
    return True


def _settle(task: TeacherTask, place: Place, contents: Contents, *, must: bool) -> None:
    """Write down where a window's predictions are, unless another run has just done so. Collective.

    `must`: it is an error if that cannot be kept; otherwise it can be found out again.
    """
    if _adopted(task, place):
        return

    def keep() -> WindowSaid:
        said = _said(task, contents)
        task.check(place, said)
        with suppress(*(() if must else (DataError,))):
            task.files.write_window(task.windows.fingerprint, *place, said)
        return said

    task.said[place] = on_rank0(keep, what="keep what the teacher predicts")


def _said(task: TeacherTask, contents: Contents) -> WindowSaid:
    places = task.lessons.places(contents.names)
    order = {part.name: number for number, part in enumerate(task.lessons.parts)}
    rest: dict[str, Rest] = {}
    for dataset, (part, row) in zip(contents.datasets.tolist(), places, strict=True):
        name, (*_, mass, largest) = task.windows.names[dataset], part.table[row].tolist()
        each = Rest(targets=int(part.table["targets"][row]), mass=mass, largest=largest)
        rest[name] = rest.get(name, Rest()) + each
    return WindowSaid(
        parts=tuple(sorted({part.name for part, _ in places}, key=order.__getitem__)),
        documents=len(np.unique(contents.names)),
        values=digest_of_window(task.lessons, contents.names),
        rest=rest,
    )
