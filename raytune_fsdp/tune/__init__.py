"""Sweeps: many runs that are compared, and what decides which of them go on.

ray_tune.py    runs as trials of Ray Tune: `RunTrial`
driven.py      the process that trains them, one after another, and outlives a trial that is killed

Importing this room imports nothing heavy: `RunTrial`, which brings Ray, is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raytune_fsdp.tune.ray_tune import RunTrial

__all__ = ["RunTrial"]


def __getattr__(name: str) -> Any:
    if name != "RunTrial":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from raytune_fsdp.tune.ray_tune import RunTrial

    return RunTrial
