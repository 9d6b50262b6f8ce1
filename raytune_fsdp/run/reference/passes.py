"""A pass over the data with the reference, by all ranks: each computes its share of a window, and one file is written.

A value depends on the document's packed sample and on the micro-batch that it is computed in, which are those of the
window, and so never on the number of ranks. A pass that was killed goes on with the first window that has no file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from raytune_fsdp.base.batch import Cursor, MicroBatch
from raytune_fsdp.base.collectives import on_all_ranks, on_rank0
from raytune_fsdp.base.errors import TrainingError
from raytune_fsdp.data.batches import filler, to_batch
from raytune_fsdp.data.cache import REFERENCE
from raytune_fsdp.data.reference import Known, Names, ReferenceFiles, Values, digest_of_values, names_of
from raytune_fsdp.data.shared_batches import own_part
from raytune_fsdp.data.stream import Stream
from raytune_fsdp.data.to_device import to_device
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.model.objective.groups import GroupObjective
from raytune_fsdp.plan.plan import Layout, Plan
from raytune_fsdp.run.reference.unchanged import same_values
from raytune_fsdp.step.parallel import evaluating

Place = tuple[int, int]
"""Epoch and window."""

_SAY_SECONDS = 10.0


@dataclass(slots=True, kw_only=True)
class Task:
    """The windows of some data that need values, in the order in which they are read."""

    name: str
    windows: Windows
    places: Sequence[Place]
    files: Sequence[ReferenceFiles]
    """Those of earlier attempts, if they computed otherwise, and at the end those of this one."""
    recorded: Mapping[str, str] = field(default_factory=dict)
    """The digests of the values that the run has used, by file."""
    lacking: list[Place] = field(default_factory=list)
    """Those without a file."""
    known: Known = field(default_factory=lambda: Known.of(()))
    digests: dict[str, str] = field(default_factory=dict)
    """Of the values in each file, by its name."""
    uses_now: bool = False
    """Whether values are in files of this attempt."""

    @property
    def now(self) -> ReferenceFiles:
        """Those of this attempt."""
        return self.files[-1]

    def of(self, place: Place) -> ReferenceFiles:
        """Return the files by which a window's values are recorded. A new one's are those of this attempt: what others
        have left decides nothing."""
        return next((each for each in self.files if each.name(*place) in self.recorded), self.now)

    def read(self, place: Place) -> tuple[ReferenceFiles, tuple[Names, Values]] | None:
        """Return what is known of a window, and from where: lost values may have been computed again."""
        for files in (self.of(place), self.now):
            if (found := files.read(*place)) is not None:
                return files, found
        return None

    def checked(self, digests: Mapping[str, str]) -> dict[str, str]:
        """Return the digests of all values that the run has ever used. Refuse others than checkpoints name."""
        what = "these log-probabilities of the reference"
        return same_values(self.recorded, digests, self.now.root / REFERENCE, what)


def places_of_run(windows: Windows, plan: Plan, seed: int) -> list[Place]:
    """Return the windows that a run reads to its end, each once, in its order. Windows that have none yet are built."""
    stream, needed = Stream(windows, seed=seed), plan.division.samples_before(plan.steps + 1)
    found: list[Place] = []
    number = empty = 0
    while needed > 0:
        epoch, place = stream.place(Cursor(), number)
        if windows.repeats and epoch:
            break
        found.append((epoch, stream.window_at(epoch, place)))
        samples = len(windows.get(*found[-1])[0].samples)
        empty = 0 if samples else empty + 1
        stream.check_not_empty(empty)
        needed, number = needed - samples, number + 1
    return found


def look(task: Task) -> None:
    """Find out which windows have a file, and read these, on every rank alike. Collective.

    A damaged file counts as none, and is replaced.
    """

    def read() -> tuple[Known, list[Place], dict[str, str], bool]:
        parts: list[tuple[Names, Values]] = []
        lacking, digests, uses_now = [], {}, False
        for place in task.places:
            found = task.read(place)
            if found is None:
                lacking.append(place)
            else:
                files, part = found
                parts.append(part)
                digests[task.of(place).name(*place)] = digest_of_values(*part)
                uses_now |= files is task.now
        return Known.of(parts), lacking, digests, uses_now

    found = on_rank0(read, what="read the log-probabilities of the reference")
    task.known, task.lacking, task.digests, task.uses_now = found


def compute(
    task: Task,
    model: PreTrainedModel,
    objective: GroupObjective,
    *,
    micro_batch: int,
    layout: Layout,
    device: torch.device,
    say: Callable[[str], None],
) -> None:
    """Compute what is lacking, and keep it. Collective."""
    said, total = time.monotonic(), len(task.lacking)
    with evaluating(model):
        for done, place in enumerate(list(task.lacking)):
            names, values = _of_window(task, place, model, objective, micro_batch, layout, device)
            if not np.isfinite(values).all():
                raise TrainingError(
                    f"the reference gives a document of {task.name} a log-probability that is not finite: its "
                    "weights or parallel.precision are not fit for this data; try parallel.precision=bf16, or another "
                    "reference.model"
                )
            digest = {task.of(place).name(*place): digest_of_values(names, values)}
            task.checked(digest)  # before anything is kept
            on_rank0(lambda: task.now.write(*place, names, values), what="keep what the reference said")  # noqa: B023
            task.known, task.digests = task.known.with_new(names, values), task.digests | digest
            task.uses_now = True
            task.lacking.remove(place)
            if dist.get_rank() == 0 and time.monotonic() - said > _SAY_SECONDS:
                said = time.monotonic()
                say(f"the reference has read {done + 1} of {total} windows of {task.name}")


def _of_window(
    task: Task,
    place: Place,
    model: PreTrainedModel,
    objective: GroupObjective,
    micro_batch: int,
    layout: Layout,
    device: torch.device,
) -> tuple[Names, Values]:
    """Return the documents that a window is the first to have, and their values, on every rank. Collective."""
    rank = dist.get_rank()
    samples = task.windows.get(*place)[0].samples
    starts = range(0, len(samples), micro_batch)
    mine: list[tuple[MicroBatch, Names]] = []
    for index in range(layout.data_rank(rank), len(starts), layout.data_ranks):
        batch = to_batch(samples[starts[index] : starts[index] + micro_batch], index=index, after=Cursor())
        names = names_of(batch)
        if not task.known.has(names).all():
            mine.append((batch, names))
    rounds = max(on_all_ranks(lambda: len(mine)))
    found: list[tuple[int, Names, Values]] = []
    empty = filler(micro_batch, seq_len=task.windows.seq_len, pad_id=task.windows.pad_id)
    batches = [batch for batch, _ in mine] + [empty] * (rounds - len(mine))
    parts = to_device((own_part(batch, layout, rank) for batch in batches), device)
    sums = [objective.measured(model, part)[0].answers for part in parts]
    for (batch, names), values in zip(mine, sums, strict=False):
        if layout.counts(rank) and layout.member(rank) == 0:
            found.append((batch.index, names, values.cpu().numpy()))
    gathered: list[Any] = on_all_ranks(lambda: found)
    every = sorted((part for parts in gathered for part in parts), key=lambda part: part[0])
    known = Known.of((names, values) for _, names, values in every)
    new = ~task.known.has(known.names)
    return known.names[new], known.values[new]
