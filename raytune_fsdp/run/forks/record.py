"""What a fork writes down of the run that it comes from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from raytune_fsdp.base.untrusted import printable, read_file
from raytune_fsdp.checkpoint.state import RunState
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record.lineage import ForkedFrom, Lineage
from raytune_fsdp.run.forks.changes import FORK
from raytune_fsdp.run.forks.parent import Parent, changes_of

logger = logging.getLogger(__name__)

_ID_BYTES = 1024


def lineage_of(config: FinetuneConfig, parent: Parent, before: RunState, identity: Mapping[str, Any]) -> Lineage:
    """Return the lineage of a fork. `before`: its parent's state. `identity`: its own."""
    if FORK in before.identity and not parent.chain:
        logger.warning("%s is gone: this run's lineage begins with that run, which is a fork", parent.place.lineage)
    changed = changes_of(config, before, identity)
    link = ForkedFrom(
        run=printable(parent.place.path.name),
        path=printable(str(parent.place.path)),
        mlflow_run_id=_mlflow_run(parent.place),
        step=parent.checkpoint.step,
        digest=parent.digest,
        changed={key: list(changed[key]) for key in sorted(changed)},
    )
    return Lineage(forks=[*parent.chain, link])


def _mlflow_run(place: RunDir) -> str | None:
    """Return the id of a run in MLflow; None if it has none."""
    with suppress(OSError, ValueError):
        found = read_file(place.mlflow_id, limit=_ID_BYTES).decode().strip()
        return found if found.isalnum() else None  # otherwise that of a run that was only asked for
    return None
