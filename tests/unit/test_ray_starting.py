"""What counts as getting on before the second step, who is waited for, and what a rank tells of itself. No Ray."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

from raytune_fsdp.base.beat import beat, computing, pulse
from raytune_fsdp.config.sections.cluster import ClusterConfig
from raytune_fsdp.launch.ray.board import Beat, Joined, Line, _Board
from raytune_fsdp.launch.ray.watch import beats
from raytune_fsdp.launch.ray.watch.beats import Beats
from raytune_fsdp.launch.ray.watch.ranks import Watch
from raytune_fsdp.launch.ray.watch.starting import Starting
from tests.clock import Clock
from tests.unit.test_ray_hangs import AtOnce

BYTES = 1 << 20


def of(world: int, *, minutes: float = 10.0) -> tuple[Starting, AtOnce]:
    clock = AtOnce()
    known = Starting(minutes, clock)
    for rank in range(world):
        known.joined(Joined(rank, f"node-{rank}", f"{rank}", 100 + rank))
    return known, clock


def told(rank: int = 0, **fields: object) -> Beat:
    fixed = {"step": 0, "beats": 7, "patience_seconds": 0.0, "phase": "model", "left": 3}
    return Beat(rank=rank, **(fixed | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "gets_on",
    [
        lambda n: told(1, beats=n),
        lambda n: told(1, read=n * BYTES),
        lambda n: told(1, left=60 - n, phase=f"phase {n}"),
    ],
    ids=["weights, downloads and compilations", "bytes", "phases"],
)
def test_a_start_may_take_hours_while_one_rank_gets_on(gets_on: Callable[[int], Beat]) -> None:
    """Now and then: every nine minutes. The other one waits for it."""
    known, clock = of(2)
    for number in range(1, 60):
        for _ in range(9 * 12):
            clock.now += 5.0
            known.heard(told(0))
            assert known.overdue() is None
        known.heard(gets_on(number))
    clock.now += 590.0
    assert known.overdue() is None
    clock.now += 15.0
    assert known.overdue() == 605.0


def test_what_waits_for_others_says_for_how_long() -> None:
    known, clock = of(2)
    known.heard(told(1, patience_seconds=1200.0))
    clock.now += 1790.0
    assert known.overdue() is None
    clock.now += 20.0
    assert known.overdue() is not None


def test_a_few_bytes_are_no_progress() -> None:
    """A process that waits reads some, too."""
    known, clock = of(1)
    for number in range(130):
        known.heard(told(read=number * 100))
        clock.now += 5.0
    assert known.overdue() == 650.0, "since its first word"


def test_a_late_word_of_the_attempt_before_counts_for_nothing() -> None:
    clock = AtOnce()
    known = Watch(ClusterConfig(start_hang_minutes=1.0), clock)
    for number in range(50):
        known.heard(told(0, step=57 + number, beats=99 + number))
    clock.now += 1000.0
    assert known.stuck(2) is None, "before a rank has joined nobody is judged"
    for number in range(2):
        known.joined(Joined(number, "node", "node", number))
    clock.now += 61.0
    known.heard(told(7, beats=99))
    found = known.stuck(2)
    assert found is not None and found.words == (
        "no rank got on for 61 s while starting, waiting for all ranks (imports; not heard of for 61 s)"
    )


def test_nobody_is_judged_before_the_first_rank_has_joined() -> None:
    known = Starting(10.0, AtOnce())
    known._clock.now = 1e6
    assert known.overdue() is None and known.word(2) is None


def test_who_is_waited_for() -> None:
    known, clock = of(5)
    for rank in range(5):
        known.heard(told(rank))
    assert known.waited_for(5) == "all ranks (model)" and known.suspect(5) is None
    assert known.waited_for(8) == "ranks 5-7, not there yet" and known.suspect(8) is None
    assert known.waited_for(6) == "rank 5, not there yet" and known.suspect(6) == 5
    for rank in (0, 1, 2, 4):
        known.heard(told(rank, phase="data", left=2))
    assert known.waited_for(5) == "rank 3 on node-3 (model)"
    known.heard(told(1))
    known.heard(told(4, phase="imports", left=4))
    known.heard(told(0, phase="imports", left=4))
    assert known.waited_for(5) == "ranks 0, 4 (imports)"
    clock.now += 16.0
    for rank in (0, 1, 2, 4):
        known.heard(told(rank, phase="step", left=1))
    assert known.waited_for(5) == "rank 3 on node-3 (model; not heard of for 16 s)" and known.suspect(5) == 3


def test_a_line_a_minute() -> None:
    known, clock = of(2)
    said = []
    for _ in range(300):
        clock.now += 1.0
        known.heard(told(0, beats=int(clock.now), phase="step", left=1))
        known.heard(told(1, beats=int(clock.now)))
        if (word := known.word(2)) is not None:
            said.append(word)
    assert len(said) == 5
    assert said[1] == "the ranks have been starting for 120 s: waiting for rank 1 on node-1 (model)"


def test_a_board_keeps_one_beat_of_each_rank() -> None:
    """However long nobody reads it. Beats do not wake the driver; everything else does."""

    async def scenario() -> None:
        board = _Board()
        for number in range(1000):
            await board.tell(0, told(number % 3, beats=number))
        before = time.monotonic()
        assert [(each.rank, each.beats) for each in await board.read(0.3)] == [(0, 999), (1, 997), (2, 998)]  # type: ignore[union-attr]
        assert time.monotonic() - before > 0.25
        reading = asyncio.create_task(board.read(30.0))
        await asyncio.sleep(0)
        await board.tell(0, told())
        await board.tell(0, Line("words"))
        assert await reading == [Line("words"), told()]
        await board.tell(0, told())
        await board.begin(1)
        assert await board.read(0) == []

    asyncio.run(scenario())


class Told:
    """In the place of the board."""

    def __init__(self) -> None:
        self.beats: list[Beat] = []

    def tell(self, notice: Beat) -> None:
        self.beats.append(notice)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(beats, "_LOOK_SECONDS", 0.0)
    step = pulse().step
    yield
    pulse().step = step


def rank(number: int = 1) -> tuple[Beats, Told]:
    board = Told()
    return Beats(board, number, 2), board  # type: ignore[arg-type]


def compute(_: int) -> None:
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass


_CASES = """
import subprocess, sys, time
import psutil
from raytune_fsdp.base.beat import computing
from raytune_fsdp.launch.ray.watch import beats

