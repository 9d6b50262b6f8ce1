"""The run that a fork comes from: its checkpoint, what is on record of it, and what the fork writes down of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raytune_fsdp.base.errors import ResumeError, TransientError
from raytune_fsdp.base.untrusted import printable, read_file
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, checkpoint_at, committed, digest_of, verify
from raytune_fsdp.checkpoint.state import RunState, read_state
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.plan.run_dir import RunDir, checkpoints_of, forked_run
from raytune_fsdp.record.lineage import ForkedFrom, Lineage, read_lineage
from raytune_fsdp.run.forks.changes import FORK, allowed_changes
from raytune_fsdp.run.places import check_places

logger = logging.getLogger(__name__)

_MOST_NAMED, _ID_BYTES = 12, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """What `run.fork` names, from any working directory."""

    path: Path
    step: int
    named: str
    """`run.fork.run` as it was written."""
    base: str
    """`model.path` of the fork: the base of its adapters, if it has any, and not that which its parent names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """The run that a fork comes from, with the checkpoint that the fork begins with. Picklable."""

    place: RunDir
    checkpoint: CommittedCheckpoint
    digest: str
    """That of its numbers, if its ranks have computed one, else that of its manifest, which has a hash of each file."""
    chain: Sequence[ForkedFrom] = ()
    """From which runs the parent comes, from the root on."""

    def state(self) -> RunState:
        """Return the state with which the fork begins: that of the checkpoint, but for where its record was sent."""
        return replace(read_state(self.checkpoint), tracking={})


def fork_of(config: FinetuneConfig) -> Fork | None:
    """Return which run a config forks; None: it forks none."""
    fork, path = config.run.fork, forked_run(config)
    if fork is None or path is None:
        return None
    return Fork(path=path, step=fork.step, named=fork.run, base=str(config.model.path or ""))


def parent_of(child: RunDir, fork: Fork, *, trusted: bool) -> Parent:
    """Return the parent of a run that has no checkpoint yet. ResumeError if it lacks the checkpoint, or has damaged it.

    `trusted`: the command says that places may be followed.
    """
    path, named = fork.path, f"run.fork.run={fork.named}"
    if not path.is_dir():
        raise ResumeError(f"{named}: {path} is not a directory; name a run in run.storage, or the directory of one")
    if path.resolve() == child.path.resolve():
        raise ResumeError(f"{named} is this run itself, which has no checkpoint: choose another run.name")
    check_places(path, trusted=trusted, base=fork.base)
    place = RunDir(path, checkpoints_of(path))
    try:
        found = checkpoint_at(committed(place.checkpoints), fork.step)
        if found is None:
            raise ResumeError(f"{named}: there is no checkpoint of step {fork.step}; {steps_there(place)}")
        problem = verify(found, hashes=False)  # the ranks hash it together
        if problem is not None:
            raise ResumeError(f"{named}: {found.path} is damaged: {problem}; {steps_there(place)}")
        lineage = read_lineage(path)
        chain = () if lineage is None else tuple(lineage.forks)
        return Parent(place=place, checkpoint=found, digest=digest_of(found), chain=chain)
    except OSError as error:
        raise TransientError(
            f"{named}: {place.checkpoints} cannot be read: {error}; try again when the storage answers"
        ) from error


def steps_there(place: RunDir) -> str:
    """Name the steps of a run's checkpoints, as the end of a message."""
    steps = sorted({each.step for each in committed(place.checkpoints)})
    if not steps:
        return f"{place.path} has none"
    first = f"{len(steps) - _MOST_NAMED} more, and " if len(steps) > _MOST_NAMED else ""
    few = " (older ones are pruned: checkpoint.keep_last and keep_every say which)"
    return f"{place.path} has those of steps {first}{', '.join(map(str, steps[-_MOST_NAMED:]))}{few}"


def entry_of_fork(
    config: FinetuneConfig, parent: Parent | None, before: RunState, now: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the entry of a fork's identity; nothing of another run.

    `parent`: of a fork that begins now. `before`: the state from which the run goes on, whose identity has the entry if
    it is the run's own. `now`: the run's identity without it.
    """
    fork, known = config.run.fork, before.identity.get(FORK)
    if fork is None:
        return {}
    if parent is None:
        return {FORK: {**(known if isinstance(known, dict) else {}), "step": fork.step}}
    return {FORK: {"step": fork.step, "digest": parent.digest, "changed": sorted(changes_of(config, before, now))}}


def changes_of(config: FinetuneConfig, before: RunState, now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what a fork changes, with both values. The length of the schedule is in the state, not in the identity."""
    found, schedule = allowed_changes(before.identity, now), config.optim.schedule_steps
    if schedule not in (None, before.schedule_steps):
        found["optim.schedule_steps"] = (before.schedule_steps, schedule)
    return found


def lineage_of(config: FinetuneConfig, parent: Parent, before: RunState, identity: Mapping[str, Any]) -> Lineage:
    """Return the lineage of a fork. `before`: its parent's state. `identity`: its own."""
    if FORK in before.identity and not parent.chain:
        logger.warning("%s is gone: this run's lineage begins with that run, which is a fork", parent.place.lineage)
    changed = changes_of(config, before, identity)
    link = ForkedFrom(
        run=printable(parent.place.path.name),
        path=printable(str(parent.place.path)),
        mlflow_run_id=_mlflow_run(parent.place),
        step=parent.checkpoint.step,
        digest=parent.digest,
        changed={key: list(changed[key]) for key in sorted(changed)},
    )
    return Lineage(forks=[*parent.chain, link])


def _mlflow_run(place: RunDir) -> str | None:
    """Return the id of a run in MLflow; None if it has none."""
    with suppress(OSError, ValueError):
        found = read_file(place.mlflow_id, limit=_ID_BYTES).decode().strip()
        return found if found.isalnum() else None  # otherwise that of a run that was only asked for
    return None
