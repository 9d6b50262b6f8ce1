"""Exports during training: a Ray task writes the model directory of a committed checkpoint.

On the driver's node, and without reserving a CPU: the cluster's spare CPUs prepare the data, and an export that took
the last of them would keep training waiting.
"""

from __future__ import annotations

import math
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint
from raytune_fsdp.config import ExportConfig
from raytune_fsdp.launch.ray.placement_groups import started_on
from raytune_fsdp.launch.shared_storage import Token, check_seen
from raytune_fsdp.plan.cadence import Every, times_due
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record import names

if TYPE_CHECKING:
    from ray import ObjectRef

_PLACE = re.compile(r"step-([0-9]{8,18})")
_LEFT = re.compile(r"\.step-[0-9]{8,18}\.export-.+")
"""The directory into which `new_export` writes before it has its name."""


class Exports:
    """Exports checkpoints, as an `after_commit.Chore`.

    From each multiple of `export.every` to the next, the first step with a checkpoint is exported: a postponed save is
    not at the multiple itself.
    """

    what = "export"
    minutes = math.inf
    reserves = False

    def __init__(
        self,
        chosen: ExportConfig,
        every: Every,
        place: RunDir,
        token: Token,
        *,
        trust_remote_code: bool,
        env: Mapping[str, Any] | None,
        event: Callable[..., None],
        say: Callable[[str], None],
    ) -> None:
        self._chosen = chosen
        self._every = every
        self._run = place
        self._token = token
        self._trust_remote_code = trust_remote_code
        self._task = ray.remote(num_cpus=0, runtime_env=env)(_export)
        self._event = event
        self._say = say
        for left in self._run.exports.glob(".*.export-*"):  # left by a driver that was killed
            if _LEFT.fullmatch(left.name):
                shutil.rmtree(left, ignore_errors=True)

    def due(self, checkpoint: CommittedCheckpoint, asked: Sequence[CommittedCheckpoint]) -> bool:
        number = times_due(checkpoint.step, self._every)
        if not number:
            return False
        there = [int(match[1]) for path in self._run.exports.glob("step-*") if (match := _PLACE.fullmatch(path.name))]
        there += [found.step for found in asked]
        return number not in {times_due(step, self._every) for step in there}

    def missing(self, *, during_training: bool) -> str | None:
        return None

    def begin(self, checkpoint: CommittedCheckpoint) -> ObjectRef:
        here = ray.get_runtime_context().get_node_id()
        return started_on(
            here, self._task,
            checkpoint, self._place(checkpoint), self._chosen, self._token, self._trust_remote_code, self._run.events,
        )  # fmt: skip

    def record(self, checkpoint: CommittedCheckpoint, result: Any) -> None:
        pass  # it is in its place

    def done(self, checkpoint: CommittedCheckpoint, result: Any) -> None:
        place = self._place(checkpoint)
        self._event(names.EXPORTED, step=checkpoint.step, path=str(place), seconds=round(result, 2))
        self._say(f"exported step {checkpoint.step} to {place}")

    def failed(self, checkpoint: CommittedCheckpoint, problem: str) -> None:
        self._event(names.EXPORT_FAILED, step=checkpoint.step, problem=problem)

    def _place(self, checkpoint: CommittedCheckpoint) -> Path:
        return self._run.exports / f"step-{checkpoint.step:08d}"


def _export(
    checkpoint: CommittedCheckpoint,
    destination: Path,
    chosen: ExportConfig,
    token: Token,
    trust_remote_code: bool,
    events: Path,
) -> float:
    """Export a checkpoint, in a Ray task. Return the seconds it took."""
    import torch

    from raytune_fsdp.run.publish import export_checkpoint

    torch.set_num_threads(1)  # it has reserved no CPU, so it must not use many
    check_seen(token, by="an export")
    started = time.monotonic()
    destination.parent.mkdir(exist_ok=True)
    # Not pushed: only the model at the end is.
    export_checkpoint(checkpoint, destination, chosen, trust_remote_code=trust_remote_code, events=events)
    return time.monotonic() - started
