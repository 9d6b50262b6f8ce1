"""Tell the program that called `finetune` what happens while it trains, and let it stop the run.

A thread reads the run's own record, as `raytune-fsdp watch` does, and calls the program's functions. So the record is
the queue: it keeps what a slow function has not seen yet. Neither a rank nor the process that watches over the ranks
ever waits for a function, or hears of its exception.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from inspect import iscoroutinefunction
from itertools import islice
from pathlib import Path
from traceback import extract_tb
from typing import Any

from raytune_fsdp.base.errors import ConfigError, RaytuneError, ResumeError, in_one_line
from raytune_fsdp.base.lease import lease_of, token_of
from raytune_fsdp.checkpoint.on_demand import StopRequest
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record import names
from raytune_fsdp.record.lines import metrics_of, step_of
from raytune_fsdp.record.tail import EventFollower, RecordFollower

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.3
_LAST_LOOKS = 3
"""When the run has ended, if storage does not answer."""
_AT_ONCE = 1000
"""Lines that are read before functions are called with them: the rest of what they have not seen stays in the file."""
_LATE_SECONDS = 10.0
"""How long `finetune` waits at its end for functions that have not seen everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStarted:
    """The ranks begin to train: at the start, and again after a failure or with another number of ranks."""

    attempt: int
    step: int
    """The step after which they go on; 0 at the start. Steps after it that were not saved are trained again."""
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded:
    """A step was trained. Steps come together, every `train.log_every` of them."""

    attempt: int
    step: int
    epoch: float
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    """Of the run, up to this step."""
    seconds: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The evaluation after a step has ended."""

    attempt: int
    step: int
    values: dict[str, float]
    """`eval/<dataset>/loss` and the like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The model has answered a prompt of `eval.prompts`."""

    attempt: int
    step: int
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted:
    """A checkpoint is complete and visible."""

    attempt: int
    step: int
    path: str
    """Directory or URL."""
    seconds: float
    bytes: int
    recovery: bool
    """Whether the clock chose its step; then it is removed once there are newer ones."""
    digest: str | None
    """Of the weights, with `run.exact`."""


Happening = AttemptStarted | StepEnded | Evaluated | Answered | CheckpointCommitted
_ORDER: tuple[type[Happening], ...] = (AttemptStarted, StepEnded, Evaluated, Answered, CheckpointCommitted)
"""In which those of one step come."""
Callback = Callable[[Happening], object]


class StopHandle:
    """Stops a run from any thread, or from a function that is told of it: `finetune(config, stop=handle)`.

    The run commits a checkpoint after its current step, and `finetune` raises Interrupted. The same call continues it.
    """

    def __init__(self) -> None:
        self.asked = threading.Event()
        """Until the call that it was given to has ended."""

    def stop(self) -> None:
        """Ask the run to stop. Returns at once."""
        self.asked.set()


def functions_of(on: object, stop: object) -> tuple[Callback, ...]:
    """Return the functions of `on`. Raise ConfigError for what is none, and for a `stop` that is no StopHandle."""
    found: Any = () if on is None else (on,) if callable(on) or not isinstance(on, Sequence) else tuple(on)
    for each in found:
        if not callable(each) or iscoroutinefunction(each):
            what = "an async function, which nothing would await" if callable(each) else f"{each!r}, no function"
            raise ConfigError(f"finetune(on=...): has {what}; give a function of one argument, or a list of them")
    if stop is not None and not isinstance(stop, StopHandle):
        raise ConfigError(f"finetune(stop={stop!r}): must be a StopHandle; call its stop() to stop the run")
    return tuple(found)


_calling = threading.local()


def check_not_called_back() -> None:
    """Refuse to begin a run inside of a function that another one calls: one process trains one run at a time."""
    if getattr(_calling, "now", False):
        raise ConfigError(
            "finetune was called by a function in on=, while a run trains: call it again when the first call has "
            "returned, or in another process"
        )


@contextmanager
def calling_back(place: RunDir, functions: Sequence[Callback], handle: StopHandle | None) -> Iterator[None]:
    """Call the functions with what happens in the run, and stop it when the handle says so, while the context lasts."""
    if not functions and handle is None:
        yield
        return
    caller = _Caller(place, functions, handle)
    try:
        yield
    finally:
        caller.end()


class _Caller:
    """The thread that reads the record and calls the functions."""

    def __init__(self, place: RunDir, functions: Sequence[Callback], handle: StopHandle | None) -> None:
        self._place = place
        self._functions = functions
        self._handle = handle
        try:
            self._news = _News(place)
        except OSError as error:
            raise ResumeError(
                f"{place.path}: what the run has on record cannot be read: {in_one_line(error)}"
            ) from error
        self._stop_request = StopRequest(place.path, token_of(lease_of(place.lock)))
        self._raised: set[int] = set()
        """The functions that have raised, by their place."""
        self._over = threading.Event()
        self._left = False
        """Whether the call has returned: then no function is called any more."""
        self._seen = 0
        # Daemons: a function that never returns must not keep the process.
        self._thread = threading.Thread(target=self._call, name="on", daemon=True)
        self._asker = threading.Thread(target=self._ask, name="stop", daemon=True)
        self._thread.start()
        self._asker.start()

    def end(self) -> None:
        """Let the functions see the rest, and leave."""
        self._over.set()
        self._asker.join(_LATE_SECONDS)
        self._thread.join(_LATE_SECONDS)
        self._left = True
        if self._handle is not None:
            self._handle.asked.clear()
        if self._thread.is_alive():
            logger.warning(
                "after %g s the functions in on= have seen the run up to step %d; the rest is in %s",
                _LATE_SECONDS, self._seen, self._place.metrics,
            )  # fmt: skip

    def _ask(self) -> None:
        """Pass the wish to stop on, in a thread of its own: a function may be in the other one for long."""
        while not self._over.wait(_LOOK_SECONDS):
            if self._handle is not None and self._handle.asked.is_set():
                with suppress(OSError):  # the next look tries again
                    self._stop_request.ask()
        self._stop_request.leave()

    def _call(self) -> None:
        if not self._functions:
            return
        _calling.now = True
        looks = _LAST_LOOKS
        while looks:
            if self._over.wait(_LOOK_SECONDS):
                self._news.reopen()
                looks -= 1
            try:
                while happened := self._news.read():
                    for each in happened:
                        self._tell(each)
            except OSError:  # if storage does not answer, the next look asks it again
                time.sleep(_LOOK_SECONDS)
            except RaytuneError as error:
                logger.warning("the functions in on= are no longer called: %s", in_one_line(error))
                return
            else:
                looks = 0 if looks < _LAST_LOOKS else looks

    def _tell(self, happening: Happening) -> None:
        for number, function in enumerate(self._functions):
            if self._left:
                return
            try:
                function(happening)
            except BaseException as error:  # also sys.exit(): this thread is not the program
                if number not in self._raised:
                    self._raised.add(number)
                    self._say(error)
        self._seen = happening.step

    def _say(self, error: BaseException) -> None:
        frame, said = extract_tb(error.__traceback__)[-1], type(error).__name__
        with suppress(Exception):  # its own __str__ may raise
            said = in_one_line(error)
        logger.warning(
            "a function in on= raised %s (%s, line %s); training goes on, and so do its calls, but what it raises from "
            "now on is not said",
            said, Path(frame.filename).name, frame.lineno,
        )  # fmt: skip


class _News:
    """What has happened in a run since this was made."""

    def __init__(self, place: RunDir) -> None:
        self._place = place
        self._events = EventFollower(place.events)
        self._first = 0
        """The first attempt of this call; 0 until it has begun."""
        self._record: RecordFollower | None = None
        for _ in self._events.events():  # of earlier commands
            pass
        before = max((step_of(line) for line in RecordFollower(place.evaluations).lines()), default=-1)
        self._measured = RecordFollower(place.evaluations, after=before)
        self._waiting: list[Happening] = []
        """What was read and is not yet returned: a file that cannot be read loses nothing of another one."""

    def read(self) -> list[Happening]:
        """Return what has happened since the last call, in order; of much, a part."""
        for event in self._events.events():
            with suppress(TypeError, ValueError, LookupError):
                self._waiting += self._of_event(event["event"], event["attempt"], event["fields"])
        newest, count = None, 0
        for line in islice(self._record.lines(), _AT_ONCE) if self._record is not None else ():
            count += 1
            if type(attempt := line.get("attempt")) is int and attempt >= self._first:
                newest = _of_line(line)
                self._waiting.append(newest)
        for line in islice(self._measured.lines(), _AT_ONCE):
            if line["kind"] == "eval" and type(line.get("attempt", 0)) is int:
                self._waiting.append(_of_line(line))
        self._waiting.sort(key=_order)
        # Of more lines, what comes after them has to wait.
        end = len(self._waiting)
        if count == _AT_ONCE and newest is not None:
            end = next((n for n, each in enumerate(self._waiting) if _order(each) > _order(newest)), end)
        ready, self._waiting = self._waiting[:end], self._waiting[end:]
        return ready

    def reopen(self) -> None:
        """Reopen the record before the last look: a client of NFS may show an open file as it was."""
        for follower in (self._record, self._measured):
            if follower is not None:
                follower.reopen()

    def _of_event(self, name: str, attempt: int, fields: dict[str, Any]) -> Iterator[Happening]:
        if name == names.ATTEMPT_STARTED:
            step = int(fields["resumed_from"])
            if not self._first:
                # From the step before on: its evaluation may be made up for.
                self._first, self._record = attempt, RecordFollower(self._place.metrics, after=step - 1)
            if step == 0:  # evaluations of checkpoints that are gone have been removed
                self._measured = RecordFollower(self._place.evaluations)
            yield AttemptStarted(attempt=attempt, step=step, ranks=int(fields["world_size"]))
        elif name == names.ANSWERED:
            yield Answered(attempt=attempt, step=int(fields["step"]), prompt=fields["prompt"], answer=fields["answer"])
        elif name == names.SAVED:
            yield CheckpointCommitted(
                attempt=attempt,
                step=int(fields["step"]),
                path=fields["path"],
                seconds=float(fields["seconds"]),
                bytes=int(fields["bytes"]),
                recovery=fields.get("recovery") is True,
                digest=fields.get("digest"),
            )


def _order(each: Happening) -> tuple[int, int, int]:
    return each.attempt, each.step, _ORDER.index(type(each))


def _of_line(line: dict[str, Any]) -> Happening:
    attempt, step = line.get("attempt", 0), step_of(line)
    if line["kind"] == "eval":
        return Evaluated(
            attempt=attempt, step=step, values={key: float(value) for key, value in line["values"].items()}
        )
    metrics = metrics_of(line)
    return StepEnded(
        attempt=attempt,
        step=step,
        epoch=metrics.epoch,
        loss=metrics.loss,
        grad_norm=metrics.grad_norm,
        lr=metrics.lr,
        tokens=metrics.tokens,
        seconds=metrics.step_seconds,
        tokens_per_second=metrics.tokens_per_second,
    )
