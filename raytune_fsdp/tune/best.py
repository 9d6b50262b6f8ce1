"""`best.yaml`: the config of a sweep's best trial, with the commands that continue it or train it again."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from raytune_fsdp.base.durable import replace_durably
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.load import recorded_text
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.tune.log import Entry, Trial, changes_now, generation
from raytune_fsdp.tune.place import SweepDir
from raytune_fsdp.tune.space import config_of, run_name_in
from raytune_fsdp.tune.spec import SweepSpec
from raytune_fsdp.tune.table import Standing


def config_now(spec: SweepSpec, trial: Trial, log: Sequence[Entry], *, publishes: bool = False) -> FinetuneConfig:
    """Return the config of a trial's newest run. `publishes`: as `config_of` has it."""
    return config_of(spec, trial, changes_now(trial, log), generation(trial.number, log), publishes=publishes)


def commands_of(spec: SweepSpec, trial: Trial, log: Sequence[Entry], *, anywhere: bool = False) -> tuple[str, str]:
    """Return the command that continues a trial's newest run to its end, and the one that trains its config again: as
    one would type them here, or so that they do the same in any directory of this machine (`anywhere`)."""
    run, best = RunDir.of(config_now(spec, trial, log)).config, SweepDir.of(spec).best
    # Relative paths in a config begin where the command is given.
    here = f"cd {shlex.quote(os.getcwd())} && " if anywhere else ""
    run_file, best_file = (shlex.quote(str(path)) if anywhere else _word(path) for path in (run, best))
    go_on = f"{here}raytune-fsdp train --config {run_file} --run.stop_after null"
    return go_on, f"{here}raytune-fsdp train --config {best_file} --run.name {spec.name}-best"


def put_best(spec: SweepSpec, log: Sequence[Entry], row: Standing) -> None:
    """Write `best.yaml`. `row`: where the best trial stands."""
    config = config_now(spec, row.trial, log, publishes=True)
    go_on, again = commands_of(spec, row.trial, log, anywhere=True)
    name, of = config.run.name, ""
    if row.seeds > 1:
        name, of = run_name_in(spec.name, row.trial.variant), f", the mean over its {row.seeds} seeds"
    lines = [
        f"# The best trial of the sweep {spec.name}: {name}, with {spec.metric or 'the mean loss'} "
        f"{row.value:.6g} after step {row.step}{of}.",
        *([f"# This is the config of its first seed, {config.run.name}."] if of else []),
        f"# To continue its run:     {go_on}",
        f"# To train it again:        {again}",
    ]
    if row.generation:
        lines.append("# Its run is a fork: trained again, it has these values from its first step on.")
    replace_durably(SweepDir.of(spec).best, "\n".join([*lines, recorded_text(config)]), private=True)


def _word(path: Path) -> str:
    """Return a path as a person would write it here."""
    relative = os.path.relpath(path)
    return shlex.quote(str(path) if relative.startswith("..") else relative)
