"""What is found wrong in no time: before torch is imported, Ray started, or a file read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.errors import ConfigError
from raytune_fsdp.plan import Plan, resolve
from raytune_fsdp.urls import is_url


def check_first(config: FinetuneConfig, world: int) -> Plan:
    """The rules that need only the config, and whether its storage can be written.

    The plan it returns has the run's places; its length is not known yet.
    """
    plan = resolve(config.model_copy(update={"train": _counted(config)}), world)
    _check_storage("run.storage", plan.run_dir)
    if not is_url(plan.checkpoints):
        _check_storage("checkpoint.storage" if config.checkpoint.storage else "run.storage", Path(plan.checkpoints))
    return plan


def _check_storage(field: str, wanted: Path) -> None:
    """Find out now, not on the ranks, where the run cannot be written."""
    there = next(path for path in (wanted, *wanted.parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(f"{field}: {there} is a file, so {wanted} cannot be a directory; choose another path")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{field}: {there} is not writable for this user; choose another path")


def _counted(config: FinetuneConfig) -> Any:
    """The train section as if its length were known, to check the rules that do not depend on it."""
    return config.train.model_copy(update={"max_steps": config.train.max_steps or 1, "epochs": None})
