"""Following a run from the driver: what the ranks report, a requested stop, resources that do not come."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from raytune_fsdp.base.batch import StopReason
from raytune_fsdp.base.errors import Interrupted, TrainingError
from raytune_fsdp.base.lease import lease_of
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch.phases import Phases
from raytune_fsdp.launch.ray.attempts import Attempts
from raytune_fsdp.launch.ray.board import (
    Beat,
    Board,
    Committed,
    Controlled,
    Failed,
    Joined,
    Line,
    Notice,
    PhaseFinished,
    Started,
)
from raytune_fsdp.launch.ray.failures import in_words
from raytune_fsdp.launch.ray.nodes.node_watch import NodeWatches
from raytune_fsdp.launch.ray.nodes.sizes import Demand, Sizes
from raytune_fsdp.launch.ray.placement_groups import Groups
from raytune_fsdp.launch.ray.resources import Request, answering, draining, nodes, shortage, waiting_for, way_out
from raytune_fsdp.launch.ray.tasks.after_commit import AfterCommit
from raytune_fsdp.launch.ray.watch.hangs import IN_KERNEL, culprit, waits_for_storage, what_all_do
from raytune_fsdp.launch.ray.watch.listening import Listening
from raytune_fsdp.launch.ray.watch.ranks import Watch
from raytune_fsdp.launch.signals import Signals
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record import names

_READ_SECONDS = 0.5  # how late a signal is seen at most
_FIRST_WORD_SECONDS, _NEXT_WORD_SECONDS = 15.0, 60.0
"""When the driver first says what it is waiting for, and how often it repeats that. Workers usually take
6 to 14 s (docs/results.md)."""


_ASK_SECONDS = 10.0
"""After the end of an attempt, what its ranks had comes back within seconds: an autoscaler need not hear of that."""

_AWAY_WORTH_SAYING_SECONDS = 45.0  # longer than a board that is out of reach is waited for

_LOOK_SECONDS = 1.0  # between two looks at the cluster's nodes

_FIT_SECONDS = 10.0
"""How long fit() is given to say what has happened to it, once the board no longer answers."""

_BOARD_SECONDS = 30.0
"""How long the board may be out of reach: a busy head, or one that starts again, answers later."""

_ENDS_SECONDS = 60.0
"""How long an attempt may take to end after a rank has failed, or the ranks were ended. It takes Ray Train seconds, but
for ever where it waits for a rank that is stopped, or where the ranks are not ended: the kernel may not let them go."""

_GONE_SECONDS = 5.0
"""While no rank could save anything, a stop waits this long for ranks that are just starting. With what follows, it
takes ten seconds at most."""

_ABORT_SECONDS = 2.0
"""How long Ray Train's controller is given to end by itself, before it is killed. One that waits for resources cannot
hear that; one that can takes 0.3 s."""


class AttemptSupervisor:
    """A run under Ray Train, one attempt after another."""

    def __init__(
        self,
        config: FinetuneConfig,
        place: RunDir,
        attempts: Attempts,
        sizes: Sizes,
        after_commits: Sequence[AfterCommit],
        *,
        demand: Demand | None,
        board: Board,
        lost: Callable[[], str | None],
        answers: Callable[[], bool],
        signals: Signals,
        phases: Phases,
        say: Callable[[str], None],
        dry: bool = False,
    ) -> None:
        self._config = config
        self._dry = dry
        """A dry run, which has nothing to save when it is stopped."""
        self._place = place
        self._attempts = attempts
        self._sizes = sizes
        self._demand = demand
        """None: the number of workers is fixed, or no node can come."""
        self._board = board
        self._lost = lost
        self._answers = answers
        """Whether Ray's head does. Nothing is asked of the cluster while it does not: the call would not come back."""
        self._signals = signals
        self._phases = phases
        self._say = say
        self._making_way = False
        """Whether the current attempt was asked to end for another one."""
        self._clock = Listening()
        self._watch = Watch(config.cluster, self._clock)
        self._ending_since: float | None = None
        """When the first rank has said that it failed, or the ranks were ended."""
        self._lease = lease_of(place.lock)
        self._watches = NodeWatches(config.cluster.spot_notice, board)
        self._next_look = 0.0
        self._fit: Future[Any] | None = None
        self._controlling: list[Any] = []
        self.groups = Groups()
        self._after_commits = after_commits
        self._waiting_since = self._clock.now
        self._next_word = self._waiting_since + _FIRST_WORD_SECONDS
        self._stopping_since: float | None = None

    def next(self) -> Request:
        """What the next attempt asks for, once there is room for it. Raises if there is no point in waiting longer."""
        self._signals.hold()
        while not self._answers():  # what the last attempt has left cannot be removed yet
            self._clock.look()
            self._check_ray()
            self._check_between()
            self._check_stop()
            time.sleep(_READ_SECONDS)
        self._begin()
        began = time.monotonic()
        while not (answers := self._answers()) or (asked := self._sizes.next(lambda: answering(nodes()))) is None:
            self._clock.look()
            self._check_ray()
            self._check_stop()
            if answers:
                if time.monotonic() - began > _ASK_SECONDS:
                    self._ask_for_more(0)
                self._check_waiting(lambda: shortage(self._sizes.fewest, nodes()))
            time.sleep(_READ_SECONDS)
        if self._demand is not None:
            self._demand.clear()  # what is there now is for this attempt
        if self._lease is not None:
            self._lease.check()  # the caller writes to the run's directory now, and the wait may have been long
        self._sizes.began(asked.workers)
        return asked

    def until(self, fit: Future[Any], asked: Request) -> None:
        """Follow an attempt to its end. Raises if there is no point in waiting longer; then `end` it."""
        self._fit = fit
        self._clock.look()
        unanswered: float | None = None
        while not wait([fit], timeout=0).done:
            self._check_ray()
            try:
                notices = self._listen()
                unanswered = None
            except ActorUnavailableError as error:
                self._check_ray()
                self._check_stop()
                unanswered = unanswered or time.monotonic()
                if time.monotonic() - unanswered < _BOARD_SECONDS:
                    time.sleep(_READ_SECONDS)
                    continue
                self._give_board_up(error)
                break
            except RayError as error:
                self._check_ray()
                if isinstance(error, ActorDiedError):
                    self._give_board_up(error)
                elif not wait([fit], timeout=_FIT_SECONDS).done:  # fit() may say why
                    self._attempts.failed("Ray no longer answers", again=False)
                break
            for notice in notices:
                self._hear(notice)
            self._check_lease()
            self._check_stop()
            if not self._answers():
                continue
            if len(self._attempts.ranks) < asked.workers:
                self._check_waiting(lambda: waiting_for(asked, nodes(), self.groups.state()))
            self._check_cluster()
            self._check_hang(asked.workers)
            for each in self._after_commits:
                each.look()
        last: list[Notice] = []
        with suppress(RayError):
            last = self._board.read(0)
        for notice in last:
            self._hear(notice)

    def _listen(self) -> list[Notice]:
        """What is on the board. All of it: an answer that came while this process was away is of before."""
        notices = self._board.read(_READ_SECONDS)
        away = self._clock.look()
        if not away:
            return notices
        if away > _AWAY_WORTH_SAYING_SECONDS:
            self._say(
                f"this command was away for {away:.0f} s (stopped, its output blocked, or its machine too busy): what "
                "the ranks did meanwhile is heard now, and no rank is ended because of that time"
            )
        with suppress(RayError):  # of which the next look hears, too
            notices = [*notices, *self._board.read(0)]
        return notices

    def _give_board_up(self, error: RayError) -> None:
        """Without the board no rank can be asked to stop: the next attempt has another one."""
        silent = "the message board between the driver and the ranks does not answer"
        self._attempts.killed(silent if isinstance(error, ActorUnavailableError) else in_words(error), None)
        self._end_controller()

    def _check_between(self) -> None:
        if self._signals.count and self._attempts.number:
            raise Interrupted("stopped between two attempts; the same command continues from the last checkpoint")

    def _begin(self) -> None:
        self._check_between()
        self._check_lease()
        self._making_way = False
        self._end_controller()
        self.groups.clear()
        self._watches.end()
        self._watch, self._ending_since = Watch(self._config.cluster, self._clock), None
        if self._attempts.ranks:  # else it is the first one, or the last one has waited in vain, as this one does
            self._phases.restart()
            self._waiting_since = self._clock.now
            self._next_word = self._waiting_since + _FIRST_WORD_SECONDS
        self._attempts.begin()
        for each in self._after_commits:
            each.make_room()

    def end(self) -> None:
        """End what Ray Train runs for this run, and nothing else: the Ray, and other actors in it, may be a caller's.

        The ranks end with the controller, which owns them, and what they have started ends with them.
        """
        if self._lost():
            return  # nothing answers; the session ends what is left
        for notice in self._board.close(_READ_SECONDS):
            if isinstance(notice, Controlled):
                self._hear_controller(notice)
        self._watches.end()
        if self._controlling and self._fit is not None:
            if not self._fit.done():
                self._controlling[0].abort.remote()
                wait([self._fit], timeout=_ABORT_SECONDS)
            self._end_controller()
        if not self._answers():
            return  # these calls would wait for the head; what is left ends with this process
        self._sizes.growing.let_go()
        with suppress(RayError):
            if self._demand is not None:
                self._demand.clear()
            self.groups.clear()

    def _end_controller(self) -> None:
        """With what it leaves where it is killed."""
        for actor in self._controlling:
            with suppress(RayError):
                ray.kill(actor)
        self._controlling = []

    def _hear(self, notice: Notice) -> None:
        match notice:
            case Controlled():
                self._hear_controller(notice)
            case Line(text):
                self._say(text)
            case Joined(rank=rank):
                self._attempts.ranks[rank] = notice
                self._watch.joined(notice)
            case Started(attempt, logs):
                self._attempts.started(attempt, logs)
                self._watches.start(self._attempts.ranks)  # before the model is loaded, which takes much memory
            case PhaseFinished(phase):
                self._reached(phase)
            case Beat(step, rank=rank):
                self._watch.heard(notice)
                if step and not rank and self._attempts.ranks:  # else it is a late word of the attempt before
                    self._attempts.reached(step)
            case Failed(rank=rank):
                self._attempts.reports[rank] = notice
                if self._ending_since is None and rank in self._attempts.ranks:  # else it is a late word
                    self._ending_since = self._clock.now
            case Committed(step, lasting):
                self._attempts.committed(step)
                number, root = self._attempts.number, self._place.checkpoints
                for each in self._after_commits:
                    each.committed(CommittedCheckpoint(step, number, root, lasting=lasting))

    def _hear_controller(self, notice: Controlled) -> None:
        self._controlling = notice.actors
        self.groups.made_by(notice.controller)

    def _reached(self, phase: str) -> None:
        if phase == "workers" and "workers" in self._phases.seconds:
            return
        self._phases.finished(phase)
        if phase == "step":
            self._say(f"first step after {self._phases.total:.1f} s: {self._phases.in_words()}")
            for each in self._after_commits:
                each.make_up()
            self._attempts.event(names.FIRST_STEP, seconds=round(self._phases.total, 2), phases=self._phases.seconds)

    def _check_ray(self) -> None:
        """Raise if the Ray of this run is no more: calls of it would wait for long, or end this process."""
        if (gone := self._lost()) is not None:
            self._attempts.failed(gone, again=False)

    def _check_lease(self) -> None:
        """Raise if this process was away for so long that another command works on the run now.

        Reads no file: on a mount that does not answer, no signal would be heard and no hang be found.
        """
        if self._lease is not None:
            self._lease.check_known()

    def _check_stop(self) -> None:
        if not self._signals.count:
            return
        now = time.monotonic()
        training = "step" in self._phases.seconds and bool(self._attempts.ranks)
        if self._stopping_since is None:
            self._stopping_since = now
            self._board.stop(StopReason.SIGNAL)
            saved = "nothing is saved of a dry run" if self._dry else "a checkpoint is committed after the current step"
            what = saved if training else "no step is being trained"
            self._say(f"stopping: {what} (again to stop at once)")
        if self._signals.count > 1 or (not training and now - self._stopping_since > _GONE_SECONDS):
            raise Interrupted("stopped without another checkpoint; the same command continues from the last one")

    def _ask_for_more(self, have: int) -> None:
        if self._demand is not None:
            self._demand.look(have)

    def _check_cluster(self) -> None:
        """Let the attempt make way for another one if a node will be taken away, or if there is room for more ranks."""
        now, ranks = time.monotonic(), self._attempts.ranks
        self._sizes.growing.look()
        if self._making_way or self._stopping_since is not None or not ranks or now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        self._ask_for_more(len(ranks))
        leaving = draining()
        for rank in ranks.values():
            if rank.node_id in leaving:
                left = leaving[rank.node_id]
                self._attempts.event(names.DRAINED, node=rank.node, seconds_left=left)
                soon = "soon" if left is None else f"in {left:.0f} s"
                self._make_way(StopReason.DRAIN, f"the node {rank.node} will be taken away {soon}")
                return
        if "step" in self._phases.seconds and (size := self._sizes.growth(nodes, ranks)) is not None:
            self._make_way(StopReason.RESIZE, f"there is room for {size} workers")

    def out_of_memory(self, rank: int) -> str | None:
        """What the kernel has ended a rank for, if it was its memory, in words."""
        joined = self._attempts.ranks.get(rank)
        return None if joined is None else self._watches.out_of_memory(joined)

    def _check_hang(self, workers: int) -> None:
        """Where no rank gets on: keep the stacks of all, and end them, so that another attempt follows."""
        if self._ending_since is not None:  # Ray Train brings the error of a rank, which says more than a hang
            self._check_end(self._clock.now - self._ending_since)
            return
        ranks, logs = self._attempts.ranks, self._attempts.logs
        if len(ranks) == workers and (word := self._watch.word(workers)) is not None:
            self._say(word)
        stuck = self._watch.stuck(workers)
        if stuck is None:
            return
        there = {node.id for node in answering(nodes())}
        lost = next((number for number, joined in sorted(ranks.items()) if joined.node_id not in there), None)
        if lost is not None:  # Ray may take minutes to say so, and the others wait for this one
            self._attempts.killed("its node was lost", lost)
            self._end_ranks()
            return
        stacks = self._watches.stacks(ranks, logs)
        rank, why = culprit(stacks) or (stuck.suspect, what_all_do(stacks))
        away = any(map(waits_for_storage, [stacks[rank]] if rank in stacks else stacks.values()))
        why += f"; {IN_KERNEL}" * away + ("" if logs is None else f"; the stacks are in {logs}/stacks")
        # Neither storage that is away, nor a hang that may have begun while this command was, says much of the run.
        self._attempts.killed(f"{stuck.words}: {why}", rank, hang=stuck.certain and not away)
        self._end_ranks()

    def _end_ranks(self) -> None:
        self._watches.kill(self._attempts.ranks)
        self._ending_since = self._clock.now

    def _check_end(self, seconds: float) -> None:
        """End Ray Train's controller, and the ranks with it, where the attempt should have ended this long ago."""
        if seconds <= _ENDS_SECONDS or not self._controlling:
            return
        limit = f"{_ENDS_SECONDS:.0f} s"
        self._say(f"the attempt has not ended {limit} after its ranks were to end: Ray Train's controller is ended")
        if not self._attempts.was_killed:
            rank, report = next(iter(self._attempts.reports.items()))
            self._attempts.killed(f"it raised an error at {report.place}, and the attempt did not end in {limit}", rank)
        self._end_controller()

    def _make_way(self, reason: StopReason, cause: str) -> None:
        self._making_way = True
        self._board.stop(reason)
        self._attempts.handing_over(cause)
        self._say(f"{cause}: a checkpoint is committed after the current step, and the run goes on from there")

    def _check_waiting(self, missing_now: Callable[[], str]) -> None:
        """Say what is missing, and give up after `cluster.wait_minutes`."""
        now = self._clock.now
        if now < self._next_word:
            return
        minutes = self._config.cluster.wait_minutes
        waited = now - self._waiting_since
        missing = missing_now()
        if waited > 60 * minutes:
            raise TrainingError(
                f"cluster.wait_minutes={minutes:g}: the workers did not start in that time; {missing}. "
                f"{way_out(missing)}; the same command continues"
            )
        self._say(f"{missing} ({waited:.0f} s, at most {minutes:g} min)")
        self._next_word = min(now + _NEXT_WORD_SECONDS, self._waiting_since + 60 * minutes + 1)
