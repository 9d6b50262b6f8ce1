"""When a checkpoint is begun, and what becomes of it: the part of the loop that goes on beside training."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from raytune_fsdp.checkpoint.on_demand import Requests
from raytune_fsdp.checkpoint.save_in_flight import Outcome
from raytune_fsdp.checkpoint.state import RunState
from raytune_fsdp.checkpoint.store import Store
from raytune_fsdp.errors import TrainingError, TransientError
from raytune_fsdp.tracking import names
from raytune_fsdp.tracking.tracker import Tracker
from raytune_fsdp.types import Saved

_LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Boundary:
    """What all ranks know between two steps."""

    stop: bool
    """Some rank is to stop."""
    asked: bool
    """Someone has asked for a checkpoint now."""
    free: bool
    """A save may begin."""


@dataclass(slots=True, kw_only=True)
class Saves:
    """The saves of one attempt. All ranks call the same methods at the same steps."""

    store: Store
    tracker: Tracker
    requests: Requests
    """Where people ask for a checkpoint now. Rank 0 looks."""
    saved: Callable[[Saved], None]
    """Told on every rank of every committed checkpoint."""
    _due: bool = False
    """A checkpoint was due when the one before was still being written."""

    def look(self, stop: bool) -> Boundary:
        """Tell each other how things stand, and training's record what became of a save. Collective.

        Between hosts only: the device is not waited for.
        """
        ended, busy = self.store.standing()
        asked = dist.get_rank() == 0 and self.requests.waiting()
        flags = torch.tensor([int(stop), int(asked), int(busy), ended])
        dist.all_reduce(flags)
        if flags[3]:
            self._tell(self.store.close(int(flags[3])))
        return Boundary(stop=bool(flags[0]), asked=bool(flags[1]), free=not flags[2])

    def due(self, boundary: Boundary, planned: bool, step: int) -> bool:
        """Whether to save behind this step: not while the last save is being written, but as soon as it is."""
        wanted = planned or boundary.asked or self._due
        if wanted and not boundary.free:
            if planned:
                self.tracker.event(names.SAVE_POSTPONED, step=step)
            self._due = self._due or planned
            return False
        self._due = False
        return wanted

    def begin(self, state: RunState) -> None:
        """Save the state after a step; training goes on while it is written."""
        self._start(state)
        if not self.store.asynchronous:
            self._finish()
            self.store.leave()  # older ones are removed behind the commit

    def scored(self, step: int, value: float | None) -> None:
        """How good the state behind a step is, for the best to be kept."""
        if value is not None:
            self.store.scores[step] = value

    def last(self, state: RunState) -> None:
        """Save the state that nothing will follow, and wait for it. Raises where it could not be saved."""
        self._finish()
        self._wait_until_free()
        self._start(state)
        outcome = self._finish()
        if outcome is None or outcome.saved is None:
            raise TransientError(
                f"the checkpoint of step {state.step} could not be written: {outcome and outcome.problem}; make room "
                "or mend the storage, then the same command continues from the checkpoint before"
            )

    def _start(self, state: RunState) -> None:
        if dist.get_rank() == 0:
            self.requests.take()
        self.store.begin(state, before=self.tracker.sync)

    def _finish(self) -> Outcome | None:
        outcome = self.store.finish()
        if outcome is not None:
            self._tell(outcome)
        return outcome

    def _wait_until_free(self) -> None:
        """A writer that was given up may still hold the memory that the next one needs."""
        deadline = time.monotonic() + self.store.seconds
        while True:
            busy = torch.tensor([int(self.store.standing()[1]), int(time.monotonic() > deadline)])
            dist.all_reduce(busy)
            if not busy[0]:
                return
            if busy[1]:
                raise TransientError(
                    f"a rank still waits for {self.store.storage.location}, so nothing more can be saved there; the "
                    "same command continues from the last checkpoint when the storage answers"
                )
            time.sleep(_LOOK_SECONDS)

    def _tell(self, outcome: Outcome) -> None:
        if dist.get_rank() == 0:
            self.requests.answer(outcome.step, outcome.saved.path if outcome.saved else None, outcome.problem)
        if outcome.saved is not None:
            saved = outcome.saved
            self.tracker.event(names.SAVED, step=saved.step, path=saved.path, seconds=saved.seconds, bytes=saved.bytes)
            self.saved(saved)
        elif outcome.fatal:
            raise TrainingError(
                f"step {outcome.step}: a weight or moment is not finite ({outcome.problem}), so it was not saved; "
                f"continue from the last checkpoint in {self.store.storage.location} with a lower optim.lr or "
                "optim.max_grad_norm"
            )
        else:
            self.tracker.event(names.SAVE_FAILED, step=outcome.step, problem=outcome.problem)
