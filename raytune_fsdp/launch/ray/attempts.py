"""The attempts of a run, as the driver counts them: what became of each, and whether another one follows.

Every fit() of Ray Train is one attempt. Ray Train itself tries nothing again, so failures are counted here and nowhere
else, whatever has failed: a rank, a node, or something that Ray runs for us.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import asdict, replace

from raytune_fsdp.base.errors import (
    HandedOver,
    Interrupted,
    RepeatedError,
    TrainingError,
    TransientError,
    UserError,
    in_one_line,
)
from raytune_fsdp.base.lease import lease_of
from raytune_fsdp.base.threads import in_thread
from raytune_fsdp.checkpoint.catalogue import committed
from raytune_fsdp.launch.ray.attempt import RayAttempt
from raytune_fsdp.launch.ray.failures import (
    MORE_MEMORY,
    failure_in_words,
    first_cause,
    is_death,
    is_final,
    is_from_within,
    is_ours,
    underlying,
)
from raytune_fsdp.launch.ray.private_train import WorkerGroupStartupTimeoutError
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record import names
from raytune_fsdp.record.jsonl import append_event
from raytune_fsdp.record.lines import now

_REPEATS = 3  # equal failures from within that end the run, whatever `cluster.max_failures` says
_STORAGE_SECONDS = 5.0  # how long a message waits for the number of the last committed step
_EVENT_SECONDS = 10.0  # how long an event is waited for; a lock that is missing is looked for for 5 s


class Attempts:
    """The current attempt, and the failures of all."""

    current: RayAttempt
    """The attempt that runs, or the last one. The supervisor makes each of them."""

    def __init__(
        self,
        place: RunDir,
        *,
        limit: int,
        step: int,
        say: Callable[[str], None],
        answers: Callable[[], bool] = lambda: True,
    ) -> None:
        self._place = place
        self._answers = answers
        """Whether Ray's head answers: otherwise a question about the nodes would wait for it."""
        self._limit = limit
        """Failures after which another attempt follows (`cluster.max_failures`); -1: all."""
        self._say = say
        self._committed = step
        """The newest committed step, as far as the driver has heard."""
        self.number = 0
        """The number of the last attempt whose ranks have agreed where it begins."""
        self.failures = 0
        self._size = 0
        """The number of ranks of the last attempt that has trained."""
        self._cause = ""
        """The reason why the last attempt has ended."""
        self._ended_at = 0.0
        self._same: list[tuple[str, str, int]] = []
        """Failures from within since the last commit: their kind, place and step."""
        self._same_since = step
        self._unwritten: list[tuple[str, int, dict[str, object]]] = []
        """Events that could not be written yet: name, attempt and fields."""
        self._writing: Future[str] | None = None
        """What writes them, if it takes long."""
        self._redone = 0
        """How many steps earlier attempts have trained and not saved."""

    def reached(self, step: int) -> None:
        """Note that rank 0 trains this step, or a later one."""
        if not self._size or len(self.current.ranks) != self._size:
            before, self._size = self._size, len(self.current.ranks)
            if before:  # the first step of this attempt, which has another size than the last one
                seconds = time.monotonic() - self._ended_at
                self.event(
                    names.RESIZED, before=before, after=self._size, cause=self._cause,
                    seconds=round(seconds, 2), steps_redone=self._redone,
                )  # fmt: skip
                self._say(f"{before} -> {self._size} workers, {seconds:.0f} s after the last attempt had ended")
        self.current.step, self._redone = step, 0

    def started(self, number: int, logs: str, begins: int = 0) -> None:
        """Note which number the ranks of the current attempt have agreed on, and after which step it `begins`."""
        self.number, self.current.logs = number, logs
        self._redone = max(0, self._redone - max(0, begins - self._committed))  # the others are in a peer copy
        ranks = [asdict(replace(joined, actor=None)) for _, joined in sorted(self.current.ranks.items())]
        self.event(
            names.RANKS_JOINED,
            ranks=[{name: value for name, value in rank.items() if name != "actor"} for rank in ranks],
        )

    def committed(self, step: int) -> None:
        """Note a commit that the driver has heard of."""
        self._committed = step

    def ended(self, error: BaseException) -> None:
        """Judge the error that fit() raised. Raise what ends the run; return if another attempt follows."""
        failures = getattr(error, "worker_failures", None)
        rank, cause = first_cause(failures, list(self.current.reports)) if failures else (None, error)
        inner = underlying(cause)
        self._ended_at = time.monotonic()
        if self.current.killed is not None:
            why, rank, hang = self.current.killed
            if hang:
                self._repeated("hang", rank, why)
            self.failed(why, rank)
            return
        if isinstance(inner, HandedOver):
            self._cause = self.current.making_way_for
            return
        if isinstance(inner, WorkerGroupStartupTimeoutError):
            return  # Ray Train has waited for resources as long as it does
        if isinstance(inner, Interrupted) or (isinstance(inner, UserError) and not self.number):
            raise inner  # a UserError: refused before anything was written
        words = failure_in_words(cause, None if rank is None else self.current.ends.get(rank))
        lost: int | None = None
        if not is_ours(cause) and self._answers():
            lost = self.current.rank_lost()
        if lost is not None:
            rank, words = lost, "its node was lost"
        elif rank is not None and is_death(cause) and (memory := self.current.out_of_memory(rank)) is not None:
            words = f"the kernel ended its process for its memory: {memory}. {MORE_MEMORY}"
            self._repeated("memory", rank, words)
        elif is_from_within(cause):
            self._repeated(type(inner).__name__, rank, words)
        if is_final(cause):
            self._record(words, rank)
            raise TrainingError(self._described(words, rank))  # which names the way out: the same command is none
        self.failed(words, rank)

    def _repeated(self, kind: str, rank: int | None, words: str) -> None:
        """Count a failure from within; raise if it was the third of its kind at this step, without a commit."""
        report = self.current.reports.get(rank) if rank is not None else None
        # One that was killed has said nothing; the others know the step, in which they have lost it.
        step = report.step if report else self.current.reached
        self._same = [] if self.last_step() != self._same_since else self._same
        self._same_since = self._committed
        self._same.append((kind, report.place if report else "", step))
        if self._same.count(self._same[-1]) < _REPEATS:
            return
        self._record(words, rank)
        what = f"step {step}" if step else "what comes before the first step"
        rows = f" (raytune-fsdp step {self._place.path} {step} --text shows its rows)" if step else ""
        raise RepeatedError(
            f"{what} has failed {_REPEATS} times in the same way, with no checkpoint in between: "
            f"{self._described(words, rank)}; the same command would fail there again{rows}"
        )

    def failed(self, cause: str, rank: int | None = None, *, again: bool = True) -> None:
        """Record that the attempt has failed. Raise if that ends the run: `again` says whether another one may help."""
        self._record(cause, rank)
        described = self._described(cause, rank)
        if not again or 0 <= self._limit < self.failures:
            raise TrainingError(f"{described}; the same command continues")
        self._say(f"{described}; the run goes on from there")

    def _record(self, cause: str, rank: int | None) -> None:
        ranks = self.current.ranks
        self.event(
            names.ATTEMPT_FAILED,
            rank=rank, node=ranks[rank].node if rank in ranks else None, cause=cause, last_step=self.last_step(),
            logs=self.current.logs, reached=self.current.reached, **self.current.seconds,
        )  # fmt: skip
        self.failures += 1
        # The attempt before may have trained more than this one, which has failed before its first step.
        self._cause, self._redone = cause, max(self._redone, self.current.reached - 1 - self._committed)

    def last_step(self) -> int:
        """Return the newest committed step, 0 if there is none. Where storage does not answer, believe the ranks."""
        asked = in_thread(lambda: committed(self._place.checkpoints), "storage")
        if wait([asked], timeout=_STORAGE_SECONDS).done and asked.exception() is None:
            self._committed = max((found.step for found in asked.result()), default=0)
        return self._committed

    def event(self, name: str, **fields: object) -> None:
        """Record an event, and those before it that could not be written. Nothing that the driver does depends on them,
        so it waits some seconds at most: on a mount that does not answer, it would hear no signal and find no hang."""
        self._unwritten.append((name, self.number, fields))
        while self._unwritten:  # also of what came while an earlier call was about to end
            if self._writing is None or self._writing.done():
                self._writing = in_thread(self._write, "events")
            if not wait([self._writing], timeout=_EVENT_SECONDS).done:
                return self._cannot_write("it does not answer", fields)
            if why := self._writing.result():
                return self._cannot_write(why, fields)

    def _write(self) -> str:
        """Write what is unwritten. Return why that is not possible; empty if nothing is left."""
        if (lease := lease_of(self._place.lock)) is not None:
            lease.check()
        while self._unwritten:
            name, number, fields = self._unwritten[0]
            try:
                append_event(self._place.events, name, attempt=number, fields=fields)
            except TransientError as error:  # a full disk
                return in_one_line(error.__cause__ or error)
            del self._unwritten[0]
        return ""

    def _cannot_write(self, why: str, fields: dict[str, object]) -> None:
        fields["happened"] = now()
        if len(self._unwritten) == 1:
            self._say(
                f"{self._place.events} cannot be written ({why}): what the driver records is written with the next "
                "line that can be; make room, or make it writable"
            )

    def _described(self, cause: str, rank: int | None) -> str:
        """Describe a failure with all that helps: which rank, where, why, the last committed step, and the logs."""
        joined = self.current.ranks.get(rank) if rank is not None else None
        process = f" on {joined.node}, process {joined.pid}," if joined else ""
        who = "the run failed" if rank is None else f"rank {rank}{process} failed"
        saved = self._committed  # as it has just been recorded
        where = f"The last committed step is {saved}" if saved else "No step was committed yet"
        logs = f"; the logs of all ranks are in {self.current.logs}" if self.current.logs else ""
        return f"{who}: {cause}. {where}{logs}"
