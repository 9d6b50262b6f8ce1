"""What Ray Train says of ranks that failed, in words; and which failures another attempt cannot cure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ray.exceptions import RayActorError
from ray.train import UserCallback

from raytune_fsdp.errors import Interrupted, RaytuneError, TransientError
from raytune_fsdp.launch.ray.board import Board, Lost

if TYPE_CHECKING:
    from ray.train.v2._internal.execution.context import TrainRunContext


class FailureWatch(UserCallback):  # type: ignore[misc]
    """In Ray Train's controller: tells the driver who failed and of what, and ends the run where the same would follow.

    What this raises there is not retried, whatever `max_failures` says.
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
    """The rank that the others' failures follow from, and its error.

    A process that is gone comes before an error of ours, and that before what a library says when it loses the others.
    """
    return min(sorted(errors.items()), key=lambda item: _weight(item[1]))


def _weight(error: BaseException) -> int:
    if _death(error) is not None:
        return 0
    return 1 if isinstance(underlying(error), RaytuneError) else 2


def underlying(error: BaseException) -> BaseException:
    """The error inside of what Ray and Ray Train have put around it."""
    while not isinstance(error, RaytuneError):
        # Of a task; of a rank's exception; of the controller's.
        inner = next(
            filter(None, (getattr(error, name, None) for name in ("cause", "_base_exc", "controller_failure"))), None
        )
        if not isinstance(inner, BaseException):
            break
        error = inner
    return error


def is_final(error: BaseException) -> bool:
    """Whether a new attempt would fail in the same way."""
    inner = underlying(error)
    return isinstance(inner, RaytuneError) and not isinstance(inner, TransientError)


def in_words(error: BaseException) -> str:
    """A line about it."""
    death = _death(error)
    if death is not None:
        return _cause_of_death(death)
    inner = underlying(error)
    if isinstance(inner, RaytuneError):
        return " ".join(str(inner).split())
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    return f"{type(inner).__name__}: {lines[0][:500]}" if lines else type(inner).__name__


def _death(error: BaseException) -> RayActorError | None:
    """What Ray says of a rank whose process does not answer any more."""
    failure = getattr(error, "health_check_failure", None)
    return failure if isinstance(failure, RayActorError) else None


def _cause_of_death(death: RayActorError) -> str:
    text = str(death)
    if "node has died" in text or "node was terminated" in text or "node is dead" in text:
        return "its node was lost"
    if "NODE_OUT_OF_MEMORY" in text or "low on memory" in text:
        return "Ray killed its process because the node ran out of memory"
    return "its process died (killed, out of memory, or crashed)"
