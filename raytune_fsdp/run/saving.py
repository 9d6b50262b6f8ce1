"""Decide when a save begins, and record it, as all ranks agree between two steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from raytune_fsdp.base.batch import StopReason
from raytune_fsdp.base.beat import beat, waiting
from raytune_fsdp.base.collectives import on_rank0
from raytune_fsdp.base.errors import HandedOver, Interrupted, RaytuneError, TrainingError, TransientError
from raytune_fsdp.base.lease import token_of
from raytune_fsdp.base.measured import Saved
from raytune_fsdp.checkpoint.by_clock import Clock, Intervals
from raytune_fsdp.checkpoint.catalogue import Keep, ways_out_of_divergence
from raytune_fsdp.checkpoint.on_demand import Requests
from raytune_fsdp.checkpoint.peers.storage import PeerStorage
from raytune_fsdp.checkpoint.room import storage_without_room
from raytune_fsdp.checkpoint.save_in_flight import ENDINGS, Outcome
from raytune_fsdp.checkpoint.saver import Saver, open_saver
from raytune_fsdp.checkpoint.state import RunState
from raytune_fsdp.config import CheckpointConfig, FinetuneConfig
from raytune_fsdp.config.rules import SaveEvery
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record import names
from raytune_fsdp.record.jsonl import each_event, read_evaluations, steps_after
from raytune_fsdp.record.tracker import Tracker
from raytune_fsdp.run.forks.pins import is_pinned
from raytune_fsdp.run.peers.copies import MOST_SECONDS, PeerCopies, open_copies
from raytune_fsdp.run.resume_point import ResumePoint, RunInputs
from raytune_fsdp.step.optim.update import Optimizer

_LOOK_SECONDS = 0.2  # between two looks at a writer that was given up, or is to be waited for
_PATIENCE_SECONDS = {False: 60.0, True: MOST_SECONDS + 10}
"""How long a planned save waits for a save, or for a peer copy, that is still being written."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """What all ranks have agreed on before a step."""

    stop: StopReason | None
    """Why the run must stop after this step; None if it goes on."""
    asked: bool
    """Whether someone has asked for a checkpoint now."""
    free: bool
    """Whether a save may begin."""
    by_clock: bool = False
    """Whether the clock asks for a recovery point."""
    copy: bool = False
    """Whether the clock of peer copies asks for one."""


def stopped(reason: StopReason, step: int) -> RaytuneError:
    """Return the error that ends an attempt which has saved this step because it had to stop."""
    after = f"stopped {reason.words} after step {step}, which is saved"
    return Interrupted(f"{after}; the same command continues from there") if reason.ends_run else HandedOver(after)


@dataclass(slots=True, kw_only=True)
class Saves:
    """The saves of one attempt, as training sees them. All ranks call the same methods at the same steps."""

    saver: Saver
    tracker: Tracker
    requests: Requests
    """Where people ask for a checkpoint now, or for a stop. Only rank 0 looks there."""
    saved: Callable[[Saved], None]
    """Called on every rank for every committed checkpoint."""
    clock: Clock | None = None
    """Rank 0's clock, if the clock asks for checkpoints, too."""
    copies: PeerCopies | None = None
    """Copies in the memory of nodes, between two checkpoints."""
    notices: Mapping[str, float] = field(default_factory=dict)
    """Seconds that each cause of an early end leaves the run, as long as saves are still to be compared with them."""
    committed: int = 0
    """The newest step that is committed; 0 if none is."""
    recovery: int = 0
    """The newest step that is committed, if that is a recovery point only; else 0."""
    _due: bool = False
    """A checkpoint was due while the previous one was still being written."""
    _lasting: bool = True
    """Whether the save that begins next is of a step that the clock has not chosen."""
    _copy: bool = False
    """Whether the save that begins next is a peer copy."""
    _told: bool = False
    """Whether it was reported that storage has no room for recovery points."""
    _again: bool = False
    """Whether to write the last save again: it lacked room, and would find it now."""
    _stop: StopReason | None = None
    """Why the run stops after this step."""

    def agree(self, stop: StopReason | None, *, again: bool = False) -> Boundary:
        """Agree across ranks on stop and save status; record a save that has ended. `again`: not the first time before
        this step. Collective."""
        ending, busy = self.saver.status()
        ended = 0 if ending is None else 1 + ENDINGS.index(ending)
        asked = dist.get_rank() == 0 and self.requests.waiting()
        if dist.get_rank() == 0 and self.requests.stopping():
            stop = StopReason.ASKED
        copy = self.copies is not None and not again and self.copies.asks(busy=busy)
        flags = torch.tensor(
            [int(stop or 0), int(asked), int(busy), ended, int(not busy and self._by_clock()), int(copy)]
        )
        # One all-reduce per step, of host tensors: it does not wait for the device. The maximum, so that all ranks take
        # the same one of several reasons to stop.
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        reason, someone_asked, someone_busy, ended, by_clock, copy = flags.tolist()
        if ended:
            self._record(self.saver.report(ENDINGS[ended - 1]))
        if self._again and not someone_busy:
            self._write_again()
            someone_busy = True
        self._stop = StopReason(reason) if reason else None
        if self._stop is not None and self.copies is not None:
            self.copies.storage.give_up()  # the last checkpoint must not wait for a copy
        return Boundary(
            stop=self._stop, asked=bool(someone_asked), free=not (someone_busy or self._again), by_clock=bool(by_clock),
            copy=bool(copy),
        )  # fmt: skip

    def _by_clock(self) -> bool:
        """Return whether this rank's clock asks for a recovery point, and there is room for it."""
        if self.clock is None or not self.clock.due():
            return False
        cramped = storage_without_room(self.saver.storage.location, self.saver.nbytes)
        if cramped is not None and self._make_room(lasting=False):  # something else has filled it since the last save
            cramped = storage_without_room(self.saver.storage.location, self.saver.nbytes)
        if cramped is None:
            return True
        self.clock.put_off()
        if not self._told:
            self.tracker.event(names.NO_ROOM_TO_SAVE, **cramped)
            self._told = True
        return False

    def _make_room(self, *, lasting: bool) -> bool:
        """Remove recovery points to make room for a save, on rank 0. Return whether any were removed."""
        with waiting(self.saver.seconds):
            self.tracker.sync()  # raises if the run, with its checkpoints, is another command's by now
            removed = self.saver.make_room(lasting=lasting)
        if removed:
            self.tracker.event(names.ROOM_MADE, removed=", ".join(removed))
        return bool(removed)

    def due(self, boundary: Boundary, planned: bool, step: int) -> bool:
        """Return whether to save after this step. A save that is due while another is being written begins after it."""
        wanted = planned or boundary.asked or self._due
        # Counted, so that all ranks wait for as long. Collective.
        looks = round(self._patience() / _LOOK_SECONDS) if planned else 0
        while looks and not boundary.free:
            time.sleep(_LOOK_SECONDS)
            beat()
            boundary, looks = self.agree(self._stop, again=True), looks - 1
        if wanted and not boundary.free:
            if planned:
                self.tracker.event(names.SAVE_POSTPONED, step=step)
            self._due = self._due or planned
            return False
        self._due = False
        self._lasting = wanted
        saving = wanted or (boundary.by_clock and boundary.free)
        self._copy = self.copies is not None and self.copies.due(
            step, asked=boundary.copy, saving=saving, free=boundary.free
        )
        return saving or self._copy

    def _patience(self) -> float:
        """Return for how many seconds a planned save waits for the one that is being written, instead of a step."""
        # Where planned saves are must not depend on the clock: they wait for recovery points and peer copies. With
        # `keep_best` they wait for any: a step later the weights are not those that the evaluation scores. Not for
        # long, and not for one that was given up: storage that stands still postpones planned saves.
        if self.saver.recovering or (self.saver.keep.best and self.saver.in_flight):
            return _PATIENCE_SECONDS[self.saver.copying]
        return 0.0

    def begin(self, state: RunState) -> None:
        """Save the state after a step. Training goes on while it is written, if saves are asynchronous."""
        if self._copy and self.copies is not None:
            self.copies.begin(self.saver, state, self.tracker.sync)
        else:
            self._start(state)
        if not self.saver.asynchronous:
            self._finish()
            self.saver.leave()  # after the commit its thread still prunes older checkpoints
        waits = self.copies if self._copy else self.clock
        if waits is not None:
            waits.held()

    def scored(self, step: int, value: float | None) -> None:
        """Remember the score of a step, so that the best checkpoints are kept."""
        if value is not None:
            self.saver.scores[step] = value

    def last(self, state: RunState) -> None:
        """Save the state after the last step, and wait for the outcome. Raises if it could not be saved.

        A stop that was asked for remains one: nothing must start the run again.
        """
        try:
            self._finish()
            # A save was due at this step anyway. But a run that has come to its end leaves more than a recovery point.
            if self.committed != state.step or (self._stop is None and self.recovery == state.step):
                self._lasting = True
                self._wait_until_free()
                self._start(state)
                outcome = self._finish()
                if outcome is None or outcome.saved is None:
                    raise TransientError(
                        f"the checkpoint of step {state.step} could not be written: {outcome and outcome.problem}; "
                        "free space or repair the storage, then run the same command to continue from the previous "
                        "checkpoint"
                    )
        except TransientError as error:
            if self._stop is None or not self._stop.ends_run:
                raise
            raise Interrupted(f"stopped {self._stop.words} after step {state.step}, but {error}") from error

    def leave(self) -> None:
        """Wait for the writer of this rank, before its process ends."""
        self.saver.leave()

    def _start(self, state: RunState) -> None:
        if dist.get_rank() == 0:
            self.requests.take()
        if self.clock is not None:
            self.clock.begins()
        # On resume the lines of metrics.jsonl past the checkpoint are cut; all others must be on the disk before it is.
        self.saver.begin(state, before=self.tracker.sync, lasting=self._lasting)

    def _finish(self) -> Outcome | None:
        """Wait for the outcome of the last save, and of writing it again. None if there is none to wait for."""
        while True:
            with waiting(self.saver.seconds):
                outcome = self.saver.finish()
            if outcome is not None:
                self._record(outcome)
            if not self._again:
                return outcome
            self._wait_until_free()
            self._write_again()

    def _write_again(self) -> None:
        self._again = False
        self.saver.again()

    def _wait_until_free(self) -> None:
        """Wait for a writer that was given up: it may still read the memory that the next save needs. Collective."""
        deadline = time.monotonic() + self.saver.seconds
        while True:
            beat()
            busy = torch.tensor([int(self.saver.status()[1]), int(time.monotonic() > deadline)])
            dist.all_reduce(busy)
            if not busy[0]:
                return
            if busy[1]:
                raise TransientError(
                    f"a rank is still waiting for {self.saver.storage.location}, so nothing more can be saved there; "
                    "when the storage answers, the same command continues from the last checkpoint"
                )
            time.sleep(_LOOK_SECONDS)

    def _record(self, outcome: Outcome) -> None:
        """Write the event, make room if that was lacking, answer requests, call `saved`; raise if the state is not
        worth saving."""
        if self.copies is not None and self.saver.copying:
            self.copies.ended(outcome)
            return
        if outcome.ending in ("failed", "no_room"):
            self.tracker.event(names.SAVE_FAILED, step=outcome.step, problem=outcome.problem)
        if outcome.ending == "no_room":
            make_room = partial(self._make_room, lasting=not self.saver.recovering)
            with waiting(self.saver.seconds):
                self._again = on_rank0(make_room, what="make room for a checkpoint")
        if dist.get_rank() == 0 and not self._again:
            self.requests.answer(outcome.step, outcome.saved.path if outcome.saved else None, outcome.problem)
        if outcome.saved is not None:
            saved = outcome.saved
            self.committed = saved.step
            self.recovery = 0 if saved.lasting else saved.step
            if self.clock is not None:
                self.clock.committed(saved.seconds)
            kind: dict[str, Any] = {} if saved.lasting else {"recovery": True}
            if saved.digest is not None:
                kind |= {"digest": saved.digest.weights, "everything": saved.digest.everything}
            self.tracker.event(
                names.SAVED, step=saved.step, path=saved.path, seconds=saved.seconds, bytes=saved.bytes, **kind
            )
            self._compare(saved)
            self.saved(saved)
        elif outcome.ending == "not_finite":
            raise TrainingError(
                f"step {outcome.step}: a weight or moment is not finite ({outcome.problem}), so it was not saved; "
                f"{ways_out_of_divergence(self.saver.storage.location, outcome.step - 1)}"
            )

    def _compare(self, saved: Saved) -> None:
        """Report, once, if a save takes longer than the run would be given at its end."""
        short = {what: seconds for what, seconds in self.notices.items() if seconds < saved.seconds}
        if short:
            self.notices = {what: each for what, each in self.notices.items() if what not in short}
            self.tracker.event(
                names.NOTICE_SHORT, step=saved.step, seconds=saved.seconds, bytes=saved.bytes, notices=short
            )


