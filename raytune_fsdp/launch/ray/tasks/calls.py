"""Work on the CPUs of a Ray cluster: many calls of a function, several at a time, their results in order."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from raytune_fsdp.base.errors import RaytuneError

if TYPE_CHECKING:
    from ray import ObjectRef

logger = logging.getLogger(__name__)

on_a_cpu = ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
"""Make a function a task; Ray repeats it if its node or process is lost."""

_PATIENCE_SECONDS, _FULL_SECONDS, _STARVED_SECONDS = 60.0, 15.0, 1.0
"""How long a task is waited for; how long the first one, if no CPU is free before it and after that; and how long the
one after a task that got no CPU. Two jobs that took each other's last CPUs should go on slowly, and not wait for a
minute at the beginning of each trial of a sweep. On a CPU that is free, a process starts in 5 s."""
_ENDS_SECONDS = 0.2
"""How long a task that the lock of the cache was waiting for takes to end."""


def cpus() -> int:
    """Return the CPUs of the cluster as it is now, free or not."""
    return int(ray.cluster_resources().get("CPU", 1))


def _free() -> float:
    """Return the CPUs of the cluster that nothing has reserved now."""
    return float(ray.available_resources().get("CPU", 0))


def in_order(
    submit: Callable[..., ObjectRef],
    here: Callable[..., Any],
    calls: Iterable[tuple[Any, ...]],
    ahead: Callable[[], int],
    *,
    first_here: bool = False,
) -> Generator[Any, None, None]:
    """Yield the results of these calls; up to `ahead()` of them are running or ready. Closing this ends the running.

    `here` does in this process what `submit` starts as a task: with `first_here` the first call, while the tasks'
    processes start; and every call that has waited too long for a CPU, as other jobs may keep theirs for ever.
    """
    left = iter(calls)
    pending: deque[tuple[ObjectRef, tuple[Any, ...]]] = deque()
    patience = _PATIENCE_SECONDS if _free() >= 1 else _FULL_SECONDS
    first = next(left, None) if first_here else None
    try:
        while True:
            pending.extend((submit(*call), call) for call in islice(left, max(0, ahead() - len(pending))))
            if first is not None:
                yield here(*first)
                first = None
                continue
            if not pending:
                return
            task, call = pending[0]
            came = ray.wait([task], timeout=patience)[0]
            if not came and patience == _FULL_SECONDS and _free() >= 1:
                came = ray.wait([task], timeout=_PATIENCE_SECONDS)[0]
            if came:
                result, patience = ray.get(task), _PATIENCE_SECONDS
            else:
                # Slow. If the task runs after all, the lock of the cache waits for it.
                result, patience = here(*call), _PATIENCE_SECONDS
                if not ray.wait([task], timeout=_ENDS_SECONDS)[0]:  # else it had a CPU, and the work takes this long
                    logger.warning(
                        "no CPU became free for the data in time (%g of the cluster's %d CPUs are free), so it was "
                        "prepared without one. Add a node, or lower cluster.workers or cluster.cpus_per_worker",
                        _free(), cpus(),
                    )  # fmt: skip
                    patience = _STARVED_SECONDS
                    end(task)
            pending.popleft()
            yield result
    finally:
        for task, _ in pending:
            end(task)


@lru_cache(maxsize=1)
def opened(held: ObjectRef) -> Any:
    """Return the value, opened once for all tasks that a process runs, because opening a tokenizer takes long."""
    os.environ["RAYON_NUM_THREADS"] = "1"  # for the tokenizer: a task has one CPU
    return ray.get(held)


@contextmanager
def own_errors() -> Iterator[None]:
    """Raise an error of ours from a task as itself, without Ray's wrapping."""
    try:
        yield
    except RayError as error:
        cause: BaseException | None = error
        while cause is not None and (isinstance(cause, RayError) or not isinstance(cause, RaytuneError)):
            cause = getattr(cause, "cause", None) or cause.__cause__
        if cause is None:
            raise
        raise cause from None


def end(task: ObjectRef) -> None:
    """End a task that is running, with its process: an interrupted import would leave half a module to the next task
    that runs there."""
    # Ray 2.60 has a task's result before it holds the task for done, and aborts this process if the task is cancelled
    # in between ("Tried to complete task that was not pending", ray-project/ray#54260): within 50 failing tasks. With
    # this question first, it happened once in 17,000.
    with suppress(RayError):
        if not ray.wait([task], timeout=0, fetch_local=False)[0]:
            ray.cancel(task, force=True)
