"""Exports beside training: a task with one CPU writes the model directory of a checkpoint that was committed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError

from raytune_fsdp.checkpoint.commit import Found, committed
from raytune_fsdp.config import ExportConfig
from raytune_fsdp.errors import RaytuneError
from raytune_fsdp.launch.ray_failures import in_words
from raytune_fsdp.launch.ray_tasks import on_a_cpu, own_errors
from raytune_fsdp.launch.shared import Token, check_seen
from raytune_fsdp.plan import Plan
from raytune_fsdp.tracking import names

if TYPE_CHECKING:
    from ray import ObjectRef

EXPORTS = "exports"
"""Directory in the run directory."""
_WAIT_SECONDS = 0.5
_PATIENCE_SECONDS = 60.0


class Exports:
    """The driver's: which checkpoints are exported, and what has become of it."""

    def __init__(
        self, chosen: ExportConfig, plan: Plan, token: Token, *, event: Callable[..., None], say: Callable[[str], None]
    ) -> None:
        self._chosen = chosen.model_copy(update={"push": None})
        self._plan = plan
        self._token = token
        self._event = event
        self._say = say
        self._running: dict[ObjectRef, tuple[Found, Path]] = {}
        self._last = 0
        self._starved = time.monotonic() + _PATIENCE_SECONDS
        if chosen.every is not None:
            for left in (plan.run_dir / EXPORTS).glob(".*.export-*"):  # by a driver that was killed
                shutil.rmtree(left, ignore_errors=True)
            self._last = max((found.step for found in committed(plan.checkpoints)), default=0)

    def make_up(self) -> None:
        """Export what an earlier start of the run did not come to. Not before the ranks have their CPUs."""
        every = self._chosen.every
        if every is not None:
            under_way = [found for found, _ in self._running.values()]
            for found in committed(self._plan.checkpoints):
                if found.step % every == 0 and found not in under_way and not self._place(found).exists():
                    self._start(found)

    def committed(self, checkpoint: Found) -> None:
        """A new checkpoint: it is exported if it is the first one at or behind a multiple of `export.every`."""
        every = self._chosen.every
        if every is not None and checkpoint.step // every > self._last // every:
            self._start(checkpoint)
        self._last = checkpoint.step

    def look(self) -> None:
        """Tell of those that have ended since the last time."""
        done: Sequence[ObjectRef] = []
        if self._running:
            done, _ = ray.wait(list(self._running), num_returns=len(self._running), timeout=0)
        for task in done:
            self._ended(task, *self._running.pop(task))
        if done or not self._running:
            self._starved = time.monotonic() + _PATIENCE_SECONDS
        elif time.monotonic() > self._starved and ray.available_resources().get("CPU", 0) < 1:
            self._starved = float("inf")
            self._say(
                "an export waits for a CPU, and the cluster has none free: add a node, or lower cluster.workers or "
                "cluster.cpus_per_worker; otherwise it waits until the end of the run"
            )

    def finish(self, stop: Callable[[], bool]) -> None:
        """Wait for those that still run; a later start of the run makes up for what is stopped."""
        if self._running:
            steps = ", ".join(str(found.step) for found, _ in self._running.values())
            self._say(f"waiting for the export of step {steps}")
        while self._running and not stop():
            ray.wait(list(self._running), timeout=_WAIT_SECONDS)
            self.look()

    def _place(self, checkpoint: Found) -> Path:
        return self._plan.run_dir / EXPORTS / f"step-{checkpoint.step:08d}"

    def _start(self, checkpoint: Found) -> None:
        place = self._place(checkpoint)
        self._running[_task.remote(checkpoint, place, self._chosen, self._token)] = checkpoint, place

    def _ended(self, task: ObjectRef, checkpoint: Found, place: Path) -> None:
        try:
            with own_errors():
                seconds = ray.get(task)
        except (RaytuneError, RayError, OSError) as error:
            problem = in_words(error)
            if checkpoint not in committed(self._plan.checkpoints):
                problem = (
                    f"its checkpoint was removed by then; checkpoint.keep_every={self._chosen.every} keeps those that "
                    "are exported"
                )
            self._event(names.EXPORT_FAILED, step=checkpoint.step, problem=problem)
            self._say(f"the export of step {checkpoint.step} failed: {problem}; training goes on")
        else:
            self._event(names.EXPORTED, step=checkpoint.step, path=str(place), seconds=round(seconds, 2))
            self._say(f"exported step {checkpoint.step} to {place}")


def _export(checkpoint: Found, destination: Path, chosen: ExportConfig, token: Token) -> float:
    """Runs in a task, on any node: it must see the run's storage."""
    from raytune_fsdp.publish import publish

    check_seen(token, by="an export")
    started = time.monotonic()
    destination.parent.mkdir(exist_ok=True)
    publish(checkpoint, destination, chosen)
    return time.monotonic() - started


_task = on_a_cpu(_export)
