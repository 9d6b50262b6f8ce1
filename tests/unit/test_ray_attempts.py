"""Which attempts another one follows, and what is said and recorded of each. No Ray is started."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import (
    UserExceptionWithTraceback,
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from raytune_fsdp.base.errors import (
    DataError,
    HandedOver,
    Interrupted,
    RaytuneError,
    RepeatedError,
    TrainingError,
    TransientError,
)
from raytune_fsdp.base.lease import Lease, TakenOverError, hold, release
from raytune_fsdp.launch.phases import Phases
from raytune_fsdp.launch.ray import attempt, attempts
from raytune_fsdp.launch.ray.attempt import Killed, RayAttempt
from raytune_fsdp.launch.ray.attempts import Attempts
from raytune_fsdp.launch.ray.board import Failed, Joined
from raytune_fsdp.launch.ray.resources import Node
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record.jsonl import read_events
from tests.runs import make_config

DEAD = WorkerHealthCheckFailedError("A worker failed a health check", RayActorError(error_msg="exit code 2"))


def begin(tmp_path: Path, *, limit: int = 5, number: int = 1) -> tuple[Attempts, list[str]]:
    place = RunDir.of(make_config(tmp_path, cluster={"launch": "ray"}))
    place.path.mkdir(parents=True)
    said: list[str] = []
    known = Attempts(place, limit=limit, step=0, say=said.append)
    another(known, 1)
    known.number = number
    return known, said


def another(known: Attempts, *ranks: int, memory: str | None = None, **fields: Any) -> RayAttempt:
    """Begin another attempt, and let these ranks start. `memory`: for what the kernel has ended any of them."""
    nothing: Any = SimpleNamespace(out_of_memory=lambda joined: memory)
    joined = {rank: Joined(rank, "here", "node", 7) for rank in ranks}
    known.current = RayAttempt(watch=nothing, nodes=nothing, phases=Phases(), waiting=nothing, ranks=joined, **fields)
    return known.current


def events(tmp_path: Path, name: str) -> list[dict[str, Any]]:
    (file,) = tmp_path.glob("**/events.jsonl")
    return [line["fields"] for line in read_events(file) if line["event"] == name]


def of_rank(error: BaseException) -> WorkerGroupError:
    return WorkerGroupError("failed", {1: error})


def raised(error: BaseException) -> WorkerGroupError:
    return of_rank(UserExceptionWithTraceback(error, "Traceback"))


@pytest.fixture(autouse=True)
def alive(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The nodes that answer."""
    found = ["node"]
    monkeypatch.setattr(attempt, "nodes", lambda **_: None)
    monkeypatch.setattr(attempt, "answering", lambda _: [Node(id=name, name=name, total={}, free={}) for name in found])
    yield found


