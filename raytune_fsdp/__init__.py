"""Fine-tune any Hugging Face causal language model on a Ray cluster, as one deterministic trajectory.

The files, in the order in which a run's data flows. Each folder's `__init__.py` continues the tour.

    config/          what a user may write, one file per section; config/load.py reads YAML and command-line overrides
    plan.py          what follows from the config: steps, schedule, mesh
    rundir.py        the names and places inside a run directory
    identity.py      what makes it the same run, and how that may gain fields
    types.py         the values that travel between the stages
    counts.py        what became of the rows: counts of a window, and of all the data (the census)
    division.py      samples into steps, steps into blocks, blocks among ranks
    step_counts.py   what a step counts, packed for one sum over all ranks
    data/            rows -> tokens -> packed samples -> batches
    model/           weights in, a network whose weights are sharded, weights out
    parallel.py      mesh, sharding, precision
    optim/           optimizers and schedule
    step.py          one optimizer step: tensors in, tensors out
    loop.py          training as a story: a batch, a step, and when to log, evaluate, save, stop
    saving.py        when a save begins, and what is recorded of it
    metrics.py       tensors on the device become numbers to write
    evaluate.py      the loss on evaluation datasets, and answers to prompts
    checkpoint/      what is saved, how it is committed, found, verified, pruned
    run/             checks before the start, where the run stands, its first weights, its record, its export
    tracking/        where metrics go: metrics.jsonl, console, MLflow
    report/          what a person reads afterwards: summary, page about a run, model card
    estimate/        floating-point operations, for MFU
    assemble.py      a prepared run becomes objects on a rank, the only place where they are made
    launch/          processes, with or without Ray
    api.py           finetune(config) -> FinetuneResult, the whole program in one call
    cli/             the commands, one file each
    demo/            a small dataset and tokenizer for a first run without downloads

Used by many of them, and knowing none of them:

    errors.py        what can go wrong, and its exit code
    collectives.py   work on one rank or on all, with one outcome for every rank
    durable.py       writes that survive a crash
    keyed.py         random keys that are looked up, never drawn
    file_systems.py  the file system of a URL
    urls.py          paths and URLs as text
    redaction.py     removes secrets from everything that others may read
    bounded.py       a bounded number of open things
    talkative.py     libraries that print while they are imported

Importing this package imports nothing heavy: the public names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raytune_fsdp.talkative import hush_if_told

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


hush_if_told()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