class NothingSaved(Saves):
    """The saves of a dry run: none. It ends, or is stopped, and there is nothing to continue from."""

    def due(self, boundary: Boundary, planned: bool, step: int) -> bool:
        return False

    def last(self, state: RunState) -> None:
        pass


# The saves of an attempt, by its config: what is kept of them, and when the clock asks for one.


def open_saves(
    config: FinetuneConfig,
    prepared: RunInputs,
    standing: ResumePoint,
    model: PreTrainedModel,
    optimizer: Optimizer,
    tracker: Tracker,
    *,
    saved: Callable[[Saved], None],
    uncommitted: float,
    notices: Mapping[str, float],
    peers: PeerStorage | None = None,
) -> Saves:
    """Return the saves of an attempt. Collective.

    `uncommitted`: the seconds that earlier attempts have trained since the newest checkpoint. `notices`: the seconds
    that each cause of an early end leaves the run. `peers`: where peer copies go; None: there are none.
    """
    clock, intervals, commit = None, intervals_of(config.checkpoint), standing.commit
    if intervals is not None and dist.get_rank() == 0 and not prepared.dry:
        clock = Clock(intervals, fresh=commit is None, lost=uncommitted)
    scores = {}  # of earlier attempts too, or their best checkpoints would be pruned
    if dist.get_rank() == 0 and config.checkpoint.keep_best:
        found = read_evaluations(prepared.place.metrics, standing.state.step)
        scores = {step: names.score(values, config.checkpoint.best) for step, values in found.items()}
    saver = open_saver(
        prepared.place.checkpoints,
        model,
        optimizer,
        attempt=standing.attempt,
        keep=keep_of(config.checkpoint),
        seconds=config.checkpoint.timeout_minutes * 60,
        asynchronous=config.checkpoint.asynchronous,
        scores={step: value for step, value in scores.items() if value is not None},
        hashes=config.run.exact,
        pinned=partial(is_pinned, prepared.place),
    )
    return (NothingSaved if prepared.dry else Saves)(
        saver=saver,
        tracker=tracker,
        requests=Requests(prepared.place.path, token_of(prepared.lease)),
        saved=saved,
        clock=clock,
        copies=None if peers is None or prepared.dry else open_copies(config.checkpoint, standing, saver, peers),
        notices=_not_said(prepared.place, notices) if dist.get_rank() == 0 else {},
        committed=0 if commit is None else commit.step,
        recovery=0 if commit is None or commit.lasting else commit.step,
    )


