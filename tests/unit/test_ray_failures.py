"""What Ray Train says of ranks that failed, in words, and whether the run goes on. No Ray is started."""

from __future__ import annotations

import pickle
from threading import Lock
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from ray.exceptions import (
    GetTimeoutError,
    LocalRayletDiedError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback, WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.controller.state import (
    ErroredState,
    FinishedState,
    RunningState,
    ShuttingDownState,
)
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from raytune_fsdp.base.errors import DataError, Interrupted, RowError, TrainingError, TransientError
from raytune_fsdp.launch.ray import failures
from raytune_fsdp.launch.ray.board import Ending, Joined, Notice
from raytune_fsdp.launch.ray.failures import (
    MORE_MEMORY,
    ControllerWatch,
    death_of,
    failure_in_words,
    first_cause,
    is_death,
    is_final,
    underlying,
)

DEAD = WorkerHealthCheckFailedError(
    "A worker failed a health check", RayActorError(error_msg="exit code 2. End of file")
)

KILLED = OutOfMemoryError("Memory on the node was 15.9GB / 16GB, which exceeds the threshold\nmore")
KILLED_RANK = WorkerHealthCheckFailedError("A worker failed a health check", KILLED)


def dead(kind: str) -> RayActorError:
    """What Ray raises for an actor of this class that has died."""
    return RayActorError(error_msg=f"The actor died.\n\tclass_name: {kind}\n\tactor_id: 3f\n\tpid: 7")


def raised(error: BaseException) -> UserExceptionWithTraceback:
    """As it comes from a rank: through pickle, with its trace as text."""
    wrapped = UserExceptionWithTraceback(error, "Traceback (most recent call last): ...")
    back: UserExceptionWithTraceback = pickle.loads(pickle.dumps(wrapped))
    return back


LOST_PEER = raised(RuntimeError("[gloo] Connection closed by peer\nException raised from ..."))


@pytest.mark.parametrize(
    ("errors", "rank", "words", "final"),
    [
        ({0: LOST_PEER, 1: DEAD}, 1, "its process died (killed, out of memory, or crashed)", False),
        ({0: LOST_PEER, 2: raised(RowError("rows.jsonl:7: broken", "json"))}, 2, "rows.jsonl:7: broken", True),
        ({0: raised(TrainingError("loss is nan")), 1: DEAD}, 1, "its process died", False),
        ({0: raised(TransientError("the disk is full"))}, 0, "the disk is full", False),
        ({0: raised(Interrupted("stopped")), 1: raised(Interrupted("stopped"))}, 0, "stopped", True),
        ({3: LOST_PEER}, 3, "RuntimeError: [gloo] Connection closed by peer", False),
        ({0: LOST_PEER, 1: raised(ArithmeticError("step 21 cannot be computed"))}, 1, "ArithmeticError", False),
        # A rank that has lost something of Ray's is not dead itself.
        ({1: raised(RayActorError(error_msg="The actor died\nmore"))}, 1, "RayActorError: The actor died", False),
        ({1: raised(MemoryError())}, 1, "MemoryError", False),
        # Ray's memory monitor comes before all that follows from it, also from another process that died of it.
        ({0: DEAD, 1: KILLED_RANK}, 1, "Ray killed its process because the node ran out of memory", False),
        (
            {0: raised(RayTaskError("read", "trace", KILLED)), 1: DEAD},
            0,
            "Ray killed a process of the run because the node ran out of memory",
            False,
        ),
        ({0: LOST_PEER, 1: raised(dead("SplitCoordinator"))}, 1, "the process that hands out the data died", False),
    ],
)
def test_cause(errors: dict[int, BaseException], rank: int, words: str, final: bool) -> None:
    found, error = first_cause(errors)
    assert (found, is_final(error)) == (rank, final)
    assert failure_in_words(error).startswith(words) and "\n" not in failure_in_words(error)


def test_of_ranks_that_fail_alike_the_first_to_say_so_is_the_cause() -> None:
    errors = dict.fromkeys(range(3), raised(ArithmeticError("no")))
    assert first_cause(errors)[0] == 0 and first_cause(errors, [2, 0])[0] == 2
    assert first_cause({0: LOST_PEER, 1: raised(DataError("bad"))}, [0, 1])[0] == 1


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (RayActorError(error_msg="The worker died unexpectedly"), "its process died (killed by SIGKILL)"),
        (RayActorError(error_msg="NODE_OUT_OF_MEMORY"), "Ray killed its process because the node ran out of memory"),
        (RayActorError(error_msg="The actor is dead because its owner has died"), None),
        (None, None),
    ],
    ids=["died", "memory", "its controller", "lives"],
)
def test_ray_says_why_a_process_has_ended(
    monkeypatch: pytest.MonkeyPatch, says: BaseException | None, words: str | None
) -> None:
    monkeypatch.setattr(failures, "why_dead", lambda actor, seconds: says)
    error = death_of(Joined(3, "here", "node", 7), 1.0)
    if words is None:
        assert error is None
        return
    assert error is not None
    rank, cause = first_cause(error.worker_failures)
    assert rank == 3 and is_death(cause) and not is_final(cause)
    assert failure_in_words(cause, "killed by SIGKILL").startswith(words)


