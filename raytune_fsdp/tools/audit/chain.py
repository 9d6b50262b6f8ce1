"""Follow a fork to the run that it comes from, and that one to its own, until the root."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from raytune_fsdp.base.errors import ConfigError, RaytuneError
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, committed
from raytune_fsdp.checkpoint.state import read_state
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.plan.run_dir import RunDir, forked_run
from raytune_fsdp.run.forks.changes import FORK
from raytune_fsdp.run.forks.parent import Parent, fork_of, parent_of
from raytune_fsdp.run.places import check_parent
from raytune_fsdp.tools.audit.segment import Segment, check_mounted, choose_segment

_MOST_RUNS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedPart:
    """A run of a chain, and which of its steps are trained again."""

    config: FinetuneConfig
    place: RunDir
    segment: Segment


def is_fork(segment: Segment, place: RunDir) -> bool:
    """Return whether the segment begins with a checkpoint of the run's parent."""
    return segment.before is not None and segment.before.root != place.checkpoints


def part_of(
    config: FinetuneConfig, place: RunDir, first: int | None, last: int | None, *, trusted: bool
) -> AuditedPart:
    """Return a segment of a run; of a fork it may begin with its parent's checkpoint. See `choose_segment`.

    `trusted`: the parent may be followed to places that this user has not chosen.
    """
    begins_after = 0 if config.run.fork is None else config.run.fork.step
    segment = choose_segment(place, first, last, begins_after)
    if begins_after and segment.first == begins_after:
        segment = replace(segment, before=_begun_with(config, place, trusted=trusted).checkpoint)
    return AuditedPart(config=config, place=place, segment=segment)


def chain_of(
    config: FinetuneConfig,
    place: RunDir,
    last: int | None,
    open_run: Callable[[Path], tuple[FinetuneConfig, RunDir]],
    *,
    trusted: bool,
) -> list[AuditedPart]:
    """Return all that was trained for the steps of a run up to `last`, from the root of its chain on.

    `open_run` returns config and places of a run, after checking what it leads to.
    """
    found: list[AuditedPart] = []
    while len(found) < _MOST_RUNS:
        fork, parent = config.run.fork, forked_run(config)
        found.insert(0, part_of(config, place, 0 if fork is None else fork.step, last, trusted=trusted))
        if fork is None or parent is None:
            return found
        last = fork.step
        config, place = open_run(parent)
    raise ConfigError(f"--chain: {place.path} is the fork of more than {_MOST_RUNS} runs, one of the other")


def _begun_with(config: FinetuneConfig, place: RunDir, *, trusted: bool) -> Parent:
    """Return the parent of a fork. ConfigError if it has no longer the checkpoint with which the fork began."""
    fork = fork_of(config)
    assert fork is not None
    check_parent(place.path, fork.path, trusted=trusted, base=fork.base)
    steps = ", ".join(str(each.step) for each in committed(place.checkpoints)) or "it has none"
    own = f"audit a segment between checkpoints of the run's own (--from, --to): {steps}"
    try:
        found = parent_of(place, fork, trusted=True)
        check_mounted(found.place)
    except RaytuneError as error:
        raise ConfigError(f"--from {fork.step}: {error}; {own}") from error
    known = _known_digest(place)
    if known is not None and known != found.digest:
        raise ConfigError(
            f"--from {fork.step}: {found.checkpoint.path} is not the checkpoint with which this run began, whose "
            f"digest was {known}; {own}"
        )
    return found


def _known_digest(place: RunDir) -> str | None:
    """Return the digest of the checkpoint with which a fork began, as its own newest checkpoint names it."""
    own: list[CommittedCheckpoint] = committed(place.checkpoints)
    entry = read_state(own[-1]).identity.get(FORK) if own else None
    digest = entry.get("digest") if isinstance(entry, dict) else None
    return digest if isinstance(digest, str) else None
