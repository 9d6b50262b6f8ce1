"""Following a run from the driver: what the ranks report, a requested stop, resources that do not come."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, committed
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.errors import Interrupted, TrainingError
from raytune_fsdp.launch.phases import Phases
from raytune_fsdp.launch.ray.board import (
    Board,
    Committed,
    Controlled,
    Joined,
    Line,
    Lost,
    Notice,
    PhaseFinished,
    Started,
)
from raytune_fsdp.launch.ray.exports import Exports
from raytune_fsdp.launch.ray.failures import DIED, in_words
from raytune_fsdp.launch.ray.placement_groups import Groups
from raytune_fsdp.launch.ray.resources import Request, nodes, waiting_for
from raytune_fsdp.launch.shared_storage import Token
from raytune_fsdp.launch.signals import Signals
from raytune_fsdp.rundir import RunDir
from raytune_fsdp.threads import in_thread
from raytune_fsdp.tracking import names
from raytune_fsdp.tracking.jsonl import append_event
from raytune_fsdp.types import StopReason

_READ_SECONDS = 0.5  # how late a signal is seen at most
_FIRST_WORD_SECONDS, _NEXT_WORD_SECONDS = 15.0, 60.0
"""When the driver first says what it is waiting for, and how often it repeats that. Workers usually take
6 to 14 s (docs/results.md)."""

_LOOK_SECONDS = 2.0  # between two looks at the placement groups: each is a request to the head
_CONTINUES = "; the same command continues"

_FIT_SECONDS = 10.0
"""How long fit() is given to say what has happened to it, once the board no longer answers."""

_GONE_SECONDS = 5.0
"""While no rank could save anything, a stop waits this long for ranks that are just starting. With what follows, it
takes ten seconds at most."""

_STORAGE_SECONDS = 5.0  # how long a message waits for the number of the last committed step

_ABORT_SECONDS = 2.0
"""How long Ray Train's controller is given to end by itself, before it is killed. One that waits for resources cannot
hear that; one that can takes 0.3 s."""


class Follow:
    """What the driver knows about a run under Ray Train."""

    def __init__(
        self,
        config: FinetuneConfig,
        place: RunDir,
        asked: Request,
        *,
        board: Board,
        token: Token,
        step: int,
        lost: Callable[[], str | None],
        signals: Signals,
        phases: Phases,
        say: Callable[[str], None],
    ) -> None:
        self._config = config
        self._place = place
        self._asked = asked
        self._board = board
        self._lost_process = lost
        self._signals = signals
        self._phases = phases
        self._say = say
        self._ranks: dict[int, Joined] = {}
        self.attempt = 0
        """The last attempt that has started."""
        self.failures = 0
        self.culprit: int | None = None
        """The rank that caused the last failure."""
        self._committed = step
        """The newest committed step, as far as the driver has heard."""
        self._fit: Future[Any] | None = None
        self._controlling: list[Any] = []
        self.groups = Groups()
        trust = config.model.trust_remote_code
        self.exports = Exports(config.export, place, token, trust_remote_code=trust, event=self._event, say=say)
        self._next_look = 0.0
        self._logs: str | None = None
        self._waiting_since = time.monotonic()
        self._next_word = self._waiting_since + _FIRST_WORD_SECONDS
        self._stopping_since: float | None = None

    def until(self, fit: Future[Any]) -> None:
        """Follow the run to its end. Raises if there is no point in waiting longer; then `end` it."""
        self._fit = fit
        self._signals.hold()
        while not wait([fit], timeout=0).done:
            self._check_ray()
            try:
                notices = self._board.read(_READ_SECONDS)
            except RayError as error:
                self._check_ray()
                if not wait([fit], timeout=_FIT_SECONDS).done:  # fit() may say why
                    died = isinstance(error, ActorDiedError)
                    raise self.ended_by(in_words(error) if died else "Ray no longer answers") from error
                break
            for notice in notices:
                self._hear(notice)
            self._check_stop()
            self._check_waiting()
            self.exports.look()
        last: list[Notice] = []
        with suppress(RayError):
            last = self._board.read(0)
        for notice in last:
            self._hear(notice)

    def end(self) -> None:
        """End what Ray Train runs for this run, and nothing else: the Ray, and other actors in it, may be a caller's.

        The ranks end with the controller, which owns them, and what they have started ends with them.
        """
        if self._lost_process():
            return  # nothing answers; the session ends what is left
        for notice in self._board.close(_READ_SECONDS):
            if isinstance(notice, Controlled):
                self._hear_controller(notice)
        if self._controlling and self._fit is not None:
            if not self._fit.done():
                self._controlling[0].abort.remote()
                wait([self._fit], timeout=_ABORT_SECONDS)
            with suppress(RayError):
                for actor in self._controlling:
                    ray.kill(actor)
        with suppress(RayError):
            self.groups.clear()

    def describe(self, rank: int | None, cause: str) -> str:
        """A failure with everything that helps: which rank, where, why, the last committed step, and the logs."""
        who = "the run failed" if rank is None else f"rank {rank}{self._where(rank)} failed"
        saved = self.last_step()
        where = f"the last committed step is {saved}" if saved else "no step was committed yet"
        logs = f"; the logs of all ranks are in {self._logs}" if self._logs else ""
        return f"{who}: {cause}. {where[0].upper()}{where[1:]}{logs}{_CONTINUES}"

    def _hear(self, notice: Notice) -> None:
        match notice:
            case Controlled():
                self._hear_controller(notice)
            case Line(text):
                self._say(text)
            case Joined(rank=rank):
                self._ranks[rank] = notice
            case Started(attempt, logs):
                self.attempt, self._logs = attempt, logs
                self._event(names.RANKS_JOINED, ranks=[asdict(self._ranks[rank]) for rank in sorted(self._ranks)])
            case PhaseFinished(phase):
                self._reached(phase)
            case Lost(rank, cause, again):
                self._lost(rank, cause, again)
            case Committed(step):
                self._committed = step
                self.exports.committed(CommittedCheckpoint(step, self.attempt, self._place.checkpoints))

    def _hear_controller(self, notice: Controlled) -> None:
        self._controlling = notice.actors
        self.groups.made_by(notice.controller)

    def _reached(self, phase: str) -> None:
        if phase == "workers" and "workers" in self._phases.seconds:
            return
        self._phases.finished(phase)
        if phase == "step":
            self._say(f"first step after {self._phases.total:.1f} s: {self._phases.in_words()}")
            self.exports.make_up()
            self._event(names.FIRST_STEP, seconds=round(self._phases.total, 2), phases=self._phases.seconds)

    def _lost(self, rank: int, cause: str, again: bool) -> None:
        self.culprit = rank
        if not self.attempt and not again:
            return  # refused before anything was written
        self._event(
            names.ATTEMPT_FAILED,
            rank=rank,
            node=self._ranks[rank].node if rank in self._ranks else None,
            cause=cause,
            last_step=self.last_step(),
            logs=self._logs,
        )
        self.failures += 1
        if again and not 0 <= self._config.cluster.max_failures < self.failures:
            self._restart(rank, cause)

    def _restart(self, rank: int | None, cause: str) -> None:
        self._say(f"{self.describe(rank, cause).removesuffix(_CONTINUES)}; the run goes on from there")
        self._ranks = {}
        self._logs = None
        self._waiting_since = time.monotonic()
        self._next_word = self._waiting_since + _FIRST_WORD_SECONDS
        self._phases.restart()

    def last_step(self) -> int:
        """The newest committed step, 0 if there is none. Where storage does not answer: as the ranks have said."""
        asked = in_thread(lambda: committed(self._place.checkpoints), "storage")
        if wait([asked], timeout=_STORAGE_SECONDS).done and asked.exception() is None:
            self._committed = max((found.step for found in asked.result()), default=0)
        return self._committed

    def _check_ray(self) -> None:
        """Raise if the Ray of this run is no more: calls of it would wait for long, or end this process."""
        if self._lost_process():
            raise self.ended_by(f"Ray's {self._lost_process()} process on this machine {DIED}")

    def _check_stop(self) -> None:
        if not self._signals.count:
            return
        now = time.monotonic()
        training = "step" in self._phases.seconds and bool(self._ranks)
        if self._stopping_since is None:
            self._stopping_since = now
            self._board.stop(StopReason.SIGNAL)
            what = "a checkpoint is committed after the current step" if training else "no step is being trained"
            self._say(f"stopping: {what} (again to stop at once)")
        if self._signals.count > 1 or (not training and now - self._stopping_since > _GONE_SECONDS):
            raise Interrupted("stopped without another checkpoint; the same command continues from the last one")

    def _check_waiting(self) -> None:
        """Say what is missing, and give up after `cluster.wait_minutes`."""
        now = time.monotonic()
        if len(self._ranks) >= self._asked.workers or now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        group, forgotten = self.groups.look()
        if forgotten:
            self.failed("a worker died, or could not reach the others, while the ranks were starting")
        if now < self._next_word:
            return
        minutes = self._config.cluster.wait_minutes
        waited = now - self._waiting_since
        missing = waiting_for(self._asked, nodes(), group)
        if waited > 60 * minutes:
            raise TrainingError(
                f"cluster.wait_minutes={minutes:g}: the workers did not start in that time; {missing}. Free the "
                "resources, add nodes, ask for less (cluster.workers), or wait longer; the same command continues"
            )
        self._say(f"{missing} ({waited:.0f} s, at most {minutes:g} min)")
        self._next_word = min(now + _NEXT_WORD_SECONDS, self._waiting_since + 60 * minutes + 1)

    def failed(self, cause: str) -> None:
        """Record an attempt whose failure Ray Train does not report. Raises if there were too many."""
        ended = self.ended_by(cause)
        if 0 <= self._config.cluster.max_failures < self.failures:
            raise ended
        self._restart(None, cause)

    def ended_by(self, cause: str) -> TrainingError:
        """Record a failure that is no rank's; the error to end the run with, if no attempt follows."""
        self._event(
            names.ATTEMPT_FAILED, rank=None, node=None, cause=cause, last_step=self.last_step(), logs=self._logs
        )
        self.failures += 1
        return TrainingError(self.describe(None, cause))

    def _where(self, rank: int) -> str:
        return f" on {self._ranks[rank].node}, process {self._ranks[rank].pid}," if rank in self._ranks else ""

    def _event(self, name: str, **fields: object) -> None:
        append_event(self._place.events, name, attempt=self.attempt, fields=fields)
