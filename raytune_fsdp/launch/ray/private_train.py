"""Everything that we use of Ray Train without a public name, and why. The rest of Ray: private.py."""

from __future__ import annotations

import gc
from typing import Any

from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)
from ray.train.v2._internal.execution.callback import ControllerCallback
from ray.train.v2._internal.execution.controller.state import ErroredState, ShuttingDownState

__all__ = [
    "ControllerCallback",  # the only hook that runs in the controller before it asks for workers
    "WorkerGroupStartupFailedError",
    "WorkerGroupStartupTimeoutError",
    "WorkerHealthCheckFailedError",
    "WorkerHealthCheckTimeoutError",
]


def helpers_of_controller() -> list[Any]:
    """Return the actors that the controller has started to clean up after it. Called in the controller's process.

    Ray Train keeps their handles to itself: one of its callbacks has them.
    """
    # By type(): isinstance() fails on proxies whose object has gone.
    callbacks = [each for each in gc.get_objects() if type(each) is PlacementGroupCleanerCallback]
    return [each._cleaner for each in callbacks if each._cleaner is not None]


def is_ending(state: object) -> bool:
    """Return whether a controller in this state ends its ranks next."""
    return isinstance(state, ShuttingDownState)


def error_of(state: object) -> BaseException | None:
    """Return the error that fit() will raise once a controller in this state has ended its ranks."""
    after = getattr(state, "next_state", None)
    return after.training_failed_error if isinstance(after, ErroredState) else None
