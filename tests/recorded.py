"""Run directories as a training leaves them, without the training."""

from __future__ import annotations

import json
import math
from pathlib import Path

from raytune_fsdp.base.measured import StepMetrics
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record.jsonl import JsonlTracker
from raytune_fsdp.record.tracker import RunStart, Status


def step(
    number: int, *, loss: float = 2.5, mfu: float | None = 0.412, skipped: bool = False, seconds: float = 2.0,
    waited: float = 0.01,
) -> StepMetrics:  # fmt: skip
    return StepMetrics(
        step=number, epoch=0.1, samples="0" * 16, tokens=4096, target_tokens=1000, loss=loss, grad_norm=1.25,
        lr=1e-4, skipped=skipped, step_seconds=seconds, data_seconds=waited, tokens_per_second=12345.0, mfu=mfu,
        memory_bytes=3 * 2**29,
    )  # fmt: skip


class Recorded:
    """A run of 100 steps that writes its record."""

    def __init__(self, storage: Path, name: str = "run") -> None:
        self.path = storage / name
        self.place = RunDir(self.path, str(self.path / "checkpoints"))
        self.path.mkdir(parents=True)
        self.place.plan.write_text(json.dumps({"steps": 100}))
        self.number = 0

    def attempt(self, resumed_from: int = 0) -> None:
        self.number += 1
        self.tracker = JsonlTracker(self.path)
        self.tracker.start(RunStart(name=self.path.name, attempt=self.number, resumed_from=resumed_from))
        self.tracker.event("attempt_started", world_size=4, resumed_from=resumed_from)
        self.step = resumed_from

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            self.tracker.steps([step(self.step, loss=5 / math.sqrt(self.step))], world_size=4, attempt=self.number)

    def evaluate(self, **losses: float) -> None:
        self.tracker.evaluation(self.step, {f"eval/{name}/loss": loss for name, loss in losses.items()})

    def save(self) -> None:
        self.tracker.event("saved", step=self.step, seconds=0.5, bytes=2**30, path="x")

    def end(self, status: Status) -> None:
        self.tracker.finish(status)
