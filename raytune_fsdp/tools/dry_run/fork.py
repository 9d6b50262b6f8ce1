"""Whether a run could begin as a fork: its dry run begins with the model's own files, and so does not ask."""

from __future__ import annotations

from dataclasses import replace

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.run.forks.parent import entry_of_fork, fork_of
from raytune_fsdp.run.resume import Resumed, check_same_run, find_resume
from raytune_fsdp.run.resume_point import RunInputs

_ORDER = "data.order_version"
"""The entry of an identity for the version of the rules by which rows are read."""


def begun_with(config: FinetuneConfig, *, trusted: bool) -> Resumed | None:
    """Return the checkpoint of its parent with which a fork would begin; None: it has its own, or is no fork. Raises if
    there is no such checkpoint. `trusted`: as in `finetune`."""
    fork = fork_of(config)
    if fork is None:
        return None
    found = find_resume(RunDir.of(config), resume=config.run.resume, fork=fork, trusted=trusted)
    return None if found.parent is None else found


def check_changes(config: FinetuneConfig, begun: Resumed, tried: RunInputs) -> None:
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
