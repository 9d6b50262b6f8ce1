"""The trials of a sweep, their names and their configs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.tune.log import Entry, Trial
from raytune_fsdp.tune.spec import SweepSpec


def trials_of(spec: SweepSpec, log: Sequence[Entry] = ()) -> list[Trial]:
    """Return the trials that are known at this point of the log, in order: at first all of them, unless later ones
    follow from the values of earlier ones (Optuna)."""
    raise NotImplementedError


def run_name_of(spec: SweepSpec, trial: Trial, generation: int = 0) -> str:
    """Return the name of a trial's run: `<sweep>-007`, of a seed `<sweep>-007-s1`, of its second fork `<sweep>-007-g2`."""
    raise NotImplementedError


def config_of(
    spec: SweepSpec, trial: Trial, changes: Mapping[str, Any] | None = None, generation: int = 0
) -> FinetuneConfig:
    """Return the config of a trial's run, with its name, its storage and its seed. `changes`: those of a fork.

    Raises ConfigError, naming the trial and the sweep's fields.
    """
    raise NotImplementedError


def check_trials(spec: SweepSpec, trials: Iterable[Trial]) -> list[FinetuneConfig]:
    """Return the configs of all these trials. Raises ConfigError with all that is wrong with any of them, or with the
    sweep's scheduler on them."""
    raise NotImplementedError