class Told:
    """A board that keeps what it is told."""

    def __init__(self) -> None:
        self.notices: list[Notice] = []

    def tell_and_ask(self, notice: Notice, seconds: float) -> bool:
        self.notices.append(notice)
        if len(self.notices) > 3:
            raise GetTimeoutError("the board does not answer")
        return True


def test_the_driver_hears_how_fit_will_end_before_the_ranks_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    monkeypatch.setattr(failures.ray, "get_runtime_context", lambda: SimpleNamespace(get_actor_id=lambda: "ours"))
    watch = ControllerWatch(told)  # type: ignore[arg-type]
    error = WorkerGroupError("failed", {1: raised(DataError("rows.jsonl:7: broken"))})
    unreadable = WorkerGroupError("failed", {1: RuntimeError(lambda: None, Lock())})
    for after in (RunningState(), ShuttingDownState(FinishedState())):
        watch.after_controller_state_update(RunningState(), after)
    assert told.notices == [Ending("ours")]
    for each in (error, unreadable, error):  # where the board does not answer, fit() brings it
        watch.after_controller_state_update(RunningState(), ShuttingDownState(ErroredState(each)))
    _, known, unknown, _ = told.notices
    assert isinstance(known, Ending) and isinstance(unknown, Ending) and known.error is not None
    assert is_final(first_cause(pickle.loads(known.error).worker_failures)[1]) and unknown.error is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The actor is dead because its node has died. Node Id: 3f", "its node was lost"),
        ("Worker exit type: NODE_OUT_OF_MEMORY", "Ray killed its process because the node ran out of memory"),
        ("Task was killed due to the node running low on memory.", "Ray killed its process because"),
    ],
)
def test_cause_of_death(text: str, words: str) -> None:
    assert failure_in_words(WorkerHealthCheckFailedError("lost", RayActorError(error_msg=text))).startswith(words)


BEFORE = (
    "Task was killed due to the node running low on memory.\nMemory on the node (IP: 10.0.6.2, ID: e5) where the task "
    "(actor ID: 43, name=Rank, pid=7, memory used=1.25GB) was running was 27.71GB / 28.80GB (0.962273), which exceeds "
    "the memory usage threshold of 0.95. Ray killed this worker (ID: 6f) as it was scheduled last"
)
SINCE_2_56 = (
    "{count} worker(s) were killed due to the node running low on memory.\nMemory on the node (IP: 10.2.1.4, ID: e5) "
    "was 27.71GB used / 28.80GB limit (0.962273)\nSelected to kill: {killed}\nTop 10 memory users: 20 0.19 gcs_server"
)
ONE = "(Task: task name=Rank, actual memory used=1.25GB)"


@pytest.mark.parametrize(
    ("text", "amounts"),
    [
        (BEFORE, ": it had 1.25 GB, and the node had 27.71 of 28.80 GB in use"),
        (SINCE_2_56.format(count=1, killed=ONE), ": it had 1.25 GB, and the node had 27.71 of 28.80 GB in use"),
        (SINCE_2_56.format(count=2, killed=f"{ONE} {ONE}"), ": the node had 27.71 of 28.80 GB in use"),
        ("The node was low on memory", ""),
    ],
)
def test_what_ray_kills_for_its_memory_is_said_with_the_amounts_and_a_way_out(text: str, amounts: str) -> None:
    for death in (OutOfMemoryError(text), RayActorError(error_msg=f"{text} NODE_OUT_OF_MEMORY")):
        assert failure_in_words(WorkerHealthCheckFailedError("lost", death)) == (
            f"Ray killed its process because the node ran out of memory{amounts}. {MORE_MEMORY}"
        )
    assert failure_in_words(OutOfMemoryError(text)) == (
        f"Ray killed a process of the run because the node ran out of memory{amounts}. Start fewer workers on a node "
        "(cluster.placement=spread), or, in a new run, lower data.window"
    )


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (dead("SplitCoordinator"), "the process that hands out the data died (killed"),
        (dead("TrainController"), "Ray Train's controller died (killed"),
        (dead("_Board"), "the message board between the driver and the ranks died"),
        (dead("Other"), "the actor Other died (killed"),
        (WorkerCrashedError(), "a process that prepares the data died (killed"),
        (LocalRayletDiedError(), "Ray's raylet on its node died"),
        (KILLED, "Ray killed a process of the run because the node ran out of memory"),
    ],
)
def test_what_has_died_besides_ranks_is_named(error: BaseException, words: str) -> None:
    for each in (error, raised(error), RayTaskError("work", "trace", error)):
        assert failure_in_words(each).startswith(words) and "\n" not in failure_in_words(each)


def test_what_is_ours_is_found_inside_of_what_fit_raises() -> None:
    ours = DataError("no such column")
    assert underlying(ControllerError(RayTaskError("run", "trace", ours))) is ours
    other = ValueError("theirs")
    assert underlying(ControllerError(other)) is other
