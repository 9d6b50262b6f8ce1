"""Failures of ranks, as Ray Train reports them: which rank caused them, why, and whether another attempt can help."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ray.exceptions import RayActorError
from ray.train import UserCallback

from raytune_fsdp.errors import Interrupted, RaytuneError, TransientError, in_one_line
from raytune_fsdp.launch.ray.board import Board, Lost

if TYPE_CHECKING:
    from ray.train.v2._internal.execution.context import TrainRunContext


class FailureWatch(UserCallback):  # type: ignore[misc]
    """In Ray Train's controller: reports which rank failed and why, and ends the run if retrying is pointless.

    Ray Train does not retry what a callback raises, whatever `max_failures` says.
    """

    def __init__(self, board: Board) -> None:
        self._board = board

    def after_exception(self, run_context: TrainRunContext, worker_exceptions: Mapping[int, BaseException]) -> None:
        rank, error = first_cause(worker_exceptions)
        cause, again = underlying(error), not is_final(error)
        if not isinstance(cause, Interrupted):
            self._board.tell(Lost(rank, in_words(error), again))
        if not again:
            raise cause


def first_cause(errors: Mapping[int, BaseException]) -> tuple[int, BaseException]:
    """The rank that caused the others' failures, and its error.

    A dead process comes first, then an error of ours, then what libraries raise when they lose the other ranks.
    """

    def weight(item: tuple[int, BaseException]) -> int:
        if _death(item[1]) is not None:
            return 0
        return 1 if isinstance(underlying(item[1]), RaytuneError) else 2

    return min(sorted(errors.items()), key=weight)


def underlying(error: BaseException) -> BaseException:
    """The error inside what Ray and Ray Train have wrapped around it."""
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
    """Whether a new attempt would fail the same way."""
    inner = underlying(error)
    return isinstance(inner, RaytuneError) and not isinstance(inner, TransientError)


def in_words(error: BaseException) -> str:
    """One line about a failure."""
    death = _death(error)
    if death is None:
        return in_one_line(underlying(error))
    text = str(death)  # Ray has no types for these
    if "node has died" in text or "node was terminated" in text or "node is dead" in text:
        return "its node was lost"
    if "NODE_OUT_OF_MEMORY" in text or "low on memory" in text:
        return "Ray killed its process because the node ran out of memory"
    return "its process died (killed, out of memory, or crashed)"


def _death(error: BaseException) -> RayActorError | None:
    """Ray's error for a rank whose process no longer answers, None for any other failure."""
    failure = getattr(error, "health_check_failure", None)
    return failure if isinstance(failure, RayActorError) else None
