"""Train two steps in a directory that is removed, and measure them: the dry run itself."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path

from raytune_fsdp.base.batch import Progress
from raytune_fsdp.base.errors import Interrupted, TrainingError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch.environment import environment
from raytune_fsdp.launch.quiet import ignoring_warnings, quieting
from raytune_fsdp.launch.run_lock import locked
from raytune_fsdp.launch.signals import Signals
from raytune_fsdp.launch.torchrun import is_rank0
from raytune_fsdp.plan.run_dir import storage_of
from raytune_fsdp.run.checks import check_config
from raytune_fsdp.run.places import check_beginning
from raytune_fsdp.run.resume import Resumed
from raytune_fsdp.tools.dry_run.fork import begun_with, check_changes
from raytune_fsdp.tools.dry_run.outcome import DryRun, measured
from raytune_fsdp.tools.dry_run.scratch import scratch
from raytune_fsdp.tools.dry_run.trial import trial_of


def dry_run(
    config: FinetuneConfig,
    progress: Progress | None = None,
    *,
    began: float | None = None,
    force: bool = False,
    trust_places: bool = False,
) -> DryRun | None:
    """Train two steps as the run would, and measure them. Returns None on ranks other than 0 of torchrun.

    `began`: when the command began (seconds since 1970); None: now. `force`: try even what does not fit.
    `trust_places`: as in `finetune`. Raises what keeps the run from being trained, also a lack of memory.
    """
    check_config(config, None)  # the trial's config no longer has all of its settings
    begun = None
    if is_rank0():  # here, as the directory of the trial has no mark of this user's
        check_beginning(config, trusted=trust_places)
        begun = begun_with(config, trusted=trust_places)
    began, storage = began or time.time(), storage_of(config)
    # The other ranks of torchrun never ask for the place of the run: they get it from rank 0.
    here = scratch(storage, f"dry-run-{config.run.name}-") if is_rank0() else nullcontext(storage / "dry-run")
    try:
        with here as directory:
            return _tried(config, directory, began, progress, force, begun)
    except Interrupted:
        # Training's message says that what it has saved is there to go on from, which is not so here.
        raise Interrupted("the dry run was stopped, and what it has written is removed") from None
    except TrainingError as error:
        left = "this was a dry run: nothing is left of it, neither logs nor a snapshot that the line above may name"
        raise TrainingError(str(error), left) from error


def _tried(
    config: FinetuneConfig,
    directory: Path,
    began: float,
    progress: Progress | None,
    force: bool,
    begun: Resumed | None,
) -> DryRun | None:
    trial = trial_of(config, directory)
    with environment(quieting()), ignoring_warnings(), locked(trial) if is_rank0() else nullcontext():
        with Signals():  # before the imports, which take seconds
            from raytune_fsdp.launch.start import run

            prepared, _ = run(trial, progress, dry=True, force=force, trust_places=True)
        if begun is not None:
            check_changes(config, begun, prepared)
        return measured(config, trial, prepared, began) if is_rank0() else None
