"""Sweeps: many runs that are compared, and what decides which of them go on.

spec.py        what a user may write in sweep.yaml, read and checked
space.py       the trials of a sweep, their names and their configs
search.py      which values trials get: grid, random, Optuna
log.py         the sweep's log, the truth about a sweep: its entries, and the file
history.py     what the log says of each trial
schedulers/    which trials train on, and up to which step
turn.py        one turn: from the log and what trials have measured to what is decided, and what may run now
table.py       the leaderboard, and trials compared over seeds

All of this is pure: no processes, no clock, no torch or Ray. What a sweep decides follows from its log alone, so
whatever is killed costs nothing but time, and two sweeps can be compared by `cmp` of their logs.

place.py       the sweep's directory
cost.py        what it will take
coordinates.py a sweep on the page of runs, from its log
board.py       what people see while it runs
tracked.py     its MLflow run
best.py        the best trial, and how to go on with it
running/       the processes of trials
sweep.py       a whole sweep in one call
demo.py        one to try out

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
