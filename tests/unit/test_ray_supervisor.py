"""What the driver makes of what ranks report. No Ray is started."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorUnavailableError, RayActorError

from raytune_fsdp.base import lease
from raytune_fsdp.base.errors import Interrupted, TrainingError
from raytune_fsdp.launch.phases import Phases
from raytune_fsdp.launch.ray import attempt, supervisor
from raytune_fsdp.launch.ray.attempt import Killed, RayAttempt
from raytune_fsdp.launch.ray.attempts import Attempts
from raytune_fsdp.launch.ray.board import Beat, BoardStream, Joined, Line, Notice, PhaseFinished
from raytune_fsdp.launch.ray.nodes.sizes import Demand, Sizes
from raytune_fsdp.launch.ray.resources import Request
from raytune_fsdp.launch.ray.supervisor import AttemptSupervisor
from raytune_fsdp.launch.signals import Signals
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record import names
from raytune_fsdp.record.console import ConsoleTracker
from raytune_fsdp.record.jsonl import read_events
from raytune_fsdp.record.screen_messages import Looks, read_message
from raytune_fsdp.record.tracker import RunStart
from tests.recorded import step
from tests.runs import make_config

ASKED = Request(workers=1, per_worker={"CPU": 1.0}, accelerator_type=None, placement="pack", device="cpu")


class Silent:
    """In the place of what asks Ray."""

    def __init__(self, *_: object, **__: object) -> None:
        self.read_raises: BaseException | None = None
        self.notices: list[Notice] = []

    def read(self, seconds: float) -> list[Notice]:
        if self.read_raises is not None:
            raise self.read_raises
        found, self.notices = self.notices, []
        return found

    def look(self) -> None:
        pass

    def state(self) -> str:
        return "CREATED"

    def stop(self, reason: object) -> None:
        pass

    def end(self) -> None:
        pass

    def make_room(self) -> None:
        pass

    def clear(self) -> None:
        pass

    def close(self, seconds: float) -> list[Notice]:
        return []


GONE = "Ray's raylet process on this machine died (killed, out of memory, or crashed)"


def begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[AttemptSupervisor, RunDir, Silent, list[str]]:
    monkeypatch.setattr(supervisor, "Groups", Silent)
    sections = options.pop("sections", {})
    cluster = {"launch": "ray", "max_failures": 5} | options.pop("cluster", {})
    config = make_config(tmp_path, cluster=cluster, **sections)
    place = RunDir.of(config)
    place.path.mkdir(parents=True)
    if options.pop("held", False):
        monkeypatch.setitem(lease._held, place.lock, lease.Lease(place.lock, "ours"))
    board, said = Silent(), list[str]()
    attempts = Attempts(place, limit=5, step=0, say=said.append)
    session = SimpleNamespace(
        lost=options.pop("lost", lambda: None), answers=options.pop("answers", lambda: True), templates=None
    )
    known = AttemptSupervisor(
        config, place, attempts, Sizes(ASKED, [1]), [], demand=Demand(ASKED, []),
        board=board, session=session,  # type: ignore[arg-type]
        signals=options.pop("signals", Signals()), phases=Phases(), say=said.append,
    )  # fmt: skip
    return known, place, board, said


def test_a_process_of_our_own_ray_that_is_gone_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, place, board, _ = begin(tmp_path, monkeypatch, lost=lambda: GONE)
    board.read_raises = RayActorError(error_msg="The actor is unavailable")
    with pytest.raises(TrainingError) as ended:
        known.until(Future(), ASKED)
    assert str(ended.value) == (
        "the run failed: Ray's raylet process on this machine died (killed, out of memory, or crashed). No step was "
        "committed yet; the same command continues"
    )
    (failed,) = [line["fields"] for line in read_events(place.events)]
    assert failed["cause"] == GONE
    known.end()  # asks nobody: Ray would not answer


def test_while_the_head_is_away_nothing_is_asked_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each such call would come back when Ray ends this process. What the ranks say is heard, and it may come back."""
    answers = iter([False] * 3 + [True] * 9)
    looks, fit = list[float](), Future[None]()

    def look() -> dict[str, float | None]:
        looks.append(len(list(answers)))
        fit.set_result(None)
        return {}

    monkeypatch.setattr(supervisor, "draining", look)
    known, _, board, said = begin(tmp_path, monkeypatch, answers=lambda: next(answers, True))
    board.notices = [Joined(0, "a", "a", 7), Line("heard")]
    known.until(fit, ASKED)
    assert said == ["heard"] and looks == [8]


class Head:
    """One that is away, or dies when it is first asked for something: what asks it would wait for it."""

    def __init__(self) -> None:
        self.there = False

    def asked(self) -> None:
        assert self.there, "this would wait for the head"


