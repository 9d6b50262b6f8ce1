"""Train two steps in a directory that is removed, and measure them: the dry run itself."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from raytune_fsdp.base.batch import Progress
from raytune_fsdp.base.errors import Interrupted, TrainingError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch.environment import environment
from raytune_fsdp.launch.quiet import ignoring_warnings, quieting
from raytune_fsdp.launch.run_lock import locked
from raytune_fsdp.launch.signals import Signals
from raytune_fsdp.launch.torchrun import is_rank0
from raytune_fsdp.plan.run_dir import RunDir, storage_of
from raytune_fsdp.run.checks import check_config
from raytune_fsdp.run.forks.parent import entry_of_fork, fork_of
from raytune_fsdp.run.places import check_beginning
from raytune_fsdp.run.resume import Resumed, check_same_run, find_resume
from raytune_fsdp.run.resume_point import RunInputs
from raytune_fsdp.tools.dry_run.outcome import DryRun, measured
from raytune_fsdp.tools.dry_run.scratch import scratch
from raytune_fsdp.tools.dry_run.trial import trial_of

_ORDER = "data.order_version"
"""The entry of an identity for the version of the rules by which rows are read."""


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
        begun = _begun_with(config, trusted=trust_places)
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
            _check_changes(config, begun, prepared)
        return measured(config, trial, prepared, began) if is_rank0() else None


# Whether a run could begin as a fork: its dry run begins with the model's own files, and so does not ask.


def _begun_with(config: FinetuneConfig, *, trusted: bool) -> Resumed | None:
    """Return the checkpoint of its parent with which a fork would begin; None: it has its own, or is no fork. Raises if
    there is no such checkpoint. `trusted`: as in `finetune`."""
    fork = fork_of(config)
    if fork is None:
        return None
    found = find_resume(RunDir.of(config), resume=config.run.resume, fork=fork, trusted=trusted)
    return None if found.parent is None else found


def _check_changes(config: FinetuneConfig, begun: Resumed, tried: RunInputs) -> None:
    """Refuse what a fork may not change, as far as the run that was tried tells: it has read the model's own files, and
    rows by the newest rules."""
    if begun.state.identity.get(_ORDER) != tried.identity.get(_ORDER):
        return
    before, now = (
        {key: value for key, value in identity.items() if not key.startswith("model.")}
        for identity in (begun.state.identity, tried.identity)
    )
    now |= entry_of_fork(config, begun.parent, begun.state, now)
    check_same_run(replace(begun, state=replace(begun.state, identity=before)), now, tried.files_of_data)
