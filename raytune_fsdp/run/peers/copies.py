"""Decide when a peer copy begins, between two steps. Nothing of a run follows from it but where a lost attempt goes on.

It is no commit: it is no event and on no list of checkpoints, nobody's request is answered by it, nothing is pruned,
measured or exported after it, and one that fails is only a line in the log of rank 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch.distributed as dist

from raytune_fsdp.base.collectives import on_rank0
from raytune_fsdp.base.errors import TransientError, in_one_line
from raytune_fsdp.base.measured import Digest
from raytune_fsdp.checkpoint.location import in_memory
from raytune_fsdp.checkpoint.manifest import read_manifest
from raytune_fsdp.checkpoint.peers.clock import CopyClock
from raytune_fsdp.checkpoint.peers.storage import PeerStorage
from raytune_fsdp.checkpoint.save_in_flight import Outcome
from raytune_fsdp.checkpoint.saver import Saver
from raytune_fsdp.checkpoint.state import RunState
from raytune_fsdp.config import CheckpointConfig
from raytune_fsdp.run.resume_point import ResumePoint

logger = logging.getLogger(__name__)

MOST_SECONDS = 120.0
"""A copy that takes longer is given up: a planned save waits for it."""
_LEFT_OUT = (0, 1, 3, 9)
"""How many copies that come by steps are left out, by how many have failed in a row; the last number for more of them.
A keeper whose process has died is back after a second; one that hangs costs each copy 40 s, which a planned save would
wait for."""


@dataclass(slots=True, kw_only=True)
class PeerCopies:
    """The peer copies of one attempt. All ranks call the same methods at the same steps."""

    storage: PeerStorage
    every: int | None
    """Steps between two copies; None: as the clock says."""
    clock: CopyClock | None
    """Rank 0's clock, if the clock says when."""
    _owed: bool = False
    """Whether a copy was due while something else was being written."""
    _failed: int = 0
    """How many copies have failed since the last good one."""
    _left_out: int = 0
    """How many copies are still to be left out."""

    def nbytes(self, saver: Saver) -> int:
        """Return the memory of nodes that the copies of this rank's part take: the newest whole one, and the next."""
        return 2 * self.storage.nodes_of_a_file * saver.nbytes_own()

    def asks(self, *, busy: bool) -> bool:
        """Return whether this rank's clock asks for a copy. `busy`: something is being written."""
        return self.clock is not None and self.clock.due(busy=busy)

    def due(self, step: int, *, asked: bool, saving: bool, free: bool) -> bool:
        """Return whether to copy after this step. `asked`: the clock does. `saving`: a checkpoint is begun there, which
        is worth more. `free`: nothing is being written; a copy that is due otherwise begins after that."""
        by_step = self.every is not None and step % self.every == 0
        if by_step and self._left_out:
            by_step, self._left_out = False, self._left_out - 1
        wanted = not saving and (asked or self._owed or by_step)
        self._owed = wanted and not free
        return wanted and free

    def begin(self, saver: Saver, state: RunState, before: Callable[[], None]) -> None:
        """Copy the state after a step. `before`: see `Saver.begin`."""
        if self.clock is not None:
            self.clock.begins()
        saver.begin(state, before=before, lasting=False, to=self.storage, seconds=min(saver.seconds, MOST_SECONDS))

    def held(self) -> None:
        """Note that training goes on."""
        if self.clock is not None:
            self.clock.held()

    def ended(self, outcome: Outcome) -> None:
        """Note what has become of the last copy. One whose state is not finite is no reason to end the run: the next
        checkpoint is, whose step no clock has chosen."""
        if self.clock is not None:
            self.clock.ended(None if outcome.saved is None else outcome.saved.seconds)
        self._failed = min(self._failed + 1, len(_LEFT_OUT) - 1) if outcome.saved is None else 0
        self._left_out = _LEFT_OUT[self._failed]
        if outcome.saved is None and outcome.problem:
            logger.warning("there is no peer copy of step %d: %s", outcome.step, outcome.problem)


def open_copies(chosen: CheckpointConfig, standing: ResumePoint, saver: Saver, storage: PeerStorage) -> PeerCopies:
    """Return the peer copies of an attempt that has loaded what it begins with. Collective.

    Older copies are forgotten. What was loaded from one must have the digest that is in its manifest, if there is one.
    """
    copy = standing.checkpoint if standing.checkpoint is not None and in_memory(standing.checkpoint.root) else None
    wrong = None
    if copy is not None and saver.hashes:
        wrong = _wrong_digest(storage, copy.name, saver.digest(standing.state))
    if dist.get_rank() == 0:
        storage.forget(standing.attempt, but=None if copy is None or wrong else copy.name)
    if copy is not None and (why := on_rank0(lambda: wrong, what="compare digests")) is not None:
        raise TransientError(f"{why}; the next attempt goes on from the newest checkpoint")
    by_clock = chosen.peer_every is None and dist.get_rank() == 0
    return PeerCopies(storage=storage, every=chosen.peer_every, clock=CopyClock() if by_clock else None)


def _wrong_digest(storage: PeerStorage, name: str, here: Digest | None) -> str | None:
    """Say, on rank 0, that what was loaded is not what the ranks had when they made a copy."""
    if here is None:
        return None
    try:
        recorded = read_manifest(storage, name).digest
    except (OSError, ValueError) as error:
        return f"{storage.where(name)} cannot be read: {in_one_line(error)}"
    if recorded == asdict(here):
        return None
    return f"the digest of {storage.where(name)} is not that of what was loaded from it"
