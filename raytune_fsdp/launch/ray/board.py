"""Messages between the driver and the ranks that bypass Ray Train: an actor on the driver's node."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError

from raytune_fsdp.base.batch import StopReason
from raytune_fsdp.launch.ray.placement_groups import started_on
from raytune_fsdp.record.screen_messages import Looks

_LATE_SECONDS = 5.0
"""How much later than it should the board may answer its driver: a busy machine is slow."""
_START_SECONDS = 120.0  # of its process, on a very busy machine


@dataclass(frozen=True, slots=True)
class Joined:
    """A rank has started, in a process on this node."""

    rank: int
    node: str
    node_id: str
    pid: int
    node_rank: int = 0
    """The number of the node among those of the run."""
    local_rank: int = 0
    """The number of the rank among those of its node."""
    actor: Any = None
    """A handle of Ray Train's worker, of which Ray knows why it has died."""
    began: int | None = None
    """When its process began (`base/machine.py:began`)."""


@dataclass(frozen=True, slots=True)
class PhaseFinished:
    """Rank 0 has finished a phase before the first step."""

    phase: str


@dataclass(frozen=True, slots=True)
class Started:
    """An attempt has its number and its directory for logs."""

    attempt: int
    logs: str
    begins: int = 0
    """The step after which it begins."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line for the driver to print."""

    text: str


@dataclass(frozen=True, slots=True)
class Committed:
    """A checkpoint of this attempt was committed."""

    step: int
    lasting: bool = True
    """False: a recovery point."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank has raised an error, in a process that goes on."""

    rank: int
    step: int
    place: str
    """File and line."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A rank's process has ended, as the watch on its node has seen."""

    rank: int
    pid: int
    how: str | None
    """By which signal, or with which exit code; None where the kernel does not tell."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A rank is alive: its `pulse`, and how far it is before its second step."""

    step: int
    beats: int
    patience_seconds: float
    rank: int = 0
    at: float = 0.0
    """The time of the beat, by the clock of the rank's own process: the driver may hear it later."""
    phase: str = "imports"
    """The first phase that the rank has not finished."""
    left: int = 0
    """How many phases the rank has not finished."""
    read: int = 0
    """Bytes that the rank's process has read since it began; looked at every few seconds."""


def beat_seconds(rank: int, world: int) -> float:
    """Return the seconds between two beats of a rank: the board hears some twenty beats a second at most."""
    return 1.0 if rank == 0 else max(5.0, world / 20)


@dataclass(frozen=True, slots=True)
class Controlled:
    """Ray Train has started its controller: whoever ends it, ends the ranks."""

    controller: str
    """The id of the controller's actor."""
    actors: list[Any]
    """Handles of the controller's actor, and of the one that looks after its resources and would outlive it."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Ray Train's controller ends the ranks from now on: the end of a process says nothing any more."""

    controller: str
    """The id of the controller's actor."""
    error: bytes | None = None
    """The error that fit() will raise, pickled; None if there is none, or it cannot be pickled."""


Notice = Controlled | Ending | Joined | PhaseFinished | Started | Line | Committed | Beat | Ended | Failed


