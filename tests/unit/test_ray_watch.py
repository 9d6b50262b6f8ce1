"""A driver that was away ends no healthy rank, and a rank that is stopped in a start is found. No Ray is started."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError, GetTimeoutError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2.api.exceptions import WorkerGroupError

from raytune_fsdp.base.errors import RepeatedError
from raytune_fsdp.launch.ray import attempt, supervisor
from raytune_fsdp.launch.ray.attempts import Attempts
from raytune_fsdp.launch.ray.board import Beat, Ended, Ending, Failed, Joined, Notice, Started
from raytune_fsdp.launch.ray.resources import Node, Request
from raytune_fsdp.launch.ray.supervisor import AttemptSupervisor
from raytune_fsdp.launch.ray.watch.hangs import IN_KERNEL
from tests.unit.test_ray_supervisor import Silent, begin

TWO = Request(workers=2, per_worker={"CPU": 1.0}, accelerator_type=None, placement="pack", device="cpu")
STOPPED = "State:\tT (stopped)\n"
FRAMES = """Thread 0x2 (most recent call first):
  File "/x/raytune_fsdp/data/cache.py", line 8 in read
  File "/x/raytune_fsdp/launch/ray/rank.py", line 99 in train_rank
"""
LIMIT = 300.0
"""`cluster.hang_minutes` by default, of short steps."""


class Ranks(Silent):
    """Two ranks on a clock, as the driver hears and ends them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.fit: Future[Any] = Future()
        self.told = 0.0
        self.away: dict[float, float] = {}
        """For how long the driver is away when it looks at these times."""
        self.ends_at = float("inf")
        self.killed_at: float | None = None
        self.can_be_killed = True
        self.controller_ended_at: float | None = None
        self.nodes = ["0", "1"]
        """That are there, and answer."""
        self.beat: Callable[[int, float], Beat | None] = trains
        self.joined: list[Notice] = [Joined(rank, f"node-{rank}", f"{rank}", 100 + rank) for rank in range(2)]

    def monotonic(self) -> float:
        return self.now

    def read(self, seconds: float) -> list[Notice]:
        """As the actor: an answer has what was told until it was made, however late it is looked at."""
        self.now += seconds
        found, self.joined = list(self.joined), []
        while self.told + 1 <= self.now:
            self.told += 1.0
            found += [beat for rank in range(2) if (beat := self.beat(rank, self.told)) is not None]
        self.now += self.away.pop(self.now, 0.0)
        if self.now >= self.ends_at and not self.fit.done():
            self.fit.set_result(None)
        return found

    def stacks(self, ranks: object, logs: object) -> dict[int, str]:
        return {1: STOPPED}

    def kill(self, ranks: object) -> None:
        self.killed_at = self.now
        if self.can_be_killed:
            self.fit.set_exception(RuntimeError("killed"))

    def end_controller(self, actor: object) -> None:
        """In the place of `ray.kill`: the ranks end with it."""
        self.controller_ended_at = self.now
        self.fit.set_exception(RuntimeError("its controller is gone"))

    def kill_watched(self, ranks: object) -> None:
        self.killed_at = self.now

    def wait(self, ranks: object, seconds: float) -> None:
        pass

    def start(self, ranks: object) -> None:
        pass


def trains(rank: int, now: float) -> Beat | None:
    """A step a second."""
    return Beat(int(now), int(now), 0.0, at=now) if rank == 0 else None


