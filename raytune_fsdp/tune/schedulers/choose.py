"""The scheduler of a sweep."""

from __future__ import annotations

from collections.abc import Sequence

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.tune.schedulers.protocol import Scheduler
from raytune_fsdp.tune.spec import SweepSpec


def scheduler_of(spec: SweepSpec, configs: Sequence[FinetuneConfig]) -> Scheduler:
    """Return the scheduler of a sweep whose trials have these configs (`tune/space.py:check_trials`).

    Raises ConfigError if its steps do not suit them, such as a rung at a step without an evaluation.
    """
    raise NotImplementedError