@dataclass(slots=True)
class _Posted:
    """Everything that is posted in one attempt."""

    attempt: int = 0
    """Counts the attempts of the board's driver."""
    notices: list[Notice] = field(default_factory=list)
    beats: dict[int, Beat] = field(default_factory=dict)
    """The last unread beat of each rank: a driver that was away for long finds only these."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    reason: StopReason | None = None
    shared: dict[str, Any] = field(default_factory=dict)


class _Board:
    """The actor. All of it runs in one event loop, so nothing here needs a lock."""

    def __init__(self) -> None:
        self._posted = _Posted()
        self._news = asyncio.Event()
        self._sharing = asyncio.Condition()
        self._closed = False

    async def tell(self, attempt: int, notice: Notice) -> bool:
        if attempt != self._posted.attempt:  # a late word of an attempt that is over, as of a node that was cut off
            return False
        if isinstance(notice, Beat):
            self._posted.beats[notice.rank] = notice  # which wakes nobody: the driver looks twice a second
        else:
            self._posted.notices.append(notice)
            self._news.set()
        return not self._closed

    async def close(self) -> list[Notice]:
        self._closed = True
        return self._posted.notices

    async def read(self, seconds: float) -> list[Notice]:
        if not self._posted.notices:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), seconds)
        self._news.clear()
        found = [*self._posted.notices, *self._posted.beats.values()]
        self._posted.notices.clear()
        self._posted.beats.clear()
        return found

    async def stop(self, reason: StopReason) -> None:
        self._posted.reason = reason
        self._posted.stop.set()

    async def wait_for_stop(self) -> StopReason | None:
        posted = self._posted
        await posted.stop.wait()
        return posted.reason

    async def begin(self, attempt: int) -> None:
        self._posted.stop.set()  # else the call of a rank that has ended waits, with all that was posted, for good
        self._posted = _Posted(attempt)
        async with self._sharing:
            self._sharing.notify_all()

    async def share(self, attempt: int, key: str, value: list[Any]) -> None:
        async with self._sharing:
            if attempt != self._posted.attempt:
                return
            self._posted.shared[key] = value
            self._sharing.notify_all()

    async def shared(self, attempt: int, key: str) -> list[Any]:
        def over() -> bool:
            return attempt < self._posted.attempt  # a rank may ask a new board before its driver has begun there

        async with self._sharing:
            await self._sharing.wait_for(
                lambda: over() or (attempt == self._posted.attempt and key in self._posted.shared)
            )
            if over():
                raise RuntimeError("the attempt of this rank is over: another one has begun")
            return list(self._posted.shared[key])


# Every rank may wait in it at the same time, in `shared`. Ray's default of 1000 concurrent calls would let no further
# call in, not even the one that the ranks are waiting for.
_BOARD = ray.remote(num_cpus=0, max_concurrency=10_000)(_Board)


class Board:
    """The handle that the driver and the ranks have of the actor. It can be sent to other processes."""

    def __init__(self) -> None:
        self._attempt = 0
        """Counts the attempts: what a process of an older one tells is not heard."""
        self._actor = self._make()
        self._reading: Any = None
        """An answer that has not come yet, and is all that will ever have the notices in it."""

    def _make(self) -> Any:
        here = ray.get_runtime_context().get_node_id()
        return started_on(here, _BOARD)

    def tell(self, notice: Notice) -> None:
        """Post a notice. Neither wait nor fail if the driver is gone: this process soon ends then, too."""
        self._actor.tell.remote(self._attempt, notice)

    def tell_and_ask(self, notice: Notice, seconds: float | None = None) -> bool:
        """Post a notice; return whether the driver still listens. Wait for the answer for so long at most."""
        return bool(ray.get(self._actor.tell.remote(self._attempt, notice), timeout=seconds))

    def close(self, seconds: float) -> list[Notice]:
        """End the actor, on the driver. Returns the notices that were not read, if they come in time."""
        notices: list[Notice] = []
        with suppress(RayError):
            notices = ray.get(self._actor.close.remote(), timeout=seconds)
        with suppress(RayError):
            ray.kill(self._actor)
        return notices

    def read(self, seconds: float) -> list[Notice]:
        """Return new notices, waiting up to `seconds` if there are none. ActorUnavailableError if no answer comes."""
        self._reading = self._reading or self._actor.read.remote(seconds)
        try:
            notices: list[Notice] = ray.get(self._reading, timeout=seconds + _LATE_SECONDS)
        except GetTimeoutError:
            raise ActorUnavailableError("no answer", None) from None
        except RayError:
            self._reading = None
            raise
        self._reading = None
        return notices

    def stop(self, reason: StopReason) -> None:
        """Ask the ranks to save and end."""
        self._actor.stop.remote(reason)

    def begin(self) -> None:
        """Begin another attempt: forget what was asked of the last one, and shared in it."""
        self._attempt += 1
        if self._reading is None:
            with suppress(RayActorError, GetTimeoutError):  # dead, or out of reach for long
                ray.get(self._actor.begin.remote(self._attempt), timeout=_START_SECONDS)
                return
        with suppress(RayError):
            ray.kill(self._actor)
        self._actor, self._reading = self._make(), None
        self._actor.begin.remote(self._attempt)

    def share(self, key: str, value: Any, seconds: float | None = None) -> None:
        """Share a value with the other ranks. This process remains its owner: Ray drops the value when it ends.

        Waits for so long at most; the board shares it as soon as it can.
        """
        # A reference inside a list is passed on; Ray would replace a bare one by its value, for the actor to unpickle.
        ray.get(self._actor.share.remote(self._attempt, key, [ray.put(value)]), timeout=seconds)

    def shared(self, key: str) -> Any:
        """Wait for the value that another rank of this attempt shares under this key."""
        return ray.get(ray.get(self._actor.shared.remote(self._attempt, key))[0])

    def wait_for_stop(self) -> StopReason | None:
        """Wait until the driver asks to stop, or begins another attempt: None."""
        reason = ray.get(self._actor.wait_for_stop.remote())
        return None if reason is None else StopReason(reason)


class StopFromBoard:
    """Tells rank 0 why the driver asked to stop, None if it did not. Costs nothing to call: a thread waits for it."""

    def __init__(self, board: Board) -> None:
        self._reason: StopReason | None = None
        self._board = board
        threading.Thread(target=self._wait, name="stop", daemon=True).start()

    def __call__(self) -> StopReason | None:
        return self._reason

    def _wait(self) -> None:
        while True:
            try:
                self._reason = self._board.wait_for_stop()
            except ActorUnavailableError:
                time.sleep(1.0)
            except RayError:
                return  # the driver is gone, and this process soon ends
            else:
                return


class BoardStream(io.TextIOBase):
    """A stream whose lines the driver prints."""

    encoding = "utf-8"

    def __init__(self, board: Board, looks: Looks) -> None:
        self._board = board
        self.looks = looks
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        if lines:
            self._board.tell(Line("\n".join(lines)))
        return len(text)
