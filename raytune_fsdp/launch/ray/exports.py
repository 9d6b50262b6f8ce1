"""Exports during training: a Ray task writes the model directory of a committed checkpoint.

One at a time, on the driver's node, and without reserving a CPU: the cluster's spare CPUs prepare the data, and an
export that took the last of them would keep training waiting.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError

from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, committed
from raytune_fsdp.config import ExportConfig
from raytune_fsdp.errors import RaytuneError
from raytune_fsdp.launch.ray.failures import in_words
from raytune_fsdp.launch.ray.tasks import own_errors
from raytune_fsdp.launch.shared_storage import Token, check_seen
from raytune_fsdp.rundir import RunDir
from raytune_fsdp.tracking import names

if TYPE_CHECKING:
    from ray import ObjectRef

_PLACE = re.compile(r"step-(\d{8,})")
_WAIT_SECONDS = 0.5  # between two looks for a signal to stop


class Exports:
    """On the driver: which checkpoints are exported, and how that ended.

    From each multiple of `export.every` to the next, the first step with a checkpoint is exported: a postponed save is
    not at the multiple itself.
    """

    def __init__(
        self,
        chosen: ExportConfig,
        place: RunDir,
        token: Token,
        *,
        trust_remote_code: bool,
        event: Callable[..., None],
        say: Callable[[str], None],
    ) -> None:
        self._chosen = chosen
        self._run = place
        self._token = token
        self._trust_remote_code = trust_remote_code
        self._event = event
        self._say = say
        self._waiting: list[CommittedCheckpoint] = []
        self._running: tuple[ObjectRef, CommittedCheckpoint] | None = None
        for left in self._run.exports.glob(".*.export-*"):  # left by a driver that was killed
            shutil.rmtree(left, ignore_errors=True)

    def make_up(self) -> None:
        """Ask for the exports that earlier attempts and commands did not get to."""
        if self._chosen.every is not None:
            with suppress(RaytuneError, OSError):  # if the storage does not answer now, the next commit asks again
                for found in committed(self._run.checkpoints):
                    self.committed(found)

    def committed(self, checkpoint: CommittedCheckpoint) -> None:
        """Called after a commit: ask for an export if one is due."""
        every = self._chosen.every
        if every is None or checkpoint.step < every:
            return
        there = [int(match[1]) for path in self._run.exports.glob("step-*") if (match := _PLACE.fullmatch(path.name))]
        there += [found.step for found in self._asked()]
        if checkpoint.step // every not in {step // every for step in there}:
            self._waiting.append(checkpoint)

    def _asked(self) -> list[CommittedCheckpoint]:
        return [*([self._running[1]] if self._running else []), *self._waiting]

    def look(self) -> None:
        """Report the export that has ended, and begin the next."""
        if self._running:
            task, checkpoint = self._running
            if not ray.wait([task], timeout=0)[0]:
                return
            self._running = None
            self._ended(task, checkpoint)
        if self._waiting:
            checkpoint = self._waiting.pop(0)
            here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
            task = ray.remote(num_cpus=0, label_selector=here)(_export).remote(
                checkpoint, self._place(checkpoint), self._chosen, self._token, self._trust_remote_code
            )
            self._running = task, checkpoint

    def finish(self, stop: Callable[[], bool]) -> bool:
        """Wait for all exports that are due. False if `stop` ended the wait."""
        self.make_up()
        if self._asked():
            self._say(f"waiting for the export of step {', '.join(str(found.step) for found in self._asked())}")
        while self._asked():
            if stop():
                return False
            self.look()
            if self._running:
                ray.wait([self._running[0]], timeout=_WAIT_SECONDS)
        return True

    def cancel(self) -> None:
        """End the export that is running, if there is one."""
        if self._running:
            with suppress(RayError):
                ray.cancel(self._running[0], force=True)

    def _place(self, checkpoint: CommittedCheckpoint) -> Path:
        return self._run.exports / f"step-{checkpoint.step:08d}"

    def _ended(self, task: ObjectRef, checkpoint: CommittedCheckpoint) -> None:
        try:
            with own_errors():
                seconds = ray.get(task)
        except (RaytuneError, RayError, OSError) as error:
            problem = self._why(checkpoint, error)
            self._event(names.EXPORT_FAILED, step=checkpoint.step, problem=problem)
            self._say(f"the export of step {checkpoint.step} failed: {problem}; training goes on")
        else:
            place = self._place(checkpoint)
            self._event(names.EXPORTED, step=checkpoint.step, path=str(place), seconds=round(seconds, 2))
            self._say(f"exported step {checkpoint.step} to {place}")

    def _why(self, checkpoint: CommittedCheckpoint, error: BaseException) -> str:
        with suppress(RaytuneError, OSError):
            if checkpoint not in committed(self._run.checkpoints):
                return "its checkpoint was removed before the export: raise checkpoint.keep_last or export.every"
        return in_words(error)


def _export(
    checkpoint: CommittedCheckpoint, destination: Path, chosen: ExportConfig, token: Token, trust_remote_code: bool
) -> float:
    """Runs in a Ray task. Returns the seconds it took."""
    import torch

    from raytune_fsdp.run.publish import export_checkpoint

    torch.set_num_threads(1)  # it has reserved no CPU, so it must not use many
    check_seen(token, by="an export")
    started = time.monotonic()
    destination.parent.mkdir(exist_ok=True)
    # Not pushed: only the model at the end is.
    export_checkpoint(checkpoint, destination, chosen, trust_remote_code=trust_remote_code)
    return time.monotonic() - started
