"""The checkpoints of one run as one attempt sees them: begin a save, ask for its outcome, load."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, Keep, directory_name, prune, verify
from raytune_fsdp.checkpoint.layout import PieceLayout, make_layout
from raytune_fsdp.checkpoint.location import storage_at
from raytune_fsdp.checkpoint.messages import Meeting, meet
from raytune_fsdp.checkpoint.reading import read_index, read_tensors
from raytune_fsdp.checkpoint.save_in_flight import Flight, Outcome, SaveJob
from raytune_fsdp.checkpoint.staging import Staging, local_piece
from raytune_fsdp.checkpoint.state import RunState
from raytune_fsdp.checkpoint.storage import Draft, Storage
from raytune_fsdp.checkpoint.tensors import init_optimizer_state, tensors_of
from raytune_fsdp.collectives import on_all_ranks
from raytune_fsdp.errors import TransientError
from raytune_fsdp.types import Saved

T = TypeVar("T")

# How a save has ended, as a number.
COMMITTED, FAILED, LOST = 1, 2, 3
_GRACE_SECONDS = 120
_LEAVE_SECONDS = 30


@dataclass(slots=True, kw_only=True)
class Store:
    """Saves, one at a time. All ranks call the same methods at the same steps."""

    storage: Storage
    attempt: int
    keep: Keep
    seconds: float
    """How long a save may take."""
    tensors: Callable[[], dict[str, torch.Tensor]]
    layout: PieceLayout
    staging: Staging | None
    """None: what is saved is read where it is, and must not be touched meanwhile."""
    meeting: Meeting
    scores: dict[int, float] = field(default_factory=dict)
    """By step, to keep the best. On rank 0."""
    _serial: int = 0
    _flight: Flight | None = None
    _told: bool = True
    """Whether training knows the outcome of the flight."""
    _failed: list[Draft] = field(default_factory=list)

    @property
    def asynchronous(self) -> bool:
        return self.staging is not None

    def standing(self) -> tuple[int, bool]:
        """The outcome of the save that training does not know yet, as a number to be sent around (rank 0; 0 is none),
        and whether this rank is still at it. No save can begin while a rank is."""
        if self._flight is None:
            return 0, False
        outcome = None if self._told or dist.get_rank() else self._flight.outcome()
        ended = 0 if outcome is None else COMMITTED if outcome.saved else LOST if outcome.fatal else FAILED
        return ended, self._flight.busy or (dist.get_rank() == 0 and not self._told and not ended)

    def begin(self, state: RunState, *, before: Callable[[], None]) -> None:
        """Save the state after a step. The caller waits for the copy only. No rank may be busy.

        `before` is called on rank 0, in another thread, before the checkpoint is there for others.
        """
        assert self._told, "one save at a time"
        tensors = self.tensors()
        if self.staging is not None:
            self.staging.copy(tensors)
            pieces: Mapping[str, torch.Tensor] = self.staging.pieces
        else:
            pieces = {name: local_piece(tensors[name]) for name in self.layout.mine}
        self._serial += 1
        name = directory_name(state.step, self.attempt)
        job = SaveJob(
            step=state.step,
            serial=self._serial,
            rank=dist.get_rank(),
            world=dist.get_world_size(),
            path=self.storage.where(name),
            draft=self.storage.draft(name, self._serial),
            layout=self.layout,
            pieces=pieces,
            state=state.to_json(),
            seconds=self.seconds,
            meeting=self.meeting,
            leftovers=tuple(self._failed),
            before=before,
            after=lambda: prune(self.storage, self.keep, dict(self.scores)),
        )
        self._failed.clear()
        self._told = False
        self._flight = Flight(job)

    def leave(self) -> None:
        """Let the writer come to its end. The process must not end before: the writer may be in the middle of C++."""
        if self._flight is not None:
            self._flight.join(_LEAVE_SECONDS)

    def close(self, ended: int) -> Outcome:
        """Training has been told of the outcome; of a success, how much and how fast is known on rank 0. All ranks."""
        assert self._flight is not None and not self._told
        job = self._flight.job
        known = self._flight.wait() if job.rank == 0 else None
        self._told = True
        if ended == COMMITTED:
            return known or Outcome(step=job.step, saved=Saved(step=job.step, path=job.path, seconds=0.0, bytes=0))
        self._failed.append(job.draft)
        problem: list[Any] = [known.problem if known else None]
        dist.broadcast_object_list(problem, src=0)
        return Outcome(step=job.step, problem=problem[0], fatal=ended == LOST)

    def finish(self) -> Outcome | None:
        """Wait for the outcome of the save in flight; None where there is none, or it is known. All ranks."""
        if self._flight is None or self._told:
            return None
        job = self._flight.job
        if job.rank == 0:
            self._flight.wait()
            ended, _ = self.standing()
            for rank in range(1, job.world):
                self.meeting.tell(_ended_key(job, rank), ended)
        else:
            ended = self._hear_end(job)
        dist.all_reduce(torch.zeros(()))  # rank 0 keeps the store of messages: it must not go before all have heard
        return self.close(ended)

    def _hear_end(self, job: SaveJob) -> int:
        """Not in a collective: it would not wait for as long as a save may take."""
        deadline = time.monotonic() + 2 * self.seconds + _GRACE_SECONDS
        while (ended := self.meeting.hear(_ended_key(job, job.rank))) is None:
            if time.monotonic() > deadline:
                raise TransientError(f"rank 0 does not say what became of the checkpoint of step {job.step}")
        return int(ended)


def _ended_key(job: SaveJob, rank: int) -> str:
    return f"{job.serial}/ended/{rank}"


def open_store(
    root: str,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    *,
    attempt: int,
    keep: Keep,
    seconds: float,
    asynchronous: bool,
    scores: Mapping[int, float],
) -> Store:
    """The store of a run whose model and optimizer are these. Collective."""
    init_optimizer_state(optimizer)
    now = partial(tensors_of, model, optimizer)
    tensors = now()
    layout = make_layout(tensors)
    return Store(
        storage=storage_at(root),
        attempt=attempt,
        keep=keep,
        seconds=seconds,
        tensors=now,
        layout=layout,
        staging=Staging(tensors, layout.mine) if asynchronous else None,
        meeting=meet(),
        scores=dict(scores),
    )


def load(model: PreTrainedModel, optimizer: torch.optim.Optimizer, found: CommittedCheckpoint) -> None:
    """Read the tensors of a committed checkpoint into model and optimizer. All ranks must call this."""
    init_optimizer_state(optimizer)
    storage = storage_at(found.root)
    tensors = tensors_of(model, optimizer)
    on_all_ranks(lambda: read_tensors(tensors, storage, found.name, index=read_index(storage, found.name)))


def verify_together(found: CommittedCheckpoint, *, hashes: bool, only_rank0: bool = False) -> str | None:
    """What is wrong with a committed checkpoint, the same on all ranks. Each reads a part of it. Collective."""
    share = (0, 1) if only_rank0 else (dist.get_rank(), dist.get_world_size())

    def look() -> str | None:
        return verify(found, hashes=hashes, share=share) if dist.get_rank() == 0 or not only_rank0 else None

    return next(filter(None, on_all_ranks(look)), None)
