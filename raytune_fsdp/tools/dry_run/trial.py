"""Make the config of the two steps of a dry run: computed as in the real run, without all that is not a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raytune_fsdp.config import CheckpointConfig, EvalConfig, FinetuneConfig, ProfileConfig, TrackingConfig
from raytune_fsdp.config.sections.export import ExportConfig
from raytune_fsdp.config.sections.tracking import MlflowConfig

STEPS = 2
"""The first step compiles, fills caches and lets the allocator grow; the second is like all the others."""


def trial_of(config: FinetuneConfig, directory: Path) -> FinetuneConfig:
    """Return the config of the run that is trained in `directory`: same data, model, batches and ranks."""
    # A length of the schedule that its warmup fits into; how large the updates are makes no difference.
    asked = config.optim.schedule_steps or config.train.max_steps or STEPS
    schedule = max(asked, config.optim.warmup_steps or 0, STEPS)
    sections: dict[str, Any] = {
        # A fork takes as much memory and time as a run that begins with other numbers.
        "run": {"storage": str(directory), "resume": "auto", "stop_after": None, "fork": None},
        "data": {
            "cache": config.data.cache.model_copy(update={"path": str(directory / "cache")}),
            **({} if config.data.eval_decides_training else {"eval": []}),
        },
        "train": {"max_steps": STEPS, "epochs": None, "log_every": 1},
        "optim": {"schedule_steps": schedule},
        # A run that does not fit once does not fit in another attempt.
        "cluster": {"max_failures": 0},
    }
    return config.with_sections(**sections).model_copy(
        update={
            # An evaluation is due after every step, although nothing is evaluated: so each step's metrics are waited
            # for, and have its own time. Otherwise a GPU's metrics are fetched a step later, and both steps would get
            # the mean of the two.
            "eval": EvalConfig(every=1),
            "checkpoint": CheckpointConfig(every=None, asynchronous=config.checkpoint.asynchronous),
            "export": ExportConfig(at_end=False),
            "tracking": TrackingConfig(
                console=config.tracking.console,
                documents=config.tracking.documents,  # what it records is computed in the step
                mlflow=MlflowConfig(enabled=False),
            ),
            "profile": ProfileConfig(),
        }
    )
