"""Fine-tune any Hugging Face causal language model on a Ray cluster, as one deterministic trajectory.

The files in the order that explains them:

    config/          what a user may write, a file per section; config/load.py reads YAML and command-line overrides
    api.py           finetune(config) -> FinetuneResult, the whole program in one call
    plan.py          what follows from the config: steps, batches, who computes what
    types.py         the values that travel between the stages
    data/            rows -> tokens -> packed samples -> batches
    model/           a checkpoint in, a sharded module out
    parallel.py      mesh, sharding, precision
    optim.py         optimizer and schedule
    step.py          one optimizer step: tensors in, tensors out
    assemble.py      the plan becomes objects, the only place where they are made
    loop.py          the story of a run
    checkpoint/      what is saved, how it is committed, found, verified
    tracking/        where metrics go
    launch/          processes, with or without Ray
    cli/             the commands

Importing this package imports nothing heavy: the public names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raytune_fsdp.api import FinetuneResult, finetune
    from raytune_fsdp.config import FinetuneConfig
    from raytune_fsdp.errors import RaytuneError

__all__ = ["FinetuneConfig", "FinetuneResult", "RaytuneError", "finetune"]

__version__ = "0.2.0"

_HOMES = {
    "FinetuneConfig": "raytune_fsdp.config",
    "FinetuneResult": "raytune_fsdp.api",
    "RaytuneError": "raytune_fsdp.errors",
    "finetune": "raytune_fsdp.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