def test_no_node_is_looked_for_while_the_head_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The question would wait for it."""
    known, _ = begin(tmp_path)
    known._answers = lambda: False
    monkeypatch.setattr(attempt, "nodes", lambda **_: pytest.fail("this would wait for the head"))
    known.ended(of_rank(DEAD))
    (failed,) = events(tmp_path, "attempt_failed")
    assert failed["rank"] == 1 and failed["cause"].startswith("its process died")


def test_a_lost_node_is_the_cause_of_what_its_peers_raise(tmp_path: Path, alive: list[str]) -> None:
    known, said = begin(tmp_path)
    known.current.ranks[0] = Joined(0, "there", "other", 8)
    known.ended(raised(RuntimeError("[gloo] Connection closed by peer")))
    alive.append("other")
    known.ended(raised(RuntimeError("[gloo] Connection closed by peer")))
    assert [each["cause"][:9] for each in events(tmp_path, "attempt_failed")] == ["its node ", "RuntimeEr"]
    assert said[0].startswith("rank 0 on there, process 8, failed: its node was lost.")


@pytest.mark.parametrize(
    ("error", "cause", "ends"),
    [
        (of_rank(DEAD), "its process died (killed, out of memory, or crashed)", None),
        (raised(TransientError("full")), "full", None),
        (raised(DataError("bad")), "bad", TrainingError),
        (raised(Interrupted("stopped")), None, Interrupted),
        (raised(HandedOver("stopped to go on with more ranks")), None, None),
        (ControllerError(WorkerGroupStartupTimeoutError(2)), None, None),
        (
            ControllerError(WorkerGroupStartupFailedError("one failed")),
            "a worker died, or could not reach the others, while the ranks were starting",
            None,
        ),
        (RayActorError(error_msg="died\n\tclass_name: TrainController\n"), "Ray Train's controller died (killed", None),
    ],
)
def test_what_follows_an_attempt(
    tmp_path: Path, error: BaseException, cause: str | None, ends: type[RaytuneError] | None
) -> None:
    known, said = begin(tmp_path)
    if ends is None:
        known.ended(error)
        assert all(line.endswith("; the run goes on from there") for line in said)
    else:
        with pytest.raises(ends) as refused:
            known.ended(error)
        assert "the same command" not in str(refused.value)
    assert known.failures == (cause is not None)
    if cause is not None:
        (failed,) = events(tmp_path, "attempt_failed")
        assert failed["cause"].startswith(cause)


def test_a_request_that_is_refused_before_anything_is_written_is_not_a_failure(tmp_path: Path) -> None:
    known, _ = begin(tmp_path, number=0)
    with pytest.raises(DataError, match="bad"):
        known.ended(raised(DataError("bad")))
    assert not known.failures


def test_the_run_ends_with_one_failure_more_than_the_limit(tmp_path: Path) -> None:
    known, said = begin(tmp_path, limit=2)
    known.ended(of_rank(DEAD))
    known.failed("something")
    with pytest.raises(
        TrainingError, match="rank 1 on here, process 7, failed: its process died.*No step was committed"
    ):
        known.ended(of_rank(DEAD))
    assert len(said) == 2 and len(events(tmp_path, "attempt_failed")) == 3


def test_a_message_does_not_wait_for_storage_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, said = begin(tmp_path)
    known.committed(40)

    def refuse(root: object) -> None:
        raise OSError("no route to host")

    answers: list[Callable[[object], None]] = [lambda root: time.sleep(3), refuse]
    for answer in answers:
        monkeypatch.setattr(attempts, "_STORAGE_SECONDS", 0.05)
        monkeypatch.setattr(attempts, "committed", answer)
        began = time.monotonic()
        known.failed("it failed")
        assert "The last committed step is 40; the run goes on" in said[-1]
        assert time.monotonic() - began < 1


def test_a_full_disk_keeps_the_driver_from_no_attempt(tmp_path: Path) -> None:
    """What it could not write it writes later, in order and with the time when it happened."""
    known, said = begin(tmp_path, limit=-1)
    file = RunDir.of(make_config(tmp_path)).events
    file.symlink_to("/dev/full")
    known.ended(of_rank(DEAD))
    known.number = 2
    known.ended(raised(TransientError("storage is away")))
    file.unlink()
    known.event("first_step", seconds=1)
    known.event("resized", before=2, after=1)
    lines = read_events(file)
    assert [(line["attempt"], line["event"]) for line in lines] == [
        (1, "attempt_failed"), (2, "attempt_failed"), (2, "first_step"), (2, "resized"),
    ]  # fmt: skip
    times = [line["fields"].get("happened") for line in lines]
    assert times[0] <= times[1] <= lines[0]["time"] and times[2:] == [None, None]
    (told,) = [line for line in said if "cannot be written" in line]
    assert told.startswith(f"{file} cannot be written ([Errno 28] No space left on device): what the driver records")


def test_a_mount_that_does_not_answer_keeps_the_driver_for_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, said = begin(tmp_path, limit=-1)
    monkeypatch.setattr(attempts, "_EVENT_SECONDS", 0.05)
    answers, append = threading.Event(), attempts.append_event
    monkeypatch.setattr(attempts, "append_event", lambda *a, **k: (answers.wait(), append(*a, **k)))
    began = time.monotonic()
    known.event("drained", node="n1")
    known.event("first_step", seconds=1)
    assert time.monotonic() - began < 2 and len(said) == 1 and "cannot be written (it does not answer)" in said[0]
    answers.set()
    file = RunDir.of(make_config(tmp_path)).events
    while known._unwritten:
        time.sleep(0.01)
    known.event("resized", before=2, after=1)
    lines = read_events(file)
    assert [line["event"] for line in lines] == ["drained", "first_step", "resized"]
    assert "happened" not in lines[2]["fields"]


def test_a_driver_that_was_replaced_records_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytune_fsdp.base.lease._LOOKS", 2)
    known, _ = begin(tmp_path)
    place = RunDir.of(make_config(tmp_path))
    hold(Lease(place.lock, "another command's lock is there"))
    try:
        with pytest.raises(TakenOverError):
            known.event("first_step", seconds=1)
    finally:
        release(place.lock)
    assert not place.events.exists()


def test_a_resize_is_recorded_with_its_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "committed", lambda root: [SimpleNamespace(step=6)])
    known, _ = begin(tmp_path)
    another(known, 0, 1, 2)
    known.reached(1)
    known.reached(9)
    known.ended(of_rank(DEAD))
    another(known, 0, making_way_for="there is room for 2 workers")
    known.reached(7)
    known.reached(8)
    known.ended(raised(HandedOver("stopped")))
    another(known, 0, 1)
    known.reached(11)
    found = events(tmp_path, "resized")
    assert [(each["before"], each["after"], each["steps_redone"]) for each in found] == [(3, 1, 2), (1, 2, 0)]
    assert found[0]["cause"].startswith("its process died") and found[1]["cause"] == "there is room for 2 workers"
    assert all(0 <= each["seconds"] < 5 for each in found)


POISON = raised(RuntimeError("CUDA error: device-side assert triggered"))


def fail(known: Attempts, error: BaseException, step: int) -> None:
    another(known, 1, reports={1: Failed(1, step, "step.py:88")})
    known.ended(error)


def test_three_equal_failures_from_within_end_the_run(tmp_path: Path) -> None:
    known, _ = begin(tmp_path, limit=-1)
    fail(known, POISON, 17)
    fail(known, of_rank(DEAD), 17)  # somebody else's kill, which neither counts nor helps
    fail(known, POISON, 18)  # another step
    fail(known, raised(ValueError("other")), 17)
    fail(known, POISON, 17)
    with pytest.raises(
        RepeatedError,
        match=r"step 17 has failed 3 times in the same way.*device-side assert.*raytune-fsdp step \S+ 17 --text",
    ) as ended:
        fail(known, POISON, 17)
    assert ended.value.exit_code == 3
    assert len(events(tmp_path, "attempt_failed")) == known.failures == 6


def test_a_commit_in_between_begins_the_count_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, _ = begin(tmp_path, limit=-1)
    for step in (4, 4, 8, 8):
        monkeypatch.setattr(attempts, "committed", lambda root: [SimpleNamespace(step=step)])  # noqa: B023
        fail(known, POISON, 17)
    with pytest.raises(RepeatedError):
        fail(known, POISON, 17)


def test_kills_from_outside_count_for_the_limit_only(tmp_path: Path) -> None:
    known, _ = begin(tmp_path, limit=-1)
    lost = raised(RuntimeError("[gloo] Connection closed by peer"))
    starting = ControllerError(WorkerGroupStartupFailedError("one failed"))
    for error in (of_rank(DEAD), lost, RayActorError(error_msg="died"), raised(TransientError("full")), starting) * 3:
        fail(known, error, 17)
    assert known.failures == 15


def test_what_fails_before_the_first_step_names_no_step_of_an_earlier_attempt(tmp_path: Path) -> None:
    known, _ = begin(tmp_path, limit=-1)
    known.reached(57)
    fail(known, POISON, 0)
    fail(known, POISON, 0)
    with pytest.raises(RepeatedError, match="^what comes before the first step has failed 3 times"):
        fail(known, POISON, 0)


def test_steps_that_an_earlier_attempt_has_trained_are_redone_whatever_came_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "committed", lambda root: [SimpleNamespace(step=6)])
    known, _ = begin(tmp_path)
    another(known, 0, 1, 2)
    known.reached(9)
    known.ended(of_rank(DEAD))
    fail(known, of_rank(DEAD), 0)  # while it starts
    another(known, 0)
    known.reached(7)
    (resized,) = events(tmp_path, "resized")
    assert resized["steps_redone"] == 2


def test_the_step_of_a_rank_that_was_killed_is_that_of_the_others(tmp_path: Path) -> None:
    """What the driver has heard last may be a step behind."""
    known, _ = begin(tmp_path, limit=-1)
    for heard in (10, 11, 10):
        another(known, 0, 1, memory="it had 2 GB", reports={0: Failed(0, 11, "step.py:88")})
        known.reached(heard)
        if len(known._same) == 2:
            with pytest.raises(RepeatedError, match="step 11 has failed 3 times"):
                known.ended(of_rank(DEAD))
        else:
            known.ended(of_rank(DEAD))


def test_a_hang_is_a_failure_from_within(tmp_path: Path) -> None:
    known, _ = begin(tmp_path, limit=-1)
    for number in range(3):
        another(known, 1, killed=Killed("no rank got on for 300 s", 1, hang=True))
        known.reached(5)
        if number == 2:
            with pytest.raises(RepeatedError, match="step 5 has failed 3 times"):
                known.ended(of_rank(DEAD))
        else:
            known.ended(of_rank(DEAD))


def test_the_next_attempt_waits_for_ranks_that_take_long_to_be_gone() -> None:
    """They would hold memory of the GPUs that it gets, and it would end the run for the lack of that."""
    left, said = [["a", "b"], ["a"], []], list[str]()
    nodes = SimpleNamespace(kill_watched=lambda ranks: None, end=lambda: None, wait=lambda *_: left.pop(0))
    last = RayAttempt(watch=Any, nodes=nodes, phases=Phases(), waiting=Any)  # type: ignore[arg-type]
    last.end_ranks(said.append, longer=lambda: True)
    assert not left and said == ["waiting for killed ranks to be gone on 2 nodes"]
    left.append(["a"])
    last.end_ranks(said.append, longer=lambda: False)
    assert not left and len(said) == 1, "on CPUs, or when the run is to stop"
