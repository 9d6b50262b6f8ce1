"""Work on the CPUs of a Ray cluster: many calls of a function, some at a time, their results in order."""

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

from raytune_fsdp.errors import RaytuneError

if TYPE_CHECKING:
    from ray import ObjectRef

logger = logging.getLogger(__name__)

on_a_cpu = ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
"""Makes a task of a function; Ray repeats it if its node or process is lost."""

_PATIENCE_SECONDS = 60.0


def cpus() -> int:
    """Of the cluster as it is now, whoever uses them."""
    return int(ray.cluster_resources().get("CPU", 1))


def in_order(
    submit: Callable[..., ObjectRef],
    calls: Iterable[tuple[Any, ...]],
    ahead: Callable[[], int],
    *,
    first: Callable[[], Any] | None = None,
) -> Generator[Any, None, None]:
    """The results of these calls, up to `ahead()` of which run or lie ready. Closing it ends what still runs.

    `first` is called in this process, while the processes of the calls start; its result comes before theirs.
    """
    left = iter(calls)
    pending: deque[ObjectRef] = deque()
    try:
        while True:
            pending.extend(submit(*call) for call in islice(left, max(0, ahead() - len(pending))))
            if first is not None:
                yield first()
                first = None
                continue
            if not pending:
                return
            _wait(pending[0])
            result = ray.get(pending[0])
            pending.popleft()
            yield result
    finally:
        for task in pending:
            with suppress(RayError):
                ray.cancel(task)


@lru_cache(maxsize=1)
def opened(held: ObjectRef) -> Any:
    """For tasks: the value, once for all of them that a process runs, because a tokenizer takes long to open."""
    os.environ["RAYON_NUM_THREADS"] = "1"  # the tokenizer's threads: a task has one CPU
    return ray.get(held)


@contextmanager
def own_errors() -> Iterator[None]:
    """Raise what one of our functions has raised in a task as itself, and not as the error of a task."""
    try:
        yield
    except RayError as error:
        cause: BaseException | None = error
        while cause is not None and (isinstance(cause, RayError) or not isinstance(cause, RaytuneError)):
            cause = getattr(cause, "cause", None) or cause.__cause__
        if cause is None:
            raise
        raise cause from None


def _wait(task: ObjectRef) -> None:
    """Until the task is done; it is said if that takes long, because without a free CPU it takes for ever."""
    seconds = 0.0
    while not ray.wait([task], timeout=_PATIENCE_SECONDS)[0]:
        seconds += _PATIENCE_SECONDS
        free = ray.available_resources().get("CPU", 0)
        logger.warning(
            "the data has been waiting for %g s for a task on a CPU; %g of the cluster's %d CPUs are free. Add "
            "a node, or lower cluster.workers: the data needs CPUs beside those of the ranks", seconds, free, cpus(),
        )  # fmt: skip