@pytest.mark.parametrize("there", [False, True])
def test_a_stop_while_the_head_is_away_waits_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """The call would end with this process, a minute later. Where the head is there, all is given back."""
    head, asked = Head(), list[str]()
    known, _, board, _ = begin(tmp_path, monkeypatch, answers=lambda: head.there)

    def ask(what: str) -> Any:
        def call() -> None:
            head.asked()
            asked.append(what)

        return call

    monkeypatch.setattr(known._sizes.growing, "let_go", ask("growth"))
    monkeypatch.setattr(known.groups, "clear", ask("groups"))
    known._demand = SimpleNamespace(clear=ask("demand"))  # type: ignore[assignment]
    known._attempt.fit = Future()
    aborted: list[str] = []
    monkeypatch.setattr(supervisor, "_ABORT_SECONDS", 0.01)
    monkeypatch.setattr(attempt.ray, "kill", lambda actor: aborted.append("killed"))
    abort = SimpleNamespace(remote=lambda: aborted.append("asked"))
    known._attempt.controller = [SimpleNamespace(abort=abort)]
    head.there = there
    known.end()
    assert asked == (["growth", "demand", "groups"] if there else [])
    assert aborted == ["asked", "killed"], "the controller itself is there, and its ranks end with it"


@pytest.mark.parametrize("stops", [False, True])
def test_a_head_that_is_away_between_two_attempts_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    head, signals = Head(), Signals()
    looks = iter(range(10))

    def answers() -> bool:
        signals.count = int(stops and next(looks) > 2)
        head.there = not stops and next(looks) > 4
        return head.there

    known, *_ = begin(tmp_path, monkeypatch, answers=answers, signals=signals)
    monkeypatch.setattr(supervisor.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(known.groups, "clear", head.asked)
    monkeypatch.setattr(known._sizes, "next", lambda _: ASKED)
    known._attempts.number = 1
    if stops:
        with pytest.raises(Interrupted, match="stopped between two attempts"):
            known.next()
    else:
        assert known.next() is ASKED


def test_a_stop_is_heard_while_the_board_is_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signals = Signals()
    known, _, board, _ = begin(tmp_path, monkeypatch, signals=signals)
    signals.count = 2
    board.read_raises = ActorUnavailableError("no answer", None)
    with pytest.raises(Interrupted, match="without another checkpoint"):
        known.until(Future(), ASKED)


def test_the_loop_does_not_wait_for_the_storage_of_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object, **__: object) -> bytes:
        pytest.fail("on a mount that does not answer, this read never ends")

    monkeypatch.setattr(lease, "read_file", hang)
    signals = Signals()
    known, _, _, _ = begin(tmp_path, monkeypatch, signals=signals, held=True)
    signals.count = 2
    with pytest.raises(Interrupted, match="the same command continues"):
        known.until(Future(), ASKED)


def test_the_run_is_still_ours_when_the_wait_for_room_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, place, _, _ = begin(tmp_path, monkeypatch, held=True)

    def wait(_: object) -> Request:
        place.lock.write_text('{"token": "theirs"}')
        return ASKED

    monkeypatch.setattr(known._sizes, "next", wait)
    with pytest.raises(lease.TakenOverError):
        known.next()


def test_a_stop_before_the_first_step_ends_within_ten_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signals = Signals()
    known, _, _, said = begin(tmp_path, monkeypatch, signals=signals)
    signals.count = 1
    clock = iter(range(100))
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: float(next(clock)))
    with pytest.raises(Interrupted, match="the same command continues"):
        known.until(Future(), ASKED)
    assert next(clock) < 15, "the clock is read more than once a second"
    assert said[0].startswith("stopping: no step is being trained")


def test_that_there_was_no_room_is_on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a sweep knows that nothing is wrong with its trial."""
    monkeypatch.setattr(Silent, "state", lambda _: "PENDING")
    known, place, _, _ = begin(tmp_path, monkeypatch, cluster={"wait_minutes": 0.001})
    monkeypatch.setattr(supervisor, "nodes", list)
    known._attempt.waiting._next_word = 0.0
    known._attempt.waiting._since -= 60
    with pytest.raises(TrainingError, match="wait_minutes=0.001: .*free now: nothing"):
        known.until(Future(), ASKED)
    (event,) = read_events(place.events)
    assert event["event"] == names.NO_ROOM and "free now" in event["fields"]["missing"]


def test_workers_that_start_slowly_need_no_more_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their placement group is there: what they need is reserved."""
    known, place, _, _ = begin(tmp_path, monkeypatch, cluster={"wait_minutes": 0.001})
    monkeypatch.setattr(supervisor, "nodes", list)
    known._attempt.waiting._next_word = 0.0
    known._attempt.waiting._since -= 60
    with pytest.raises(TrainingError) as ended:
        known.until(Future(), ASKED)
    said = str(ended.value)
    assert said.startswith("cluster.wait_minutes=0.001: the workers did not start in that time; starting 1 worker")
    assert "processes start slowly" in said and "add nodes" not in said and said.endswith("the same command continues")
    assert not place.events.exists(), "there was room"


