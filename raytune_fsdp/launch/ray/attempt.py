"""One attempt to train the run: everything that begins with the wait for its workers and ends with its last rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import ray
from ray import cloudpickle
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

from raytune_fsdp.base.errors import TrainingError
from raytune_fsdp.launch.phases import Phases
from raytune_fsdp.launch.ray.board import Ended, Ending, Failed, Joined
from raytune_fsdp.launch.ray.failures import death_of, died
from raytune_fsdp.launch.ray.nodes.node_watch import NodeWatches
from raytune_fsdp.launch.ray.resources import answering, lacks_room, nodes, way_out
from raytune_fsdp.launch.ray.watch.listening import Listening
from raytune_fsdp.launch.ray.watch.ranks import Watch
from raytune_fsdp.record import names

_FIRST_WORD_SECONDS, _NEXT_WORD_SECONDS = 15.0, 60.0
"""When the driver first says what it is waiting for, and how often it repeats that. Workers usually take
6 to 14 s (docs/results.md)."""
_ASK_SECONDS, _ASK_AGAIN_SECONDS = 0.3, 0.5
"""How long Ray may take to say why a process has ended, before the others are ended, and afterwards. It needs tenths of
a second on a busy machine."""
_FIT_SECONDS = 2.0  # how long fit() may take to come back once its controller was ended; it takes milliseconds
_GONE_SECONDS, _GONE_AT_MOST_SECONDS = 5.0, 60.0
"""How long processes that were killed may take to end, as those with much memory do; the latter where their node says
that they are there, and the next ones are to have their GPUs."""


class Killed(NamedTuple):
    """The reason why the driver has ended the ranks of an attempt, which has failed by that."""

    cause: str
    rank: int | None
    """The rank that is to blame."""
    hang: bool = False
    """Whether the ranks had hung, and the run may be the cause."""


@dataclass(slots=True, kw_only=True)
class RayAttempt:
    """One fit() of Ray Train, as the driver knows it."""

    watch: Watch
    nodes: NodeWatches
    phases: Phases
    waiting: Waiting
    fit: Future[Any] | None = None
    """The call of fit(); None while there is no room for its workers."""
    workers: int = 0
    """How many ranks it has asked for."""
    controller: list[Any] = field(default_factory=list)
    """Handles of Ray Train's controller, and of the actor that would outlive it; none once they are ended."""
    controller_id: str = ""
    ranks: dict[int, Joined] = field(default_factory=dict)
    """The ranks that have started."""
    logs: str | None = None
    """The directory of the ranks' logs; None before they have agreed where to begin."""
    step: int = 0
    """The step that rank 0 trains, as far as is known; 0 before its first one."""
    reports: dict[int, Failed] = field(default_factory=dict)
    """What ranks have said of their own failure."""
    ends: dict[int, str | None] = field(default_factory=dict)
    """How processes of ranks have ended, as the watches of their nodes have seen."""
    ending: bool = False
    """Whether Ray Train ends the ranks itself."""
    error: BaseException | None = None
    """The error that has ended it, where that was known before fit() came back."""
    unexplained: Joined | None = None
    """A rank whose process has ended before Ray could say why."""
    killed: Killed | None = None
    making_way_for: str = ""
    """The reason for which it was asked to end for another attempt, if it was."""
    ending_since: float | None = None
    """When the first rank has said that it failed, or the ranks were ended, by the driver's clock."""
    next_look: float = 0.0
    """When the driver looks at the cluster's nodes again."""

    @property
    def trains(self) -> bool:
        """Whether it has come to its first step."""
        return "step" in self.phases.seconds and bool(self.ranks)

    @property
    def reached(self) -> int:
        """The step that it has reached, as far as the driver or a rank that has failed knows."""
        return max([self.step, *(report.step for report in self.reports.values())])

    @property
    def seconds(self) -> dict[str, object]:
        """What the record says of the time of an attempt that has failed, as fields of that event."""
        ending = self.ending_since
        phases = {} if "step" in self.phases.seconds else {"phases": self.phases.seconds}
        return {
            "seconds": round(self.phases.elapsed, 2),
            names.STOP_SECONDS: None if ending is None else round(self.waiting.seconds_since(ending), 2),
            **phases,
        }

    def rank_lost(self) -> int | None:
        """Return the first rank whose node no longer answers, also where Ray does not know that yet."""
        there = {node.id for node in answering(nodes(leaving=True))}
        return min((rank for rank, joined in self.ranks.items() if joined.node_id not in there), default=None)

    def out_of_memory(self, rank: int) -> str | None:
        """Say what the rank had in memory, if the kernel has ended it for that."""
        return self.nodes.out_of_memory(self.ranks[rank]) if rank in self.ranks else None

    def error_by(self, notice: Ended | Ending) -> BaseException | None:
        """Return the error by which this ends the attempt; None if it goes on, ends anyway, or fit() will say why."""
        if isinstance(notice, Ending):
            if notice.controller != self.controller_id:
                return None  # a late word of the attempt before
            self.ending = True
            with suppress(Exception):  # some errors cannot be read
                return None if notice.error is None else cast(BaseException, cloudpickle.loads(notice.error))
            return None
        joined = self.ranks.get(notice.rank)
        if joined is None or joined.pid != notice.pid:
            return None
        self.ends[notice.rank] = notice.how
        if self.ending or self.error is not None or self.killed is not None:
            return None
        error: BaseException | None
        try:
            error = death_of(joined, _ASK_SECONDS)
        except GetTimeoutError:
            error, self.unexplained = died(notice.rank, ActorDiedError()), joined
        return None if self.fit is None or self.fit.done() else error

    def failure(self, fit: Future[Any]) -> BaseException | None:
        """Wait for the end of fit(). Return the error that has ended the attempt, None if the run is complete."""
        found = fit.exception()
        return None if found is None else self.error or found

    def end(self, error: BaseException) -> None:
        """End the ranks and the controller at once: Ray Train looks at them twice a second, and is slow to clear up."""
        self.error = self.error or error
        self.nodes.kill_watched(self.ranks)
        self.end_controller()
        if self.fit is not None:
            wait([self.fit], timeout=_FIT_SECONDS)
        if self.unexplained is not None:
            with suppress(GetTimeoutError):
                self.error = death_of(self.unexplained, _ASK_AGAIN_SECONDS) or self.error

    def end_ranks(self, say: Callable[[str], None], longer: Callable[[], bool]) -> None:
        """End what is left of the ranks, and wait until it has: two attempts would share GPUs, and files.

        `longer`: whether to wait on for processes that their node still sees.
        """
        self.nodes.kill_watched(self.ranks)
        until, said = time.monotonic() + _GONE_AT_MOST_SECONDS, False
        while (left := self.nodes.wait(self.ranks, _GONE_SECONDS)) and longer() and time.monotonic() < until:
            if not said:
                say(f"waiting for killed ranks to be gone on {len(left)} node{'s' * (len(left) != 1)}")
            said = True
        self.nodes.end()

    def end_controller(self) -> None:
        """Kill the controller, and the actor that it leaves behind where it is killed."""
        for actor in self.controller:
            with suppress(RayError):
                ray.kill(actor)
        self.controller = []


