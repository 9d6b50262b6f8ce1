"""Sweeps: many runs that are compared, and what decides which of them go on.

ray_tune/      runs as trials of Ray Tune: `RunTrial`

Importing this room imports nothing heavy: `RunTrial`, which brings Ray, is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raytune_fsdp.tune.ray_tune.trial import RunTrial

__all__ = ["RunTrial"]


def __getattr__(name: str) -> Any:
    if name != "RunTrial":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from raytune_fsdp.tune.ray_tune.trial import RunTrial

    return RunTrial
