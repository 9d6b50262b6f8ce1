"""The life of one save: begun, written, committed or failed, reported.

A thread on each rank writes that rank's file while training goes on; rank 0's thread commits when all have written.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from raytune_fsdp.base.errors import TransientError, in_one_line
from raytune_fsdp.base.measured import Digest, Saved
from raytune_fsdp.base.row_hashes import Hashes, digests_of, join_by_pairs, senders
from raytune_fsdp.checkpoint.contents import roots_of
from raytune_fsdp.checkpoint.index import parse_index
from raytune_fsdp.checkpoint.manifest import make_manifest
from raytune_fsdp.checkpoint.messages import Messages
from raytune_fsdp.checkpoint.room import lacks_room
from raytune_fsdp.checkpoint.state import STATE
from raytune_fsdp.checkpoint.storage import INDEX_FILE, PIECES, STATE_FILE, Draft
from raytune_fsdp.checkpoint.writing import NotFiniteError, PieceLayout, Sum, write_pieces, write_small

logger = logging.getLogger(__name__)

Ending = Literal["committed", "failed", "not_finite", "no_room"]
"""How a save ends. `not_finite`: the state has an infinity or a NaN, so another save would end the same way. `no_room`:
storage is full."""
ENDINGS: tuple[Ending, ...] = get_args(Ending)

_PAUSE_FOR_HASHES = 0.1
"""Half of all ranks wait for these while others still write, and rank 0's process answers them all."""
_GRACE_SECONDS = 120
"""Rank 0 gives a save up after its time limit, or after twice that if storage hangs during the commit. The other ranks
wait this much longer before they conclude that rank 0 itself is stuck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a save has ended."""

    step: int
    ending: Ending
    saved: Saved | None = None
    """The checkpoint, if it was committed."""
    problem: str | None = None
    """Why there is no checkpoint, if it was not committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """What to write, and how the ranks reach each other."""

    step: int
    serial: int
    rank: int
    world: int
    name: str
    path: str
    """Path or URL of the checkpoint, for messages."""
    lasting: bool
    """False: it becomes a recovery point."""
    draft: Draft
    layout: PieceLayout
    pieces: Mapping[str, torch.Tensor]
    ready: Callable[[], None]
    """Waits until the pieces may be read."""
    state: str
    digest: str | None
    """The digest of the state. None: numbers are not hashed."""
    seconds: float
    """Time limit of the save."""
    messages: Messages
    leftovers: Sequence[Draft]
    """Drafts of earlier saves that failed. Rank 0 removes them first."""
    before: Callable[[], None]
    """Rank 0 calls this before it commits, and again right before the checkpoint becomes visible."""
    after: Callable[[], None]
    """Rank 0 calls this after the commit."""

    def written_key(self, rank: int) -> str:
        return f"{self.serial}/{rank}"

    def hashes_key(self, rank: int) -> str:
        return f"{self.serial}/hashes/{rank}"

    def ended_key(self, rank: int) -> str:
        return f"{self.serial}/ended/{rank}"


class SaveInFlight:
    """One rank's part in a save, from its beginning to its end:

        begun       the constructor starts this rank's writer, a thread
        written     the writer has sent rank 0 a message about this rank's file
        ended       rank 0's writer knows the `outcome`: committed, failed, not_finite or no_room
        reported    `report` (or `finish`, which waits) has brought the outcome to training on all ranks

    Training calls every method, at the same step on all ranks; only the writers run at the same time.
    """

    def __init__(self, job: SaveJob) -> None:
        self.job = job
        self.reported = False
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self.sent_at = 0.0
        """When this rank's part was written, or had failed, by `time.monotonic`. 0: not yet."""
        self._waiting_for = "rank 0 had not written its part"
        self._given_up = False
        self._committing = False
        self._outcome: Outcome | None = None
        # A daemon: a thread in storage that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=f"save-{job.step}", daemon=True)
        self._thread.start()

    def ending(self) -> Ending | None:
        """Return how the save ended, on rank 0 until it was reported; otherwise None."""
        if self.reported or self.job.rank != 0:
            return None
        outcome = self.outcome()
        return outcome.ending if outcome is not None else None

    @property
    def busy(self) -> bool:
        """Whether another save must wait: this rank is still writing, or rank 0 does not know the outcome yet."""
        if self._thread.is_alive():
            return True
        if not self.sent_at:  # the thread was ended from outside: spare rank 0 the wait for its message
            self._send({"problem": "its writer ended without a report"})
            self._send_hashes("its writer ended without a report")
        return self.job.rank == 0 and not self.reported and self.outcome() is None

    def outcome(self) -> Outcome | None:
        """Return the outcome on rank 0; None while unknown. Give up a save that takes too long; it never commits."""
        with self._lock:
            if self._outcome is None:
                if self._committing:
                    # A commit that has begun cannot be taken back: storage that hangs in it gets the same time again.
                    if self._left() < -self.job.seconds:
                        self._outcome = self._failed("the storage does not answer whether the checkpoint is there")
                elif not self._thread.is_alive():
                    self._outcome = self._failed("rank 0: its writer ended without a report")
                elif self._left() < 0:
                    self._outcome = self._failed(self._too_late())
                    self._given_up = True
            return self._outcome

    def report(self, ending: Ending) -> Outcome:
        """Return the outcome, on every rank, after rank 0 has announced this `ending`. Collective.

        Only rank 0 knows the size of a committed checkpoint and how long it took.
        """
        assert not self.reported, "a save is reported once"
        known = self._wait() if self.job.rank == 0 else None
        self.reported = True
        if ending == "committed":
            job = self.job
            unmeasured = Saved(step=job.step, path=job.path, seconds=0.0, bytes=0, lasting=job.lasting)
            return known or Outcome(step=self.job.step, ending=ending, saved=unmeasured)
        problem: list[Any] = [known.problem if known else None]
        dist.broadcast_object_list(problem, src=0)
        return Outcome(step=self.job.step, ending=ending, problem=problem[0])

    def finish(self) -> Outcome:
        """Wait for the outcome and report it. Collective."""
        job = self.job
        if job.rank == 0:
            ending = self._wait().ending
            for rank in range(1, job.world):
                job.messages.send(job.ended_key(rank), ending)
        else:
            # Not in a collective, which would time out long before a slow save does.
            deadline = time.monotonic() + 2 * job.seconds + _GRACE_SECONDS
            while (message := job.messages.receive(job.ended_key(job.rank))) is None:
                if time.monotonic() > deadline:
                    raise TransientError(f"rank 0 does not report how the checkpoint of step {job.step} ended")
            assert message in ENDINGS, message
            ending = message
        dist.all_reduce(torch.zeros(()))  # rank 0 hosts the messages: it must not exit before all have read theirs
        return self.report(ending)

    def join(self, seconds: float) -> None:
        """Wait for this rank's writer, at most `seconds`."""
        self._thread.join(seconds)

    def _wait(self) -> Outcome:
        """Wait for the outcome, on rank 0."""
        while (outcome := self.outcome()) is None:
            self._thread.join(0.2 if self._committing else max(0.01, min(0.2, self._left())))
        return outcome

    def _run(self) -> None:
        """Write this rank's file and send the message about it; on rank 0, also commit. Runs in the writer's thread."""
        job = self.job
        message: dict[str, Any] = {"problem": "its writer was ended"}
        hashes: Hashes | str = "its writer was ended"
        try:
            self._clean_store()
            for draft in job.leftovers if job.rank == 0 else ():
                self._clean_up(draft.discard)
            message, hashes = self._write()
        finally:
            self._send(message)
            if job.rank != 0:
                self._pass_on(hashes)
            else:
                outcome = self._failed("rank 0: its writer was ended")
                try:
                    outcome = self._gather(hashes)
                finally:
                    with self._lock:  # `outcome` may have given the save up before this
                        self._outcome = self._outcome or outcome
                if outcome.saved is not None:
                    self._clean_up(job.after)

    def _clean_store(self) -> None:
        """Remove what was hashed for a save that was given up: rank 0's memory would keep it.

        Of the save before the last one: a writer of the last one may still be about to read it.
        """
        job = self.job
        with suppress(Exception):
            for rank in senders(job.rank, job.world) if job.digest is not None else ():
                job.messages.drop(replace(job, serial=job.serial - 2).hashes_key(rank))

    def _write(self) -> tuple[dict[str, Any], Hashes | str]:
        """Write this rank's file; return the message about it for rank 0, and what was hashed of it."""
        job = self.job
        if not job.layout.mine:
            return {"file": None}, {}
        file = f"__{job.rank}_{job.serial}{PIECES}"
        try:
            job.ready()
            written = write_pieces(job.draft, file, job.pieces, job.layout, hashes=job.digest is not None)
        except NotFiniteError as error:
            return {"problem": f"{error} is not finite", "not_finite": True}, f"{error} is not finite"
        except Exception as error:  # whatever a storage raises, training goes on
            return {"problem": in_one_line(error), "no_room": lacks_room(error)}, in_one_line(error)
        return {"file": file, "sum": asdict(written.sum), "table": written.table}, written.hashes

    def _send(self, message: dict[str, Any]) -> None:
        """Send rank 0 the message. If it cannot be sent, rank 0 waits until the time limit, and gives the save up."""
        try:
            self.job.messages.send(self.job.written_key(self.job.rank), message)
        except Exception as error:  # the thread goes on: on rank 0 it has to find out how the save ends
            logger.warning("rank %d could not report its part of a save: %s", self.job.rank, in_one_line(error))
        self.sent_at = time.monotonic()

    def _pass_on(self, hashes: Hashes | str) -> None:
        """On another rank than 0: join what was hashed with what the ranks behind this one send, and send it on."""
        job, why = self.job, "its writer was ended"
        try:
            self._join(hashes)
            why = ""
        except Exception as error:  # the save fails: rank 0 gets the reason
            why = in_one_line(error)
        finally:
            if why:
                self._send_hashes(f"rank {job.rank}: {why}")

    def _send_hashes(self, value: object) -> None:
        """Send what was hashed, or a text that says why there is nothing, to the rank that joins it with its own."""
        job = self.job
        if job.digest is not None and job.rank != 0:
            with suppress(Exception):  # the receiver waits until the time limit, and gives the save up
                job.messages.send(job.hashes_key(job.rank), [value])

    def _join(self, hashes: Hashes | str) -> Hashes | str | None:
        """Return, on rank 0, what all ranks have hashed, or why that is not known."""
        job = self.job
        if job.digest is None:
            return None

        def receive(rank: int) -> Any:
            what = f"rank {rank} had not sent what was hashed"
            return self._receive(job.hashes_key(rank), what, pause=_PAUSE_FOR_HASHES)[0]

        return join_by_pairs(
            hashes, job.layout.each_row, rank=job.rank, world=job.world, send=self._send_hashes, receive=receive
        )

    def _receive(self, key: str, missing: str, pause: float = 0.002) -> Any:
        """Wait for a message until the save is given up, which rank 0 decides."""
        self._waiting_for = missing
        least = 0 if self.job.rank == 0 else -_GRACE_SECONDS
        while (message := self.job.messages.receive(key, pause=pause)) is None:
            if self._given_up or self.reported or self._left() < least:
                raise TransientError(self._too_late())
        return message

    def _gather(self, hashes: Hashes | str) -> Outcome:
        """On rank 0: wait for every rank's message, then commit."""
        job = self.job
        try:
            messages: list[dict[str, Any]] = [
                self._receive(job.written_key(rank), f"rank {rank} had not written its part")
                for rank in range(job.world)
            ]
            joined: Hashes | str | None = None
            try:
                joined = self._join(hashes)  # whatever the messages say: those with hashes must not stay in the store
            except TransientError:
                if not any("problem" in each for each in messages):
                    raise
            problems = [f"rank {r}: {each['problem']}" for r, each in enumerate(messages) if "problem" in each]
            if problems:
                job.draft.discard()
                more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
                kinds: tuple[Ending, ...] = ("not_finite", "no_room")
                ending: Ending = next((kind for kind in kinds if any(each.get(kind) for each in messages)), "failed")
                return self._failed(problems[0] + more, ending)
            size, digest = self._commit(messages, joined)
        except Exception as error:
            job.draft.discard()
            return self._failed(f"rank 0: {in_one_line(error)}", "no_room" if lacks_room(error) else "failed")
        seconds = time.monotonic() - self._started
        saved = Saved(step=job.step, path=job.path, seconds=seconds, bytes=size, lasting=job.lasting, digest=digest)
        return Outcome(step=job.step, ending="committed", saved=saved)

    def _commit(self, messages: list[dict[str, Any]], joined: Hashes | str | None) -> tuple[int, Digest | None]:
        """Write the index of all files and the rest of the state, then publish. Return size and digest."""
        job = self.job
        written = [each for each in messages if each["file"]]
        sums = {each["file"]: Sum(**each["sum"]) for each in written}
        index = job.layout.index([(each["file"], *each["table"]) for each in written])
        parse_index(index, {name: each.bytes for name, each in sums.items()})  # what nobody could read is not committed
        small = {INDEX_FILE: index, STATE_FILE: job.state.encode()}
        sums |= {name: write_small(job.draft, name, content) for name, content in small.items()}
        digest = None
        if job.digest is not None:
            if joined is None or isinstance(joined, str):
                raise TransientError(f"what the ranks have hashed could not be joined: {joined}")
            digest = roots_of({STATE: job.digest, **digests_of(joined, job.layout.each_row)})
        job.before()
        with self._lock:
            # If training has given this save up, it may have begun the next one: this one must not become visible now.
            if self._given_up:
                raise TransientError("given up")
            self._committing = True
        # Asked again at the last moment, when little is left to write to disk: somebody may have taken over the run.
        manifest = make_manifest(sums, None if digest is None else asdict(digest))
        job.draft.publish({name: each.bytes for name, each in sums.items()}, manifest, job.before)
        return sum(each.bytes for each in sums.values()), digest

    def _clean_up(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # the new checkpoint is committed, whatever happens to older ones
            logger.warning("older checkpoints could not be removed: %s", in_one_line(error))

    def _failed(self, problem: str, ending: Ending = "failed") -> Outcome:
        return Outcome(step=self.job.step, ending=ending, problem=problem)

    def _too_late(self) -> str:
        limit = f"{self.job.seconds:g} s (checkpoint.timeout_minutes)"
        return f"{self._waiting_for} after {limit}"

    def _left(self) -> float:
        return self._started + self.job.seconds - time.monotonic()