class Waiting:
    """The wait for workers. It goes on in the next attempt if none of them has come in this one."""

    def __init__(
        self,
        minutes: float,
        clock: Listening,
        say: Callable[[str], None],
        no_room: Callable[[str], None] = lambda missing: None,
    ) -> None:
        """`minutes`: `cluster.wait_minutes`. `no_room`: called with what is missing, if resources are, before it is
        given up."""
        self._minutes = minutes
        self._clock = clock
        self._say = say
        self._no_room = no_room
        self._since = clock.now
        self._next_word = self._since + _FIRST_WORD_SECONDS

    def seconds_since(self, moment: float) -> float:
        """Return the seconds since a moment of the driver's clock."""
        return self._clock.now - moment

    def look(self, missing_now: Callable[[], str]) -> None:
        """Say now and then what is missing. Raise once it has been missing for too long."""
        now = self._clock.now
        if now < self._next_word:
            return
        waited, missing = now - self._since, missing_now()
        if waited > 60 * self._minutes:
            if lacks_room(missing):
                self._no_room(missing)
            raise TrainingError(
                f"cluster.wait_minutes={self._minutes:g}: the workers did not start in that time; {missing}. "
                f"{way_out(missing)}; the same command continues"
            )
        self._say(f"{missing} ({waited:.0f} s, at most {self._minutes:g} min)")
        self._next_word = min(now + _NEXT_WORD_SECONDS, self._since + 60 * self._minutes + 1)