def test_a_wait_goes_on_in_the_next_attempt_if_no_worker_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything else of an attempt begins again with the next one."""
    known, *_ = begin(tmp_path, monkeypatch)
    first = known._attempt
    first.making_way_for, first.killed = "room", Killed("silent", None)
    known._begin()
    second = known._attempt
    assert second.waiting is first.waiting and second.phases is first.phases
    assert not second.making_way_for and second.killed is None and second.watch is not first.watch
    known._hear(Joined(0, "a", "a", 7))
    known._begin()
    assert known._attempt.waiting is not second.waiting and known._attempt.phases is not second.phases
    assert not known._attempt.ranks


@pytest.mark.parametrize("answers_after", [3, None])
def test_a_board_out_of_reach_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers_after: int | None
) -> None:
    """Its node may only be busy. Where it does not come back, the attempt has failed, and not the run."""
    known, _, board, _ = begin(tmp_path, monkeypatch)
    monkeypatch.setattr(supervisor, "_BOARD_SECONDS", 0.5)
    monkeypatch.setattr(supervisor.time, "sleep", lambda seconds: None)
    fit: Future[Any] = Future()
    calls = iter(range(10**9))

    def read(seconds: float) -> list[Notice]:
        if answers_after is None or next(calls) < answers_after:
            raise ActorUnavailableError("The actor is temporarily unavailable", None)
        if not fit.done():
            fit.set_result(None)
        return []

    board.read = read  # type: ignore[method-assign]
    known.until(fit, ASKED)
    killed = known._attempt.killed
    assert (killed is None) == (answers_after is not None)
    assert killed is None or killed[0] == "the message board between the driver and the ranks does not answer"


def test_a_late_word_of_the_last_attempt_is_no_resize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, place, _, _ = begin(tmp_path, monkeypatch)
    known._hear(Joined(0, "here", "node", 7))
    known._hear(Beat(step=5, beats=9, patience_seconds=0.0))
    known._begin()
    known._hear(Beat(step=6, beats=12, patience_seconds=0.0))
    known._hear(Joined(0, "here", "node", 8))
    known._hear(Beat(step=5, beats=3, patience_seconds=0.0))
    assert not [event for event in read_events(place.events) if event["event"] == "resized"]


def test_an_attempt_that_does_not_end_is_ended_also_where_no_rank_has_said_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, _, _, said = begin(tmp_path, monkeypatch)
    ended: list[str] = []
    monkeypatch.setattr(RayAttempt, "end_controller", lambda _: ended.append("controller"))
    known._attempt.controller = ["controller"]
    known._check_end(known._attempt, 61.0)
    assert known._attempt.killed == Killed("a rank has ended, and the attempt did not end in 60 s", None)
    assert ended == ["controller"] and "Ray Train's controller is ended" in said[-1]


def test_what_rank_0_tells_a_region_reaches_the_drivers_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines and messages, in order: whoever shows the driver's output draws the region (cli/screen.py)."""
    known, _, board, said = begin(tmp_path, monkeypatch)
    board.tell = board.notices.append  # type: ignore[attr-defined]
    stream: Any = BoardStream(board, Looks(live=True, colours=True))  # type: ignore[arg-type]
    tracker = ConsoleTracker(stream)
    tracker.start(RunStart(name="demo", attempt=1, total_steps=2))
    tracker.steps([step(1)], world_size=1, attempt=1)
    tracker.event("resized", before=4, after=3)
    for notice in board.notices:
        assert isinstance(notice, Line)
        known._hear(notice)
    first, told, resized = said
    assert first == "\x1b[1mdemo: attempt 1, from the beginning\x1b[0m" and "resized from 4 to 3 workers" in resized
    fields = read_message(told)
    assert fields is not None and fields["title"] == "demo  step 1/2" and fields["fields"][0] == "loss 2.5000"


def test_phases_before_the_first_step_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("RAYTUNE_FSDP_LIVE", "plain")
    known, *_ = begin(tmp_path, monkeypatch)
    for phase in ("start", "checks", "Ray"):
        known._attempt.phases.finished(phase)
    for notice in (PhaseFinished("workers"), PhaseFinished("step")):
        known._hear(notice)
    told = [read_message(line) or {} for line in capsys.readouterr().out.rstrip().split("\n")]
    told = [each for each in told if each]
    assert [each["done"] for each in told] == [0, 1, 2, 3, 4], "after the first step there is more to show"
    assert told[-1]["title"] == "starting" and told[-1]["total"] == 8
    assert told[-1]["fields"][4:] == ["imports", "model", "data", "first step"]
