"""Failures of ranks, as Ray Train reports them: which rank caused them, why, and whether another attempt can help."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress

import ray
from ray import cloudpickle
from ray.exceptions import LocalRayletDiedError, OutOfMemoryError, RayActorError, RayError, WorkerCrashedError
from ray.train import WorkerGroupError

from raytune_fsdp.base.errors import OccupiedError, RaytuneError, TrainingError, TransientError, in_one_line
from raytune_fsdp.launch.ray.board import Board, Controlled, Ending, Joined
from raytune_fsdp.launch.ray.private import why_dead
from raytune_fsdp.launch.ray.private_train import (
    ControllerCallback,
    WorkerGroupStartupFailedError,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
    error_of,
    helpers_of_controller,
    is_ending,
)
from raytune_fsdp.launch.ray.watch.head import DIED, HOW

_ASKING = (WorkerGroupStartupFailedError, WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError)
"""Errors that Ray Train raises where ranks do not start, or do not answer."""
MORE_MEMORY = (
    "Give the workers more, start fewer on a node (cluster.cpus_per_worker, cluster.placement=spread), or, in a new "
    "run, lower train.micro_batch or data.seq_len"
)
_MORE_FOR_DATA = "Start fewer workers on a node (cluster.placement=spread), or, in a new run, lower data.window"
_ACTORS = {
    "_Board": "the message board between the driver and the ranks",
    "SplitCoordinator": "the process that hands out the data",
    "TrainController": "Ray Train's controller",
}
"""Actors of a run besides its ranks, by the names of their classes."""
_TELL_SECONDS = 2.0
_HEARD_SECONDS = 60.0
"""How long the board may take to hear of a controller, on a very busy machine. One that is stopped must not keep it for
ever, and with it the command."""


class ControllerWatch(ControllerCallback):  # type: ignore[misc]
    """Runs in Ray Train's controller: gives the driver a handle of it, to end what the controller has started."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def after_controller_start(self, train_run_context: object) -> None:
        this = ray.get_runtime_context()
        actors = [this.current_actor, *helpers_of_controller()]
        if not self._board.tell_and_ask(Controlled(str(this.get_actor_id()), actors), _HEARD_SECONDS):
            raise TrainingError("the driver has given up the run")

    def after_controller_state_update(self, previous_state: object, current_state: object) -> None:
        """Tell the driver how fit() will end, before the ranks are ended: Ray Train itself takes up to a second more,
        and from now on the end of a rank's process is no failure."""
        if is_ending(current_state):
            error, pickled = error_of(current_state), None
            with suppress(Exception):  # then it hears of the error from fit()
                pickled = None if error is None else cloudpickle.dumps(error)
            with suppress(RayError):
                this = str(ray.get_runtime_context().get_actor_id())
                self._board.tell_and_ask(Ending(this, pickled), _TELL_SECONDS)


def death_of(rank: Joined, seconds: float) -> WorkerGroupError | None:
    """Return the error of an attempt for a rank whose process has ended, as Ray Train would bring it.

    None if the process has ended with Ray Train's controller, of which fit() says more, or if Ray says that it lives.
    GetTimeoutError: Ray does not know yet.
    """
    found = why_dead(rank.actor, seconds)
    return None if found is None or "owner has died" in str(found) else died(rank.rank, found)


def died(rank: int, error: RayError) -> WorkerGroupError:
    """Return the error of an attempt for a rank that has died, as Ray Train brings it."""
    return WorkerGroupError("", {rank: WorkerHealthCheckFailedError("its process has ended", error)})


def first_cause(errors: Mapping[int, BaseException], told: Sequence[int] = ()) -> tuple[int, BaseException]:
    """Return the rank that caused the others' failures, and its error. `told`: ranks that said so, the first one first.

    A process that Ray killed for its memory comes first, then a dead process, then an error of ours, then the loss of
    something else that runs on Ray, then what else a rank may raise, then what libraries raise when they lose others.
    """

    def weight(item: tuple[int, BaseException]) -> tuple[int, int, int]:
        rank, error = item
        inner = underlying(error)
        kinds = (
            _out_of_memory(error),
            _death(error) is not None,
            isinstance(inner, RaytuneError),
            isinstance(inner, RayError),
            _OF_PEERS.search(str(inner)) is None,
            True,
        )
        return kinds.index(True), told.index(rank) if rank in told else len(told), rank

    return min(errors.items(), key=weight)


