"""Lead a run from the driver, one attempt after another: hear the ranks, stop, make way, wait for room, give up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from raytune_fsdp.base.batch import StopReason
from raytune_fsdp.base.errors import Interrupted
from raytune_fsdp.base.lease import lease_of
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch.phases import Phases
from raytune_fsdp.launch.ray.attempt import Killed, RayAttempt, Waiting
from raytune_fsdp.launch.ray.attempts import Attempts
from raytune_fsdp.launch.ray.board import (
    Beat,
    Board,
    Committed,
    Controlled,
    Ended,
    Ending,
    Failed,
    Joined,
    Line,
    Notice,
    PhaseFinished,
    Started,
)
from raytune_fsdp.launch.ray.failures import failure_in_words
from raytune_fsdp.launch.ray.keepers import NodeKeepers
from raytune_fsdp.launch.ray.nodes.node_watch import NodeWatches
from raytune_fsdp.launch.ray.nodes.sizes import Demand, Sizes
from raytune_fsdp.launch.ray.placement_groups import Groups
from raytune_fsdp.launch.ray.resources import Request, answering, draining, nodes, shortage, waiting_for
from raytune_fsdp.launch.ray.session import Session
from raytune_fsdp.launch.ray.tasks.after_commit import AfterCommit
from raytune_fsdp.launch.ray.watch.hangs import IN_KERNEL, culprit, waits_for_storage, what_all_do
from raytune_fsdp.launch.ray.watch.listening import Listening
from raytune_fsdp.launch.ray.watch.ranks import Watch
from raytune_fsdp.launch.signals import Signals
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record import names

_READ_SECONDS = 0.5  # how late a signal is seen at most

_ASK_SECONDS = 10.0
"""After the end of an attempt, what its ranks had comes back within seconds: an autoscaler need not hear of that."""

_AWAY_WORTH_SAYING_SECONDS = 45.0  # longer than a board that is out of reach is waited for

_LOOK_SECONDS = 1.0  # between two looks at the cluster's nodes

_FIT_SECONDS = 10.0
"""How long fit() is given to say what has happened to it, once the board no longer answers."""

_BOARD_SECONDS = 30.0
"""How long the board may be out of reach: a busy head, or one that starts again, answers later."""

_PEERS_SECONDS = 0.4  # how long the peers of a rank that has died have to say in which step they were

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
    """Leads all attempts of a command: waits for room, follows an attempt to its end, and then begins another one."""

    def __init__(
        self,
        config: FinetuneConfig,
        place: RunDir,
        attempts: Attempts,
        sizes: Sizes,
        after_commits: Sequence[AfterCommit],
        *,
        demand: Demand,
        board: Board,
        session: Session,
        signals: Signals,
        phases: Phases,
        say: Callable[[str], None],
        dry: bool = False,
        keepers: NodeKeepers | None = None,
    ) -> None:
        """`phases`: those of the first attempt, which begin with the command. `dry`: a stop saves nothing. `keepers`:
        those of peer copies; None: there are none."""
        self._cluster = config.cluster
        self._checkpoints = place.checkpoints
        self._attempts = attempts
        self._sizes = sizes
        self._on_gpus = sizes.fewest.device == "cuda"
        self._after_commits = after_commits
        self._demand = demand
        self._board = board
        self._session = session
        """Nothing is asked of the cluster while its head does not answer: the call would not come back."""
        self._signals = signals
        self._say = say
        self._dry = dry
        self._keepers = keepers or NodeKeepers(0, board, say)
        self._clock = Listening()
        self._lease = lease_of(place.lock)
        self.groups = Groups()
        self._stopping_since: float | None = None
        attempts.current = self._attempt_with(phases)

    @property
    def _attempt(self) -> RayAttempt:
        return self._attempts.current

    def _attempt_with(self, phases: Phases, waiting: Waiting | None = None) -> RayAttempt:
        return RayAttempt(
            watch=Watch(self._cluster, self._clock),
            nodes=NodeWatches(self._cluster.spot_notice, self._board),
            phases=phases,
            waiting=waiting or Waiting(self._cluster.wait_minutes, self._clock, self._say, self._no_room),
        )

    def _no_room(self, missing: str) -> None:
        self._attempts.event(names.NO_ROOM, missing=missing)

    def next(self) -> Request:
        """Return what the next attempt asks for, once there is room for it. Raise if it is no use to wait longer."""
        session = self._session
        self._signals.hold()
        while not session.answers():  # what the last attempt has left cannot be removed yet
            self._clock.look()
            self._check_ray()
            self._check_between()
            self._check_stop()
            time.sleep(_READ_SECONDS)
        self._begin()
        began = time.monotonic()
        while not (answers := session.answers()) or (asked := self._sizes.next(lambda: answering(nodes()))) is None:
            self._clock.look()
            self._check_ray()
            self._check_stop()
            if answers:
                if time.monotonic() - began > _ASK_SECONDS:
                    self._demand.look(0)
                self._attempt.waiting.look(lambda: shortage(self._sizes.fewest, nodes()))
            time.sleep(_READ_SECONDS)
        self._demand.clear()  # what is there now is for this attempt
        if self._lease is not None:
            self._lease.check()  # the caller writes to the run's directory now, and the wait may have been long
        self._sizes.began(asked.workers)
        return asked

    def until(self, fit: Future[Any], asked: Request) -> None:
        """Follow an attempt to its end. Raise if it is no use to wait longer; then `end` it."""
        self._attempt.fit, self._attempt.workers = fit, asked.workers
        self._keepers.begin(asked.workers)
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
            if not self._session.answers():
                continue
            if len(self._attempt.ranks) < asked.workers:
                self._attempt.waiting.look(lambda: waiting_for(asked, nodes(), self.groups.state()))
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
        """Read the board, and once more after an absence: what came while this process was away is old."""
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
        """End the attempt: without its board no rank can be asked to stop. The next attempt has another one."""
        silent = "the message board between the driver and the ranks does not answer"
        self._attempt.killed = Killed(
            silent if isinstance(error, ActorUnavailableError) else failure_in_words(error), None
        )
        self._attempt.end_controller()

    def _check_between(self) -> None:
        if self._signals.count and self._attempts.number:
            raise Interrupted("stopped between two attempts; the same command continues from the last checkpoint")

    def _begin(self) -> None:
        self._check_between()
        self._check_lease()
        last = self._attempt
        last.end_controller()
        self.groups.clear()
        last.end_ranks(self._say, longer=lambda: self._on_gpus and not self._signals.count)
        # Without ranks the last one was never begun, or has waited in vain: its wait goes on.
        self._attempts.current = (
            self._attempt_with(Phases()) if last.ranks else self._attempt_with(last.phases, last.waiting)
        )
        for each in self._after_commits:
            each.make_room()

    def end(self) -> None:
        """End what Ray Train runs for this run, and nothing else: the Ray, and other actors in it, may be a caller's.

        The ranks end with the controller, which owns them, and what they have started ends with them.
        """
        if self._session.lost():
            return  # nothing answers; the session ends what is left
        for notice in self._board.close(_READ_SECONDS):
            if isinstance(notice, Controlled):
                self._hear_controller(notice)
        attempt = self._attempt
        attempt.nodes.end()
        self._keepers.end()
        if attempt.controller and attempt.fit is not None and not attempt.fit.done():
            attempt.controller[0].abort.remote()
            wait([attempt.fit], timeout=_ABORT_SECONDS)
        attempt.end_controller()
        if not self._session.answers():
            return  # these calls would wait for the head; what is left ends with this process
        self._sizes.growing.let_go()
        with suppress(RayError):
            self._demand.clear()
            self.groups.clear()

    def _hear(self, notice: Notice) -> None:
        attempt = self._attempt
        match notice:
            case Controlled():
                self._hear_controller(notice)
            case Line(text):
                self._say(text)
            case Joined(rank=rank):
                attempt.ranks[rank] = notice
                attempt.watch.joined(notice)
                self._keepers.joined(attempt.ranks)
                self._watch_nodes()
            case Started(number, logs, begins):
                self._attempts.started(number, logs, begins)
                self._watch_nodes()
            case PhaseFinished(phase):
                self._reached(phase)
            case Beat(step, rank=rank):
                attempt.watch.heard(notice)
                if step and not rank and attempt.ranks:  # else it is a late word of the attempt before
                    self._attempts.reached(step)
            case Ended() | Ending() | Failed():
                self._hear_end(notice)
            case Committed(step, lasting):
                self._attempts.committed(step)
                found = CommittedCheckpoint(step, self._attempts.number, self._checkpoints, lasting=lasting)
                for each in self._after_commits:
                    each.committed(found)

    def _watch_nodes(self) -> None:
        """Watch the processes of the ranks, before the model is loaded, which takes much memory. Of a node, all at
        once: the first word of a rank may come later than that of rank 0 about the attempt."""
        attempt = self._attempt
        if attempt.logs is not None and len(attempt.ranks) >= attempt.workers:
            attempt.nodes.start(attempt.ranks)

    def _hear_controller(self, notice: Controlled) -> None:
        self._attempt.controller, self._attempt.controller_id = notice.actors, notice.controller
        self.groups.made_by(notice.controller)

    def _hear_end(self, notice: Ended | Ending | Failed) -> None:
        attempt = self._attempt
        since = self._clock.now if attempt.ending_since is None else attempt.ending_since
        if isinstance(notice, Failed):
            if notice.rank in attempt.ranks:  # else it is a late word
                attempt.reports[notice.rank], attempt.ending_since = notice, since
        elif (error := attempt.error_by(notice)) is not None:
            attempt.ending_since, attempt.error = since, attempt.error or error
            self._check_ray()  # all ranks end without it
            if not self._session.answers():
                return  # to end the controller, this would wait for the head; Ray Train ends the ranks, too
            if isinstance(notice, Ended):
                self._hear_peers()
            attempt.end(error)

    def _hear_peers(self) -> None:
        """Let a rank say in which step it has lost another: over gloo it knows at once, and a beat is a second old."""
        attempt, until = self._attempt, time.monotonic() + _PEERS_SECONDS
        alone = len(attempt.ranks) == 1 or self._on_gpus
        while not (alone or attempt.reports) and (left := until - time.monotonic()) > 0:
            with suppress(RayError):
                for notice in self._board.read(left):
                    self._hear(notice)

    def _reached(self, phase: str) -> None:
        phases = self._attempt.phases
        if phase == "workers" and "workers" in phases.seconds:
            return
        phases.finished(phase)
        if phase == "step":
            self._say(f"first step after {phases.total:.1f} s: {phases.in_words()}")
            if self._session.templates is not None:
                self._session.templates.begin_on({rank.node_id for rank in self._attempt.ranks.values()})
            for each in self._after_commits:
                each.make_up()
            self._attempts.event(names.FIRST_STEP, seconds=round(phases.total, 2), phases=phases.seconds)

    def _check_ray(self) -> None:
        """Raise if the Ray of this run is gone: calls to it would wait for long, or end this process."""
        if (gone := self._session.lost()) is not None:
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
        training = self._attempt.trains
        if self._stopping_since is None:
            self._stopping_since = now
            self._board.stop(StopReason.SIGNAL)
            saved = "nothing is saved of a dry run" if self._dry else "a checkpoint is committed after the current step"
            what = saved if training else "no step is being trained"
            self._say(f"stopping: {what} (again to stop at once)")
        if self._signals.count > 1 or (not training and now - self._stopping_since > _GONE_SECONDS):
            raise Interrupted("stopped without another checkpoint; the same command continues from the last one")

    def _check_cluster(self) -> None:
        """Let the attempt make way for another one if a node will be taken away, or if there is room for more ranks."""
        now, attempt = time.monotonic(), self._attempt
        ranks = attempt.ranks
        self._sizes.growing.look()
        if attempt.making_way_for or self._stopping_since is not None or not ranks or now < attempt.next_look:
            return
        attempt.next_look = now + _LOOK_SECONDS
        self._demand.look(len(ranks))
        leaving = draining()
        for rank in ranks.values():
            if rank.node_id in leaving:
                left = leaving[rank.node_id]
                soon = "soon" if left is None else f"in {left:.0f} s"
                self._make_way(StopReason.DRAIN, f"the node {rank.node} will be taken away {soon}")
                # Last: storage that does not answer would keep the ranks from hearing of it.
                self._attempts.event(names.DRAINED, node=rank.node, seconds_left=left)
                return
        if attempt.trains and (size := self._sizes.growth(nodes, ranks)) is not None:
            self._make_way(StopReason.RESIZE, f"there is room for {size} workers")

    def _make_way(self, reason: StopReason, cause: str) -> None:
        self._attempt.making_way_for = cause
        self._board.stop(reason)
        self._say(f"{cause}: a checkpoint is committed after the current step, and the run goes on from there")

    def _check_hang(self, workers: int) -> None:
        """End all ranks where none gets on, and keep their stacks, so that another attempt follows."""
        attempt = self._attempt
        if attempt.ending_since is not None:  # Ray Train brings the error of a rank, which says more than a hang
            self._check_end(attempt, self._clock.now - attempt.ending_since)
            return
        if len(attempt.ranks) == workers and (word := attempt.watch.word(workers)) is not None:
            self._say(word)
        stuck = attempt.watch.stuck(workers)
        if stuck is None:
            return
        lost = attempt.rank_lost()
        if lost is not None:  # Ray may take minutes to say so, and the others wait for this one
            self._end_ranks(Killed("its node was lost", lost))
            return
        stacks = attempt.nodes.stacks(attempt.ranks, attempt.logs)
        rank, why = culprit(stacks, self._on_gpus) or (stuck.suspect, what_all_do(stacks, self._on_gpus))
        away = any(map(waits_for_storage, [stacks[rank]] if rank in stacks else stacks.values()))
        why += f"; {IN_KERNEL}" * away + ("" if attempt.logs is None else f"; the stacks are in {attempt.logs}/stacks")
        # Neither storage that is away, nor a hang that may have begun while this command was, says much of the run.
        self._end_ranks(Killed(f"{stuck.words}: {why}", rank, hang=stuck.certain and not away))

    def _end_ranks(self, why: Killed) -> None:
        attempt = self._attempt
        attempt.killed = why
        attempt.nodes.kill(attempt.ranks)
        attempt.ending_since = self._clock.now

    def _check_end(self, attempt: RayAttempt, seconds: float) -> None:
        """End Ray Train's controller, and the ranks with it, where the attempt should have ended this long ago."""
        if seconds <= _ENDS_SECONDS or not attempt.controller:
            return
        limit = f"{_ENDS_SECONDS:.0f} s"
        self._say(f"the attempt has not ended {limit} after its ranks were to end: Ray Train's controller is ended")
        if attempt.killed is None and attempt.error is None:
            rank, report = next(iter(attempt.reports.items()), (None, None))
            what = "a rank has ended" if report is None else f"it raised an error at {report.place}"
            attempt.killed = Killed(f"{what}, and the attempt did not end in {limit}", rank)
        attempt.end_controller()
