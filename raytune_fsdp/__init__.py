"""Fine-tune any Hugging Face causal language model on a Ray cluster, as one deterministic trajectory.

The rooms, from the command down; each imports only what is below it. Its `__init__.py` continues the tour.

    cli/         the commands, one file each
    tools/       audit, doctor and dry run: commands that look at a run or a machine from outside
    convert/     configs of other trainers, turned into ours
    tune/        sweeps: many runs, and what decides which of them go on; trials of Ray Tune
    launch/      from a config to ranks that train, with or without Ray
    predict/     memory and time of a step, before it
    run/         a run as a story: checks, start, training, evaluations, saves, exports
    record/      where its numbers go: metrics.jsonl, console, MLflow, the report
    checkpoint/  what is saved, how it is committed, found, verified, pruned
    step/        one optimizer step, and how a model is spread over ranks
    model/       weights in, a network whose weights are sharded, weights out
    data/        rows -> tokens -> packed samples -> batches
    plan/        what follows from a config: steps, schedule, mesh
    config/      what a user may write, a section a file
    base/        errors, files, threads: what all of them stand on

Beside them:

    report/      an old address of record/report, for scripts of users
    demo/        a small dataset and tokenizer for a first run without downloads

Importing this package imports nothing heavy: the public names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raytune_fsdp.base.hushed import hush_if_asked

if TYPE_CHECKING:
    from raytune_fsdp.base.errors import Interrupted, RaytuneError
    from raytune_fsdp.config import FinetuneConfig
    from raytune_fsdp.config.load import load_config
    from raytune_fsdp.launch.callbacks import (
        Answered,
        AttemptStarted,
        CheckpointCommitted,
        Evaluated,
        Happening,
        StepEnded,
        StopHandle,
    )
    from raytune_fsdp.launch.finetune import finetune
    from raytune_fsdp.launch.result import FinetuneResult
    from raytune_fsdp.model.objective.own_loss import LossDocument

__all__ = [
    "Answered",
    "AttemptStarted",
    "CheckpointCommitted",
    "Evaluated",
    "FinetuneConfig",
    "FinetuneResult",
    "Happening",
    "Interrupted",
    "LossDocument",
    "RaytuneError",
    "StepEnded",
    "StopHandle",
    "finetune",
    "load_config",
]

__version__ = "0.2.0"

_HOMES = {
    "Answered": "raytune_fsdp.launch.callbacks",
    "AttemptStarted": "raytune_fsdp.launch.callbacks",
    "CheckpointCommitted": "raytune_fsdp.launch.callbacks",
    "Evaluated": "raytune_fsdp.launch.callbacks",
    "FinetuneConfig": "raytune_fsdp.config",
    "FinetuneResult": "raytune_fsdp.launch.result",
    "Happening": "raytune_fsdp.launch.callbacks",
    "Interrupted": "raytune_fsdp.base.errors",
    "LossDocument": "raytune_fsdp.model.objective.own_loss",
    "RaytuneError": "raytune_fsdp.base.errors",
    "StepEnded": "raytune_fsdp.launch.callbacks",
    "StopHandle": "raytune_fsdp.launch.callbacks",
    "finetune": "raytune_fsdp.launch.finetune",
    "load_config": "raytune_fsdp.config.load",
}


hush_if_asked()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
