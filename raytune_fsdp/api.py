"""finetune(config) -> FinetuneResult: the whole of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.types import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneResult:
    """What a finished run has left."""

    run_dir: Path
    steps: int
    trained: int
    """Steps of this call; 0 where the run was complete already."""
    checkpoint: str
    """The newest checkpoint: directory or URL."""
    export: Path | None
    """Hugging Face model directory; None where the config asks for none."""
    pushed: str | None
    """Where it is on the hub; None where it was not pushed."""
    curve: Path | None
    """Loss curve as PNG; None where matplotlib is not installed, and on ranks other than 0."""


def finetune(config: FinetuneConfig, progress: Progress | None = None) -> FinetuneResult:
    """Train to the end, continuing what is there, export, and draw the curve. Raises RaytuneError.

    `progress(what, done, total)` is told of the data's preparation and count. Under torchrun every rank calls this.
    """
    from raytune_fsdp.launch.quiet import quiet

    quiet()
    from raytune_fsdp.checkpoint.commit import committed
    from raytune_fsdp.launch.start import run
    from raytune_fsdp.publish import publish
    from raytune_fsdp.report.curves import plot
    from raytune_fsdp.report.figure import can_draw
    from raytune_fsdp.tracking.jsonl import METRICS_FILE

    prepared = run(config, progress)
    plan = prepared.plan
    trained = max(0, plan.steps - prepared.state.step)
    newest = committed(plan.checkpoints)[-1] if trained else prepared.resume
    assert newest is not None, "a run that is complete has a checkpoint"
    export = plan.run_dir / "export" if config.export.at_end else None
    curve, pushed = None, None
    if is_rank0():
        if export is not None:
            pushed = publish(newest, export, config.export)
        if can_draw():
            curve = plan.run_dir / "report" / "loss.png"
            plot(plan.run_dir / METRICS_FILE, curve, title=config.run.name)
    return FinetuneResult(
        run_dir=plan.run_dir,
        steps=plan.steps,
        trained=trained,
        checkpoint=newest.path,
        export=export,
        pushed=pushed,
        curve=curve,
    )


def is_rank0() -> bool:
    """Whether this process speaks for the run: it was not started by torchrun, or as its rank 0."""
    return int(os.environ.get("RANK", "0")) == 0
