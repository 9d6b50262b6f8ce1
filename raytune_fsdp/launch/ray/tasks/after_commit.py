"""Work on committed checkpoints during training: Ray tasks, one at a time, that can neither stall nor end the run.

The driver hears signals, drains and hangs between two looks, so none of them waits for a file: what reads or writes the
run's storage is called in a thread, one call after the other, and looked at when it has come back.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray.exceptions import RayError, WorkerCrashedError

from raytune_fsdp.base.errors import RaytuneError
from raytune_fsdp.base.lease import TakenOverError
from raytune_fsdp.base.threads import in_thread
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, committed
from raytune_fsdp.launch.ray.failures import failure_in_words, underlying
from raytune_fsdp.launch.ray.tasks.calls import end, own_errors
from raytune_fsdp.launch.ray.watch.head import DIED
from raytune_fsdp.plan.run_dir import RunDir

if TYPE_CHECKING:
    from ray import ObjectRef

_WAIT_SECONDS = 0.5  # between two looks for a signal to stop
_TRIES = 2
"""How often one command tries a checkpoint: what fails twice has its reasons, and the end of the run waits for it."""


class Chore(Protocol):
    """A kind of work on checkpoints."""

    what: str
    """The name of the work in messages: `export`."""
    minutes: float
    """How long it may take, once it was begun."""
    reserves: bool
    """Whether it takes CPUs or GPUs that the ranks of another attempt may need."""

    def due(self, checkpoint: CommittedCheckpoint, asked: Sequence[CommittedCheckpoint]) -> bool:
        """Return whether to work on this checkpoint. Read storage.

        `asked`: those for which the work is done or will be.
        """

    def missing(self, *, during_training: bool) -> str | None:
        """Return what the cluster lacks for this work to begin, during training or after it; None if nothing."""

    def begin(self, checkpoint: CommittedCheckpoint) -> ObjectRef:
        """Start the task."""

    def record(self, checkpoint: CommittedCheckpoint, result: Any) -> None:
        """Keep what the task has returned. Write to storage."""

    def done(self, checkpoint: CommittedCheckpoint, result: Any) -> None:
        """Say that the result is kept."""

    def failed(self, checkpoint: CommittedCheckpoint, problem: str) -> None:
        """Say that there is no result."""


class AfterCommit:
    """Decides on the driver which checkpoints are worked on, and says how that ended."""

    def __init__(self, work: Chore, place: RunDir, answers: Callable[[], bool], say: Callable[[str], None]) -> None:
        self.work = work
        self._place = place
        self._answers = answers
        """Whether Ray's head answers: otherwise a question about room in the cluster would wait for it."""
        self._say = say
        self._waiting: list[CommittedCheckpoint] = []
        self._running: tuple[ObjectRef, CommittedCheckpoint, float] | None = None
        self._recording: list[CommittedCheckpoint] = []
        self._failures: Counter[CommittedCheckpoint] = Counter()
        self._made_room = False
        self._during_training = True
        self._told = False
        self._no_room_since: float | None = None
        self._calls: deque[tuple[Callable[[], Any], Callable[[Future[Any]], None]]] = deque()
        """Calls that use storage, and who gets their outcome."""
        self._call: tuple[Future[Any], Callable[[Future[Any]], None]] | None = None

    def make_room(self) -> None:
        """Give back what the ranks of another attempt may need, until they train."""
        self._made_room = self.work.reserves
        if self._made_room and self._running:
            self.cancel()
            self._waiting.insert(0, self._running[1])
            self._running = None

    def make_up(self) -> None:
        """Ask for what earlier attempts and commands did not get to, now that the ranks train."""
        self._made_room = False
        self._ask(lambda: committed(self._place.checkpoints))

    def committed(self, checkpoint: CommittedCheckpoint) -> None:
        """Called after a commit: ask for the work if it is due."""
        self._ask(lambda: [checkpoint])

    def _ask(self, candidates: Callable[[], Sequence[CommittedCheckpoint]]) -> None:
        self._calls.append((partial(self._due, candidates), self._found))
        self._look_at_storage()

    def _due(self, candidates: Callable[[], Sequence[CommittedCheckpoint]]) -> list[CommittedCheckpoint]:
        chosen: list[CommittedCheckpoint] = []
        for found in candidates():
            asked = [*self._asked(), *chosen]
            # What is made of a checkpoint must not depend on the clock.
            if found.lasting and found not in asked and self._failures[found] < _TRIES and self.work.due(found, asked):
                chosen.append(found)
        return chosen

    def _found(self, outcome: Future[list[CommittedCheckpoint]]) -> None:
        with suppress(RaytuneError, OSError):  # if the storage does not answer now, the next commit asks again
            self._waiting += [each for each in outcome.result() if each not in self._asked()]

    def _asked(self) -> list[CommittedCheckpoint]:
        return [*self._recording, *([self._running[1]] if self._running else []), *self._waiting]

    def _look_at_storage(self) -> None:
        """Hear of a call that has come back, and make the next one."""
        while True:
            if self._call is not None:
                outcome, tell = self._call
                if not outcome.done():
                    return
                self._call = None
                if isinstance(outcome.exception(), TakenOverError):
                    outcome.result()
                tell(outcome)
            if not self._calls:
                return
            call, tell = self._calls.popleft()
            self._call = in_thread(call, "storage"), tell

    def look(self) -> None:
        """Report the work that has ended, and begin the next."""
        self._look_at_storage()
        if self._running:
            task, checkpoint, since = self._running
            done = bool(ray.wait([task], timeout=0)[0])  # it may have ended in time while this process was away
            late = not done and time.monotonic() - since > self.work.minutes * 60
            if not late and not done:
                return
            if late:
                self.cancel()
            self._running = None
            self._ended(task, checkpoint, late)
        if self._waiting and not self._made_room and self._answers() and self._has_room(self._waiting[0]):
            checkpoint = self._waiting.pop(0)
            try:
                self._running = self.work.begin(checkpoint), checkpoint, time.monotonic()
            except (RayError, OSError) as error:  # no room in Ray's object store
                self._failed(checkpoint, failure_in_words(error))

    def _has_room(self, checkpoint: CommittedCheckpoint) -> bool:
        missing, now = self.work.missing(during_training=self._during_training), time.monotonic()
        if missing is not None and not self._told:
            self._say(f"the {self.work.what} of step {checkpoint.step} waits: {missing}")
        self._told = missing is not None
        since, self._no_room_since = self._no_room_since, None if missing is None else self._no_room_since or now
        if missing is None or self._during_training or since is None or now - since < self.work.minutes * 60:
            return missing is None
        self._waiting.remove(checkpoint)
        self._no_room_since = None
        self._failed(checkpoint, f"{missing}, and there were not for {self.work.minutes:g} minutes", for_good=True)
        return False

    def finish(self, stop: Callable[[], bool], lost: Callable[[], str | None]) -> bool:
        """Wait for all that is due. Return False if `stop` ended the wait, or if the Ray is `lost`."""
        self._during_training, said = False, False
        self.make_up()
        while self._asked() or self._calls or self._call is not None:
            if stop() or lost():
                return False
            self.look()
            if self._asked() and not said:
                said = True
                steps = ", ".join(str(found.step) for found in self._asked())
                self._say(f"waiting for the {self.work.what} of step {steps} (Ctrl-C leaves it to another call)")
            if self._running:
                ray.wait([self._running[0]], timeout=_WAIT_SECONDS)
            elif self._asked() or self._call is not None:
                time.sleep(_WAIT_SECONDS / 10)
        return True

    def cancel(self) -> None:
        """End the task that is running, if there is one."""
        if self._running:
            end(self._running[0])

    def _ended(self, task: ObjectRef, checkpoint: CommittedCheckpoint, late: bool) -> None:
        if late:
            return self._failed(checkpoint, f"it had not ended after {self.work.minutes:g} minutes", for_good=True)
        self._recording.append(checkpoint)
        try:
            with own_errors():
                result = ray.get(task)
        except (RaytuneError, RayError, OSError) as error:
            self._calls.append((partial(self._why, checkpoint, error), partial(self._not_done, checkpoint, error)))
        else:
            call = partial(self.work.record, checkpoint, result)
            self._calls.append((call, partial(self._recorded, checkpoint, result)))
        self._look_at_storage()

    def _recorded(self, checkpoint: CommittedCheckpoint, result: Any, outcome: Future[None]) -> None:
        self._recording.remove(checkpoint)
        try:
            outcome.result()
        except (RaytuneError, OSError) as error:
            self._failed(checkpoint, f"its result could not be written: {failure_in_words(error)}")
        else:
            self.work.done(checkpoint, result)

    def _not_done(self, checkpoint: CommittedCheckpoint, error: BaseException, outcome: Future[str]) -> None:
        self._recording.remove(checkpoint)
        self._failed(checkpoint, failure_in_words(error) if outcome.exception() else outcome.result())

    def _failed(self, checkpoint: CommittedCheckpoint, problem: str, *, for_good: bool = False) -> None:
        """Count and report a failure. `for_good`: this command stops trying; another one may."""
        self._failures[checkpoint] += _TRIES if for_good else 1
        self.work.failed(checkpoint, problem)
        goes_on = "; training goes on" if self._during_training else ""
        self._say(f"the {self.work.what} of step {checkpoint.step} failed: {problem}{goes_on}")

    def _why(self, checkpoint: CommittedCheckpoint, error: BaseException) -> str:
        with suppress(RaytuneError, OSError):
            if checkpoint not in committed(self._place.checkpoints):
                return f"its checkpoint was removed before the {self.work.what}: raise checkpoint.keep_last"
        return f"its process {DIED}" if isinstance(underlying(error), WorkerCrashedError) else failure_in_words(error)
