"""`best.yaml`: the config of a sweep's best trial, with the commands that continue it or train it anew."""

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
from raytune_fsdp.tune.space import config_of
from raytune_fsdp.tune.spec import SweepSpec
from raytune_fsdp.tune.table import best_of, leaderboard


def commands_of(spec: SweepSpec, trial: Trial, log: Sequence[Entry]) -> tuple[str, str]:
    """Return the command that continues a trial's newest run to its end, and the one that trains its config anew."""
    run, best = RunDir.of(_config(spec, trial, log)), SweepDir.of(spec).best
    go_on = f"raytune-fsdp train --config {_word(run.config)} --run.stop_after null"
    return go_on, f"raytune-fsdp train --config {_word(best)} --run.name {spec.name}-best"


def put_best(spec: SweepSpec, log: Sequence[Entry]) -> Trial | None:
    """Write `best.yaml`, and return the trial; None: no trial has a value yet."""
    trial = best_of(log)
    if trial is None:
        return None
    row = next(row for row in leaderboard(log) if row.trial.number == trial.number)
    config = _config(spec, trial, log)
    go_on, anew = commands_of(spec, trial, log)
    metric = spec.metric or "the mean loss"
    lines = [
        f"# The best trial of the sweep {spec.name}: {config.run.name}, with {metric} {row.value:.6g} after step "
        f"{row.step}.",
        f"# To continue its run:     {go_on}",
        f"# To train it once more:   {anew}",
    ]
    if generation(trial.number, log):
        lines.append("# Its run is a fork: trained once more, it has these values from its first step on.")
    replace_durably(SweepDir.of(spec).best, "\n".join([*lines, recorded_text(config)]), private=True)
    return trial


def _config(spec: SweepSpec, trial: Trial, log: Sequence[Entry]) -> FinetuneConfig:
    return config_of(spec, trial, changes_now(trial, log), generation(trial.number, log))


def _word(path: Path) -> str:
    """Return a path as a person would write it here."""
    relative = os.path.relpath(path)
    return shlex.quote(str(path) if relative.startswith("..") else relative)
