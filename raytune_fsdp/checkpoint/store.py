"""Save and load a run's state: the two functions the loop and the assembly call. Collective."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from raytune_fsdp.checkpoint import commit
from raytune_fsdp.checkpoint.state import STATE_FILE, RunState
from raytune_fsdp.checkpoint.tensors import all_finite, init_optimizer_state, read, tensors_of, write
from raytune_fsdp.durable import write_durably
from raytune_fsdp.errors import RaytuneError, TrainingError, TransientError
from raytune_fsdp.types import Saved

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """The checkpoints of one run, as one attempt sees them."""

    directory: Path
    attempt: int
    keep_last: int | None

    def save(self, model: PreTrainedModel, optimizer: torch.optim.Optimizer, state: RunState) -> Saved:
        """Commit the state after a step. All ranks must call this; a run that diverged is not saved."""
        started = time.perf_counter()
        init_optimizer_state(optimizer)
        tensors = tensors_of(model, optimizer)
        if not all_finite(tensors):
            raise TrainingError(
                f"step {state.step}: a weight or moment is not finite, so nothing was saved; continue from the last "
                f"checkpoint in {self.directory} with a lower optim.lr or optim.max_grad_norm"
            )
        final = self.directory / commit.directory_name(state.step, self.attempt)
        staging = final.with_name(final.name + commit.STAGING)
        on_rank0(lambda: self._open(staging, state))
        write(tensors, staging)
        rank = dist.get_rank()
        mine = commit.hash_files(staging, (p.name for p in staging.glob(f"__{rank}_*")))
        everyone: list[dict[str, tuple[int, str]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
        size = on_rank0(lambda: self._commit(staging, final, everyone))
        return Saved(step=state.step, path=final, seconds=time.perf_counter() - started, bytes=size)

    def _open(self, staging: Path, state: RunState) -> None:
        staging.mkdir(parents=True)
        write_durably(staging / STATE_FILE, state.to_json())

    def _commit(self, staging: Path, final: Path, everyone: list[dict[str, tuple[int, str]]]) -> int:
        sums = commit.hash_files(staging, (STATE_FILE, ".metadata"))
        for theirs in everyone:
            sums.update(theirs)
        size = commit.commit(staging, final, sums)
        if self.keep_last is not None:
            commit.prune(self.directory, self.keep_last)
        return size


def load(model: PreTrainedModel, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Read the tensors of a committed checkpoint into model and optimizer. All ranks must call this."""
    init_optimizer_state(optimizer)
    read(tensors_of(model, optimizer), path)


def on_rank0(work: Callable[[], T]) -> T:
    """Do something on rank 0, tell every rank the outcome: none goes on, or waits, after a failure."""
    box: list[tuple[T | None, Exception | None]] = [(None, None)]
    if dist.get_rank() == 0:
        try:
            box[0] = (work(), None)
        except (RaytuneError, OSError) as error:
            box[0] = (None, error)
    dist.broadcast_object_list(box, src=0)
    result, failure = box[0]
    if isinstance(failure, RaytuneError):
        raise failure
    if failure is not None:
        raise TransientError(f"rank 0 could not write to the run's storage: {failure}") from failure
    return result  # type: ignore[return-value]