def compute(_):
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass

def wait_for(pid):
    process = psutil.Process(pid)
    until = process.cpu_times().user + 0.3
    while process.cpu_times().user < until:
        time.sleep(0.05)

beats._LOOK_SECONDS = 0.0
known = beats.Beats(None, 1, 2)

def gets_on(here, helper):
    start = [sys.executable, "-c", f"print(flush=True)\\n{helper}"]
    with subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        outside = known.now().beats
        compute(0)
        assert known.now().beats == outside, "no such call is running"
        with computing():
            outside = known.now().beats
            here(process.pid)
            inside = known.now().beats
        process.kill()
    return inside > outside

waits = lambda _: time.sleep(2.0)  # of which a twentieth is more than the clock of a process is off by
print(gets_on(compute, "input()"), gets_on(wait_for, "while True: pass"), gets_on(waits, "input()"))
"""


def test_a_call_that_cannot_beat_gets_on_as_long_as_it_computes() -> None:
    """A compiler does, also in processes of its own; what waits for a lock does not. In a process without other threads
    and helpers, because these compute now and then."""
    ran = subprocess.run([sys.executable, "-c", _CASES], capture_output=True, text=True, check=False)
    assert ran.stdout.split() == ["True", "True", "False"], ran.stderr


class EveryFiveSeconds(Clock):
    """The beats of a rank, without the wait between them. Processor time is that of this thread."""

    thread_time = staticmethod(time.thread_time)

    def monotonic(self) -> float:
        self.now += 5.0
        return self.now


def gets_on_while_it_waits(looks: int) -> bool:
    known, _ = rank(0)
    start, clock = of(1)
    start.heard(known.now())
    with computing():
        start.heard(known.now())
        for _ in range(looks):
            clock.now += 5.0
            start.heard(known.now())
    return start.got_on > 0.0


def test_a_compiler_that_hangs_is_found_however_many_processes_its_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at what its helpers compute reads of every process there is: that is no progress of the rank."""
    monkeypatch.setattr(beats, "time", EveryFiveSeconds())
    others = [subprocess.Popen(["sleep", "60"]) for _ in range(100)]
    try:
        assert not gets_on_while_it_waits(10)
    finally:
        for other in others:
            other.kill()
            other.wait()


def test_a_look_at_thousands_of_processes_is_no_computing_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    look = beats._processor_seconds
    monkeypatch.setattr(beats, "time", EveryFiveSeconds())
    monkeypatch.setattr(beats, "_processor_seconds", lambda: (compute(0), look())[1])
    assert not gets_on_while_it_waits(1)


def test_a_rank_says_what_it_reads_and_in_which_phase_it_is(at_once: None, tmp_path: Path) -> None:
    known, board = rank()
    (tmp_path / "weights").write_bytes(bytes(8 * BYTES))
    before = known.now()
    (tmp_path / "weights").read_bytes()
    after = known.now()
    assert 8 * BYTES <= after.read - before.read < 9 * BYTES
    phases = [after.phase]
    known.evaluates_first()
    for phase in ("workers", "imports", "data", "model", "evaluation", "step"):
        known.reached(phase)
        found = known.now()
        phases.append(found.phase)
    assert phases == ["imports", "imports", "model", "model", "evaluation", "step", "training"]
    assert found.left == 0
    told = [(each.phase, each.left) for each in board.beats]
    assert told == [("model", 4), ("model", 3), ("evaluation", 2), ("step", 1), ("training", 0)], "each at once"


def test_other_ranks_than_the_first_fall_silent_with_their_second_step(
    at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulse().step = 0
    known, board = rank()
    steps = iter([0, 7, 7, 8])
    monkeypatch.setattr(beats.time, "sleep", lambda seconds: beat(next(steps)))
    known._run()
    assert [each.step for each in board.beats] == [0, 0, 7, 7]