def underlying(error: BaseException) -> BaseException:
    """Return the error that Ray and Ray Train have wrapped."""
    while not isinstance(error, RaytuneError):
        # The wrappers of a task, of a rank and of the controller.
        inner = next(
            filter(None, (getattr(error, name, None) for name in ("cause", "_base_exc", "controller_failure"))), None
        )
        if not isinstance(inner, BaseException):
            break
        error = inner
    return error


def is_final(error: BaseException) -> bool:
    """Return whether a new attempt would fail the same way."""
    inner = underlying(error)
    return isinstance(inner, RaytuneError) and not isinstance(inner, TransientError)


_OF_PEERS = re.compile(r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe", re.IGNORECASE)


def is_from_within(error: BaseException) -> bool:
    """Return whether the run itself has caused it: nobody killed a process, and no other rank was lost."""
    if _out_of_memory(error):
        return True
    inner = underlying(error)
    if isinstance(inner, OccupiedError):
        return True  # else a run with as many attempts as it likes would load its model for ever
    # Ranks that are killed, or whose nodes go, while they start or are asked how they are; storage that is away.
    if _death(error) is not None or isinstance(inner, (RayError, TransientError, *_ASKING)):
        return False
    return isinstance(inner, RaytuneError) or _OF_PEERS.search(str(inner)) is None


def is_death(error: BaseException) -> bool:
    """Return whether the process of a rank is gone."""
    return _death(error) is not None


def is_ours(error: BaseException) -> bool:
    """Return whether a rank has raised it on purpose, or Ray has ended one for its memory: no lost node is to blame."""
    return isinstance(underlying(error), RaytuneError) or _out_of_memory(error)


def failure_in_words(error: BaseException, how: str | None = None) -> str:
    """Describe a failure in one line. `how`: how the process of a rank has ended, if that is known."""
    death = _death(error)
    if _out_of_memory(error):
        who, text, way_out = "a process of the run", str(underlying(error)), _MORE_FOR_DATA
        if death is not None:
            who, text, way_out = "its process", str(death), MORE_MEMORY
        # What the process and the node had, where Ray's message says it: its form has changed with Ray 2.56, which may
        # kill several processes at a time.
        held = re.findall(r"memory used=([\d.]+) ?GB", text)
        node = re.search(r"was ([\d.]+) ?GB(?: used)? / ([\d.]+) ?GB", text)
        parts = [f"it had {held[0]} GB"] if len(held) == 1 else []
        parts += [f"the node had {node[1]} of {node[2]} GB in use"] if node else []
        amounts = ": " * bool(parts) + ", and ".join(parts)
        return f"Ray killed {who} because the node ran out of memory{amounts}. {way_out}"
    if death is not None:
        lost = any(phrase in str(death) for phrase in ("node has died", "node was terminated", "node is dead"))
        return "its node was lost" if lost else f"its process died ({how or HOW})"
    inner = underlying(error)
    if isinstance(inner, RayActorError):
        # Ray has no field for the class; it names it on the second line of the message.
        found = re.search(r"class_name: (\S+)", str(inner))
        if found:
            return f"{_ACTORS.get(found[1], f'the actor {found[1]}')} {DIED}"
    if isinstance(inner, WorkerGroupStartupFailedError):
        return "a worker died, or could not reach the others, while the ranks were starting"
    if isinstance(inner, WorkerCrashedError):
        return f"a process that prepares the data {DIED}"
    if isinstance(inner, LocalRayletDiedError):
        return "Ray's raylet on its node died"
    return in_one_line(inner)


def _death(error: BaseException) -> BaseException | None:
    """Return Ray's error for a rank whose process no longer answers, None for any other failure."""
    failure = getattr(error, "health_check_failure", None)
    return failure if isinstance(failure, RayActorError | OutOfMemoryError) else None


def _out_of_memory(error: BaseException) -> bool:
    """Return whether Ray's memory monitor has killed the process, or one that it needed."""
    found = _death(error) or underlying(error)
    if isinstance(found, OutOfMemoryError):
        return True
    # For an actor it depends on the moment whether Ray raises that type or says so in the text of another one.
    text = str(found) if isinstance(found, RayActorError) else ""
    return "NODE_OUT_OF_MEMORY" in text or "low on memory" in text