def _not_said(place: RunDir, notices: Mapping[str, float]) -> dict[str, float]:
    """Return the notices that no attempt has reported as too short."""
    said = [
        event["fields"].get("notices") for event in each_event(place.events) if event["event"] == names.NOTICE_SHORT
    ]
    known = [each for each in said if isinstance(each, dict)]
    return {what: each for what, each in notices.items() if not any(one.get(what) == each for one in known)}


def uncommitted_seconds(place: RunDir, standing: ResumePoint, lost: float, cut: Sequence[Mapping[str, Any]]) -> float:
    """Return how long earlier attempts have trained since the newest checkpoint that outlives the command, if the run
    goes on from a peer copy, after which they have `lost` so many seconds. `cut`: as for `lost_seconds`."""
    step = 0 if standing.commit is None else standing.commit.step
    trained: float = sum(each["seconds"] for each in steps_after(place.metrics, step))
    return lost + max(0.0, trained - float(sum(each["seconds"] for each in cut)))


def lost_seconds(place: RunDir, step: int, cut: Sequence[Mapping[str, Any]]) -> float:
    """Return how long earlier attempts have trained since the checkpoint of this step, the run's newest, was made.

    `cut`: what is on record of the steps after it.
    """
    started: dict[str, Any] = {}
    for event in each_event(place.events):
        if event["event"] == names.ATTEMPT_STARTED:
            started = event["fields"]
    before = started.get(names.LOST_SECONDS) if started.get("resumed_from") == step else None
    found = (float(before) if isinstance(before, int | float) else 0.0) + sum(each["seconds"] for each in cut)
    return found if 0 <= found < math.inf else 0.0


def intervals_of(chosen: CheckpointConfig) -> Intervals | None:
    """Return how long the clock waits; None if it never asks for a checkpoint."""
    if chosen.every == "auto":
        return Intervals()
    minutes = chosen.every.minutes if isinstance(chosen.every, SaveEvery) else None
    return None if minutes is None else Intervals(first=60 * minutes, later=60 * minutes, share=None)


def keep_of(chosen: CheckpointConfig) -> Keep:
    """Return which checkpoints a config keeps."""
    highest = names.highest_is_best(chosen.best, chosen.best_is)
    return Keep(last=chosen.keep_last, every=chosen.keep_every, best=chosen.keep_best, lower_is_better=not highest)
