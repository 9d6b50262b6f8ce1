"""The saves of one attempt, one at a time: what each holds, and where it goes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from raytune_fsdp.base.errors import in_one_line
from raytune_fsdp.base.measured import Digest
from raytune_fsdp.base.row_hashes import digests_of, join_by_pairs, receiver
from raytune_fsdp.checkpoint.catalogue import Keep, committed, in_the_way, prune, remove_unpinned
from raytune_fsdp.checkpoint.contents import roots_of, tensors_of
from raytune_fsdp.checkpoint.location import storage_at
from raytune_fsdp.checkpoint.messages import Messages, open_messages
from raytune_fsdp.checkpoint.room import storage_without_room
from raytune_fsdp.checkpoint.save_in_flight import Ending, Outcome, SaveInFlight, SaveJob
from raytune_fsdp.checkpoint.state import STATE, RunState, digest_of_state
from raytune_fsdp.checkpoint.storage import Draft, Pinned, Storage, at_once, directory_name, not_pinned
from raytune_fsdp.checkpoint.writing import PieceLayout, Staging, hash_pieces, make_layout
from raytune_fsdp.model.pieces.pieces import local_piece
from raytune_fsdp.step.optim.update import Optimizer, UpdatesAfter

logger = logging.getLogger(__name__)

_LEAVE_SECONDS = 30  # storage that hangs for longer does not keep the process from ending


@dataclass(slots=True, kw_only=True)
class Saver:
    """Begins saves. All ranks call the same methods at the same steps."""

    storage: Storage
    attempt: int
    keep: Keep
    seconds: float
    """Time limit of a save."""
    tensors: Callable[[], dict[str, torch.Tensor]]
    layout: PieceLayout
    staging: Staging | None
    """None: pieces are written from where they are, and must not change meanwhile."""
    messages: Messages
    hashes: bool = False
    """Whether manifests get a digest of the numbers."""
    scores: dict[int, float] = field(default_factory=dict)
    """Scores by step, to keep the best checkpoints. On rank 0."""
    pinned: Pinned = not_pinned
    """Which checkpoints other runs need: they are not removed."""
    own_seconds: float = 0.0
    """How long training has waited for this rank's own part of saves."""
    _serial: int = 0
    _save: SaveInFlight | None = None
    """The last save that was begun."""
    _failed: list[Draft] = field(default_factory=list)
    _all_kept: bool = False
    """Whether nothing is removed after the last save that was begun."""
    copying: bool = False
    """Whether the last save that was begun is a peer copy."""

    @property
    def asynchronous(self) -> bool:
        return self.staging is not None

    def nbytes_own(self) -> int:
        """Return the bytes of this rank's pieces."""
        tensors = self.tensors()
        return sum(local_piece(tensors[name]).nbytes for name in self.layout.mine)

    def nbytes_staged(self) -> int:
        """Return the memory that a copy of this rank's pieces takes."""
        return 0 if self.staging is None else self.nbytes_own()

    def guard(self, optimizer: Optimizer, device: torch.device) -> Optimizer:
        """Return the optimizer, kept from changing on this device what a save is still copying."""
        held = None if device.type == "cpu" else self.staging
        return optimizer if held is None else UpdatesAfter(held.hold_updates, optimizer)

    def status(self) -> tuple[Ending | None, bool]:
        """Return how the last save ended, if rank 0 has yet to report that, and whether this rank is still busy.

        No save can begin while any rank is busy.
        """
        if self._save is None:
            return None, False
        # In this order: a save that ends between the two is then busy, or its ending is known. The other way round it
        # could be neither, and the next save would begin before this one was reported.
        busy = self._save.busy
        return self._save.ending(), busy

    @property
    def in_flight(self) -> bool:
        """Whether the outcome of the last save that was begun is still to be reported; the same on all ranks."""
        return self._save is not None and not self._save.reported

    @property
    def recovering(self) -> bool:
        """Whether the last save that was begun is a recovery point."""
        return self._save is not None and not self._save.job.lasting

    @property
    def nbytes(self) -> int:
        """The size of a checkpoint: the bytes of its numbers, over all ranks."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    def begin(
        self,
        state: RunState,
        *,
        before: Callable[[], None],
        lasting: bool = True,
        to: Storage | None = None,
        seconds: float | None = None,
    ) -> None:
        """Save the state after a step. The caller waits only for the copy. No rank may be busy.

        `before` is called on rank 0, in another thread, before the checkpoint becomes visible: twice, the second time
        at the last moment. Not `lasting`: a recovery point. `to`: where a peer copy goes, instead of the storage,
        within so many `seconds`; nothing is removed after it.
        """
        assert not self.in_flight, "one save at a time"
        since = time.monotonic()
        tensors = self.tensors()
        if self.staging is not None:
            self.staging.copy(tensors, self.layout.mine)
            pieces: Mapping[str, torch.Tensor] = self.staging.pieces
        else:
            pieces = {name: local_piece(tensors[name]) for name in self.layout.mine}
        self._serial += 1
        # Whatever has made the values infinite may be in the weights of this checkpoint, and of the ones before. The
        # run may have to be begun again from one before that, so none is removed until an update is done again.
        self._all_kept = bool(state.skipped_in_row)
        self.copying, storage = to is not None, to or self.storage
        name = directory_name(state.step, self.attempt, lasting)
        job = SaveJob(
            step=state.step,
            name=name,
            serial=self._serial,
            rank=dist.get_rank(),
            world=dist.get_world_size(),
            path=storage.where(name),
            lasting=lasting,
            draft=storage.draft(name, self._serial),
            layout=self.layout,
            pieces=pieces,
            ready=at_once if self.staging is None else self.staging.here,
            state=state.to_json(),
            digest=digest_of_state(state) if self.hashes else None,
            seconds=seconds or self.seconds,
            messages=self.messages,
            leftovers=tuple(self._failed),
            before=before,
            after=at_once if self._all_kept or self.copying else self._pruning(),
        )
        self._failed.clear()
        self._save = SaveInFlight(job)
        self.own_seconds += time.monotonic() - since

    def digest(self, state: RunState) -> Digest | None:
        """Return, on rank 0, the digest that a checkpoint of this state would have. Collective; the caller waits."""
        since = time.monotonic()
        tensors = self.tensors()
        mine = hash_pieces({name: local_piece(tensors[name]) for name in self.layout.mine}, self.layout)
        self.own_seconds += time.monotonic() - since
        rank = dist.get_rank()

        def receive(source: int) -> Any:
            box: list[Any] = [None]
            dist.recv_object_list(box, source)
            return box[0]

        joined = join_by_pairs(
            mine, self.layout.each_row, rank=rank, world=dist.get_world_size(),
            send=lambda value: dist.send_object_list([value], receiver(rank)), receive=receive,
        )  # fmt: skip
        if joined is None:
            return None
        assert not isinstance(joined, str), joined
        return roots_of({STATE: digest_of_state(state), **digests_of(joined, self.layout.each_row)})

    def again(self) -> None:
        """Begin the last save again, which has failed, of the same state. No rank may be busy, and if pieces are
        written from where they are, they must not have changed."""
        assert self._save is not None and self._save.reported, "one save at a time"
        self._serial += 1
        job = replace(
            self._save.job,
            serial=self._serial,
            draft=self.storage.draft(self._save.job.name, self._serial),
            leftovers=tuple(self._failed),
            after=at_once if self._all_kept else self._pruning(),
        )
        self._failed.clear()
        self._save = SaveInFlight(job)

    def _pruning(self) -> Callable[[], None]:
        """Return what removes older checkpoints once the next one is committed."""
        keep, scores, size = self.keep, dict(self.scores), self.nbytes

        def prune_all() -> None:
            prune(self.storage, keep, scores, self.pinned)
            # The older of two recovery points must not take the room of the saves that follow.
            if keep.recovery > 1 and storage_without_room(self.storage.location, size) is not None:
                prune(self.storage, replace(keep, recovery=1), scores, self.pinned)

        return prune_all

    def make_room(self, *, lasting: bool) -> list[str]:
        """Remove recovery points that are `in_the_way` of another checkpoint, for which storage has no room, and keep
        one at a time from now on. Returns their names. On rank 0, while no save is being written."""
        self.keep, gone = replace(self.keep, recovery=1), []
        try:
            for each in () if self._all_kept else in_the_way(committed(self.storage.location), lasting=lasting):
                if remove_unpinned(self.storage, each.name, self.pinned):
                    gone.append(each.name)
        except OSError as error:  # as after a commit: training goes on
            logger.warning("older checkpoints could not be removed: %s", in_one_line(error))
        return gone

    def report(self, ending: Ending) -> Outcome:
        """Return the outcome of the last save, after rank 0 has announced this `ending`. Collective."""
        assert self._save is not None, "no save was begun"
        return self._reported(self._save.report(ending))

    def finish(self) -> Outcome | None:
        """Wait for the outcome of the last save; None if there is no save, or it was reported. Collective."""
        if self._save is None or self._save.reported:
            return None
        since = time.monotonic()
        outcome = self._reported(self._save.finish())
        self.own_seconds += max(0.0, self._save.sent_at - since)
        return outcome

    def _reported(self, outcome: Outcome) -> Outcome:
        # The next save removes the draft of a failed one: a storage that failed may not have let it be removed.
        if outcome.saved is None and self._save is not None:
            self._failed.append(self._save.job.draft)
        return outcome

    def leave(self) -> None:
        """Wait for the writer's thread. A process that ends while the thread is inside C++ may crash."""
        if self._save is not None:
            self._save.join(_LEAVE_SECONDS)


def open_saver(
    root: str,
    model: PreTrainedModel,
    optimizer: Optimizer,
    *,
    attempt: int,
    keep: Keep,
    seconds: float,
    asynchronous: bool,
    scores: Mapping[int, float],
    hashes: bool = False,
    pinned: Pinned = not_pinned,
) -> Saver:
    """Return the saver of an attempt with this model and optimizer. Collective."""
    optimizer.init_state()
    now = partial(tensors_of, model, optimizer)
    return Saver(
        storage=storage_at(root),
        attempt=attempt,
        keep=keep,
        seconds=seconds,
        tensors=now,
        layout=make_layout(now()),
        staging=Staging() if asynchronous else None,
        messages=open_messages(),
        scores=dict(scores),
        hashes=hashes,
        pinned=pinned,
    )