def until(moment: float, beat: Callable[[int, float], Beat | None]) -> Callable[[int, float], Beat | None]:
    """The same, with rank 0 waiting for rank 1 from this moment on."""

    def told(rank: int, now: float) -> Beat | None:
        found = beat(rank, min(now, moment))
        return found if rank == 0 or now < moment else None

    return told


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    found = Ranks()
    monkeypatch.setattr(supervisor.time, "monotonic", found.monotonic)
    monkeypatch.setattr(supervisor.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(supervisor, "draining", dict)
    for place in (supervisor, attempt):
        monkeypatch.setattr(
            place, "nodes", lambda **_: [Node(id=each, name=each, total={}, free={}) for each in found.nodes]
        )
        monkeypatch.setattr(place, "answering", lambda nodes: nodes)
    return found


def of(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[AttemptSupervisor, Attempts, list[str]]:
    monkeypatch.setattr(supervisor, "NodeWatches", lambda *_: ranks)
    known, _, _, said = begin(tmp_path, monkeypatch)
    known._board = ranks  # type: ignore[assignment]
    return known, known._attempts, said


def test_a_node_that_is_lost_is_no_hang(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray may know of it minutes later. The run did not cause it, however often it happens."""
    known, attempts, _ = of(ranks, tmp_path, monkeypatch)
    ranks.beat, ranks.nodes = until(30.0, trains), ["0"]
    known.until(ranks.fit, TWO)
    assert ranks.killed_at is not None
    assert attempts.current.killed == ("its node was lost", 1, False)


def test_ranks_that_beat_while_the_driver_was_away_are_left_alone(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped for 401 s, and once more for an hour, each time between two beats: what it reads first is of before."""
    known, attempts, said = of(ranks, tmp_path, monkeypatch)
    ranks.away, ranks.ends_at = {20.5: 401.0, 600.5: 3600.0}, 5000.0
    known.until(ranks.fit, TWO)
    assert ranks.killed_at is None and attempts.current.killed is None
    assert [line[:36] for line in said] == [
        "this command was away for 402 s (sto",
        "this command was away for 3600 s (st",
    ]


def test_a_driver_whose_output_is_blocked_was_away(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, attempts, _ = of(ranks, tmp_path, monkeypatch)

    def blocked(notice: object) -> None:
        if isinstance(notice, Beat) and notice.step == 30:
            ranks.now += 500.0

    heard = known._hear
    monkeypatch.setattr(known, "_hear", lambda notice: (heard(notice), blocked(notice)))
    ranks.ends_at = 700.0
    known.until(ranks.fit, TWO)
    assert ranks.killed_at is None and attempts.current.killed is None


@pytest.mark.parametrize("began", [19.0, 200.0], ids=["before", "meanwhile"])
def test_a_hang_that_is_there_when_the_driver_is_back_is_found(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, began: float
) -> None:
    known, attempts, _ = of(ranks, tmp_path, monkeypatch)
    ranks.away, ranks.beat = {20.5: 401.0}, until(began, trains)
    known.until(ranks.fit, TWO)
    assert ranks.killed_at is not None and attempts.current.killed is not None
    assert 421.5 < ranks.killed_at <= 421.5 + LIMIT + 5.0
    cause, rank, counts = attempts.current.killed
    assert rank == 1 and not counts
    assert "(before, it was away for 40" in cause and "its process takes no signals (T (stopped))" in cause


@pytest.mark.parametrize("away", [True, False])
def test_three_hangs_end_the_run_unless_the_driver_was_away(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away: bool
) -> None:
    known, attempts, _ = of(ranks, tmp_path, monkeypatch)
    for number in range(1, 4):
        ranks.__init__()  # type: ignore[misc]
        ranks.beat = until(60.0, trains)
        ranks.away = {59.5: 401.0} if away else {}
        known._begin()
        known.until(ranks.fit, TWO)
        error = ranks.fit.exception()
        assert error is not None and ranks.killed_at is not None
        if number < 3 or away:
            attempts.ended(error)
        else:
            with pytest.raises(RepeatedError, match="step 60 has failed 3 times in the same way"):
                attempts.ended(error)
    assert attempts.failures == 3


def controlled(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same, where the driver can end Ray Train's controller."""
    found = of(ranks, tmp_path, monkeypatch)
    monkeypatch.setattr(attempt.ray, "kill", ranks.end_controller)
    found[0]._attempt.controller = ["its actor"]
    return found


@pytest.mark.parametrize("cause", ["a hang", "a lost node"])
def test_where_a_kill_has_no_effect_the_controller_is_ended(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    """The actor that ends the ranks may not start, or the kernel may not let them go."""
    known, attempts, said = controlled(ranks, tmp_path, monkeypatch)
    ranks.beat, ranks.can_be_killed, ranks.ends_at = until(30.0, trains), False, 4000.0
    ranks.nodes = ["0"] if cause == "a lost node" else ranks.nodes
    known.until(ranks.fit, TWO)
    assert ranks.killed_at is not None and ranks.controller_ended_at is not None
    assert 60.0 < ranks.controller_ended_at - ranks.killed_at <= 62.0
    assert attempts.current.killed is not None and attempts.current.killed[1] == 1
    assert said == ["the attempt has not ended 60 s after its ranks were to end: Ray Train's controller is ended"]


def test_a_rank_that_has_failed_is_no_hang_while_ray_train_brings_its_error(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes it some seconds, and says more: the limit for hangs may be over meanwhile."""
    known, attempts, _ = controlled(ranks, tmp_path, monkeypatch)
    ranks.beat, ranks.ends_at = fails_at(30.0 + 598.0, ranks, until(30.0, starts)), 640.0
    known.until(ranks.fit, TWO)
    assert ranks.killed_at is None and attempts.current.killed is None and attempts.current.reports


def test_an_attempt_that_does_not_end_after_a_failure_is_ended(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank may be stopped, and Ray Train wait for it."""
    known, attempts, _ = controlled(ranks, tmp_path, monkeypatch)
    ranks.beat = fails_at(30.0, ranks, until(30.0, starts))
    known.until(ranks.fit, TWO)
    assert ranks.killed_at is None and ranks.controller_ended_at is not None
    assert 90.0 < ranks.controller_ended_at <= 93.0
    cause = "it raised an error at fetching.py:99, and the attempt did not end in 60 s"
    assert attempts.current.killed == (cause, 0, False)


def fails_at(
    moment: float, ranks: Ranks, beat: Callable[[int, float], Beat | None]
) -> Callable[[int, float], Beat | None]:
    """The same, with rank 0 raising an error at this moment."""

    def told(rank: int, now: float) -> Beat | None:
        if now == moment and rank == 0:
            ranks.joined.append(Failed(0, 0, "fetching.py:99"))
        return beat(rank, now)

    return told


@pytest.mark.parametrize(
    ("stacks", "counts"),
    [
        ({1: "State:\tD (disk sleep)\nwaits in: rpc_wait_bit_killable\n"}, False),
        ({0: "", 1: f"{FRAMES}{IN_KERNEL}\n"}, False),
        ({0: f"{FRAMES}{IN_KERNEL}\n", 1: STOPPED}, True),
        (dict.fromkeys(range(2), f"{FRAMES}{IN_KERNEL}\n"), False),
        ({0: FRAMES, 1: FRAMES}, True),
        ({}, True),
    ],
    ids=["its process", "its thread", "of another rank", "of all", "nobody's", "no stacks"],
)
def test_a_hang_on_storage_that_is_away_is_none_from_within(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stacks: dict[int, str], counts: bool
) -> None:
    """However often it happens: storage that raises an error does not count either."""
    known, attempts, _ = of(ranks, tmp_path, monkeypatch)
    ranks.beat = until(30.0, starts)
    monkeypatch.setattr(ranks, "stacks", lambda *_: stacks)
    known.until(ranks.fit, TWO)
    assert attempts.current.killed is not None and attempts.current.killed[2] == counts
    assert ("storage that does not answer" in attempts.current.killed[0]) == (not counts)


def starts(rank: int, now: float) -> Beat:
    """Reads weights."""
    return Beat(0, int(now), 0.0, rank=rank, at=now, phase="model", left=3)


def test_a_rank_that_is_stopped_before_its_first_step_is_named_and_ended(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, attempts, said = of(ranks, tmp_path, monkeypatch)
    ranks.beat = until(30.0, starts)
    known.until(ranks.fit, TWO)
    assert ranks.killed_at is not None and 629.0 < ranks.killed_at <= 635.0
    killed = attempts.current.killed
    assert killed is not None and killed[1:] == (1, True)
    waited_for = "waiting for rank 1 on node-1 (model; not heard of for"
    assert waited_for in killed.cause and "no rank got on for 600 s while starting" in killed.cause
    lines = [line for line in said if waited_for in line]
    assert len(lines) == 10 == len(said), said
    assert lines[0].startswith("the ranks have been starting for 60 s")
    assert lines[-1].endswith("no rank has got on for 570 s, and 600 s are the most (cluster.start_hang_minutes)")


def test_a_driver_that_was_away_in_a_start_ends_no_rank(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, attempts, _ = of(ranks, tmp_path, monkeypatch)
    ranks.beat, ranks.away, ranks.ends_at = starts, {20.5: 4000.0}, 4700.0
    known.until(ranks.fit, TWO)
    assert attempts.current.killed is None


def test_the_wait_for_workers_does_not_count_what_the_driver_slept(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cluster.wait_minutes` over, and the workers there: what they said is on the board."""
    known, _, _ = of(ranks, tmp_path, monkeypatch)
    joined, ranks.joined = ranks.joined, []
    ranks.away, ranks.ends_at = {20.5: 3600.0}, 3700.0

    def late(rank: int, now: float) -> Beat | None:
        if now == 30.0 and rank == 0:
            ranks.joined = joined
        return trains(rank, now) if now > 40.0 else None

    ranks.beat = late
    known.until(ranks.fit, TWO)
    assert len(known._attempt.ranks) == 2


def test_the_stacks_of_a_start_are_kept_where_there_are_logs(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are none while the ranks agree where to begin, which is the case above."""
    known, attempts, _ = of(ranks, tmp_path, monkeypatch)
    ranks.joined.append(Started(1, str(tmp_path)))
    ranks.beat = until(30.0, starts)
    known.until(ranks.fit, TWO)
    killed = attempts.current.killed
    assert killed is not None and killed.cause.endswith(f"; the stacks are in {tmp_path}/stacks")


DIED = WorkerGroupError("died", {1: WorkerHealthCheckFailedError("its process has ended", ActorDiedError())})
RAISED = WorkerGroupError("raised", {0: RuntimeError("no")})
UNREADABLE = b"no pickle"


@pytest.mark.parametrize(
    ("notices", "error"),
    [
        ([Ended(1, 101, None)], "died"),
        ([Failed(0, 30, "c10d.py:7"), Ended(1, 101, None)], "died"),
        ([Ended(1, 101, None), Ending("ours", pickle.dumps(RAISED))], "died"),
        ([Ending("ours", pickle.dumps(RAISED)), Ended(1, 101, None)], "raised"),
        ([Ending("ours", UNREADABLE), Ended(1, 101, None)], None),
        ([Ending("ours"), Ended(1, 101, None)], None),
        ([Ended(1, 99, None), Ending("theirs", pickle.dumps(RAISED))], None),
        ([Ended(0, 100, None)], None),
        ([Ended(2, 102, None)], "explained"),
        ([Ended(3, 103, None)], "its process has ended"),
    ],
    ids=[
        "died",
        "peer first",
        "peer after",
        "raised",
        "unreadable",
        "done",
        "late words",
        "its controller",
        "slow",
        "?",
    ],
)
def test_the_end_of_a_process_ends_the_attempt_at_once(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notices: list[Notice], error: str | None
) -> None:
    """Unless Ray Train ends all of them: then fit() says why, and here that it is done."""
    known, attempts, _ = controlled(ranks, tmp_path, monkeypatch)
    ranks.joined += [Joined(rank, "node-1", "1", 100 + rank) for rank in (2, 3)]
    known._attempt.controller_id = "ours"
    asked: list[float] = []

    def death_of(joined: Joined, seconds: float) -> WorkerGroupError | None:
        asked.append(seconds)
        if joined.rank > 1 and (joined.rank == 3 or len(asked) == 1):
            raise GetTimeoutError("Ray does not know yet")
        return {0: None, 1: DIED, 2: WorkerGroupError("explained", DIED.worker_failures)}[joined.rank]

    monkeypatch.setattr(attempt, "death_of", death_of)
    ranks.ends_at = 60.0

    def told(rank: int, now: float) -> Beat | None:
        if now == 30.0 and rank == 0:
            ranks.joined.extend(notices)
        return trains(rank, now)

    ranks.beat = told
    known.until(ranks.fit, TWO)
    found = attempts.current.failure(ranks.fit)
    if error is None:
        assert found is None and ranks.controller_ended_at is None
    else:
        assert isinstance(found, WorkerGroupError) and error in f"{found}{[*found.worker_failures.values()]}"
        assert ranks.killed_at == ranks.controller_ended_at and 30.0 <= (ranks.killed_at or 0.0) < 32.0


@pytest.mark.parametrize("answers", [True, False], ids=["", "head away"])
def test_the_record_has_the_seconds_from_a_death_to_the_end(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """While the head is away nobody may ask to end the controller: the call would not come back."""
    known, attempts, _ = controlled(ranks, tmp_path, monkeypatch)
    monkeypatch.setattr(attempt, "death_of", lambda joined, seconds: DIED)
    monkeypatch.setattr(known._session, "answers", lambda: answers)
    ranks.ends_at = 60.0

    def told(rank: int, now: float) -> Beat | None:
        if now == 30.0 and rank == 0:
            ranks.joined += [Failed(5, 40, "of the attempt before"), Ended(1, 101, None)]
        return trains(rank, now)

    ranks.beat = told
    known.until(ranks.fit, TWO)
    assert (ranks.controller_ended_at is not None) == answers and 5 not in attempts.current.reports
    assert attempts.current.ending_since is not None and 30.0 <= attempts.current.ending_since < 32.0
    assert attempts.current.seconds["stop_seconds"] is not None


def test_ranks_that_lose_one_say_in_which_step(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By which the same failure is known again; the driver does not end them before that."""
    known, attempts, _ = controlled(ranks, tmp_path, monkeypatch)
    monkeypatch.setattr(attempt, "death_of", lambda joined, seconds: DIED)
    later = iter([[Ended(1, 101, None)], [Failed(0, 31, "c10d.py:7")]])
    read = ranks.read

    def one_after_another(seconds: float) -> list[Notice]:
        return read(seconds) + (next(later, []) if ranks.now >= 30.0 else [])

    monkeypatch.setattr(ranks, "read", one_after_another)
    known.until(ranks.fit, TWO)
    assert attempts.current.failure(ranks.fit) is DIED and attempts.current.reached == 31
    assert ranks.killed_at is not None
