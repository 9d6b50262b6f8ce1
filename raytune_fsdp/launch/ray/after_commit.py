"""Work on committed checkpoints beside training: Ray tasks, one at a time, that can neither stall nor end the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray.exceptions import RayError, WorkerCrashedError

from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, committed
from raytune_fsdp.errors import RaytuneError
from raytune_fsdp.launch.ray.failures import DIED, in_words, underlying
from raytune_fsdp.launch.ray.tasks import own_errors
from raytune_fsdp.rundir import RunDir

if TYPE_CHECKING:
    from ray import ObjectRef

_WAIT_SECONDS = 0.5  # between two looks for a signal to stop


class Chore(Protocol):
    """What is done to a checkpoint."""

    what: str
    """In messages: `export`."""
    minutes: float
    """How long it may take, once it was begun."""
    reserves: bool
    """Whether it takes CPUs or GPUs that the ranks of another attempt may need."""

    def due(self, checkpoint: CommittedCheckpoint, asked: Sequence[CommittedCheckpoint]) -> bool:
        """Whether to do it to this checkpoint, when those that were `asked` for are done or will be."""

    def missing(self) -> str | None:
        """What there must be free of the cluster before it may begin beside training."""

    def begin(self, checkpoint: CommittedCheckpoint) -> ObjectRef:
        """Start the task."""

    def done(self, checkpoint: CommittedCheckpoint, result: Any) -> None:
        """Record what the task has returned."""

    def failed(self, checkpoint: CommittedCheckpoint, problem: str) -> None:
        """Record that there is no result."""


class AfterCommit:
    """On the driver: which checkpoints are worked on, and how that ended."""

    def __init__(self, work: Chore, place: RunDir, say: Callable[[str], None]) -> None:
        self.work = work
        self._place = place
        self._say = say
        self._waiting: list[CommittedCheckpoint] = []
        self._running: tuple[ObjectRef, CommittedCheckpoint, float] | None = None
        self._made_room = False
        self._beside_training = True
        self._told = False

    def make_room(self) -> None:
        """Another attempt begins: give back what its ranks may need, until they train."""
        self._made_room = self.work.reserves
        if self._made_room and self._running:
            self.cancel()
            self._waiting.insert(0, self._running[1])
            self._running = None

    def make_up(self) -> None:
        """The ranks train: ask for what earlier attempts and commands did not get to."""
        self._made_room = False
        with suppress(RaytuneError, OSError):  # if the storage does not answer now, the next commit asks again
            for found in committed(self._place.checkpoints):
                self.committed(found)

    def committed(self, checkpoint: CommittedCheckpoint) -> None:
        """Called after a commit: ask for the work if it is due."""
        if checkpoint not in self._asked() and self.work.due(checkpoint, self._asked()):
            self._waiting.append(checkpoint)

    def _asked(self) -> list[CommittedCheckpoint]:
        return [*([self._running[1]] if self._running else []), *self._waiting]

    def look(self) -> None:
        """Report the work that has ended, and begin the next."""
        if self._running:
            task, checkpoint, since = self._running
            late = time.monotonic() - since > self.work.minutes * 60
            if not late and not ray.wait([task], timeout=0)[0]:
                return
            if late:
                self.cancel()
            self._running = None
            self._ended(task, checkpoint, late)
        if self._waiting and not self._made_room and self._has_room(self._waiting[0]):
            checkpoint = self._waiting.pop(0)
            self._running = self.work.begin(checkpoint), checkpoint, time.monotonic()

    def _has_room(self, checkpoint: CommittedCheckpoint) -> bool:
        missing = self.work.missing() if self._beside_training else None
        if missing is not None and not self._told:
            self._say(f"the {self.work.what} of step {checkpoint.step} waits: {missing}")
        self._told = missing is not None
        return missing is None

    def finish(self, stop: Callable[[], bool]) -> bool:
        """Wait for all that is due. False if `stop` ended the wait."""
        self._beside_training = False
        self.make_up()
        if self._asked():
            steps = ", ".join(str(found.step) for found in self._asked())
            self._say(f"waiting for the {self.work.what} of step {steps}")
        while self._asked():
            if stop():
                return False
            self.look()
            if self._running:
                ray.wait([self._running[0]], timeout=_WAIT_SECONDS)
        return True

    def cancel(self) -> None:
        """End the task that is running, if there is one."""
        if self._running:
            with suppress(RayError):
                ray.cancel(self._running[0], force=True)

    def _ended(self, task: ObjectRef, checkpoint: CommittedCheckpoint, late: bool) -> None:
        if late:
            return self._failed(checkpoint, f"it had not ended after {self.work.minutes:g} minutes")
        try:
            with own_errors():
                result = ray.get(task)
        except (RaytuneError, RayError, OSError) as error:
            self._failed(checkpoint, self._why(checkpoint, error))
        else:
            self.work.done(checkpoint, result)

    def _failed(self, checkpoint: CommittedCheckpoint, problem: str) -> None:
        self.work.failed(checkpoint, problem)
        self._say(f"the {self.work.what} of step {checkpoint.step} failed: {problem}; training goes on")

    def _why(self, checkpoint: CommittedCheckpoint, error: BaseException) -> str:
        with suppress(RaytuneError, OSError):
            if checkpoint not in committed(self._place.checkpoints):
                return f"its checkpoint was removed before the {self.work.what}: raise checkpoint.keep_last"
        return f"its process {DIED}" if isinstance(underlying(error), WorkerCrashedError) else in_words(error)
