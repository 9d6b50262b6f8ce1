"""A record that is broken is mended, and what was wrong is said, or it is refused. A long one takes no time."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from raytune_fsdp.base.errors import ResumeError, TrainingError
from raytune_fsdp.base.measured import Digest, StepMetrics
from raytune_fsdp.record.copies.following import Position, RecordReader, Sent
from raytune_fsdp.record.jsonl import JsonlTracker, read_evaluations, read_metrics
from raytune_fsdp.record.lines import WHOLE_STEP, read_line, step_of
from raytune_fsdp.record.repair import is_whole
from raytune_fsdp.record.tracker import Composite, RunStart, Tracker
from raytune_fsdp.run.checks import check_first
from tests.runs import make_config

FIXTURES = Path(__file__).parents[1] / "fixtures" / "aae7294" / "runs"
Lines = list[bytes]


def step(number: int, loss: float = 2.5) -> StepMetrics:
    return StepMetrics(
        step=number, epoch=number / 7, samples=f"{number:016x}", tokens=4096, target_tokens=1000, loss=loss,
        grad_norm=1e-7, lr=1e-4, skipped=False, step_seconds=0.5, data_seconds=0.01, tokens_per_second=8192.0,
        mfu=None, memory_bytes=2**30,
    )  # fmt: skip


def write(directory: Path) -> Lines:
    """A record of ten steps with three evaluations, the first of them before the first step."""
    tracker = JsonlTracker(directory)
    tracker.start(RunStart(name="run", attempt=1))
    tracker.evaluation(0, {"eval/x/loss": 9.0})
    tracker.steps([step(i) for i in range(1, 6)], world_size=2, attempt=1)
    tracker.evaluation(5, {"eval/x/loss": 3.0})
    digested = replace(step(7), digest=Digest(weights="a1" * 32, everything="b2" * 32), exact=True)
    tracker.steps([step(6, float("nan")), digested, *(step(i) for i in range(8, 11))], world_size=2, attempt=1)
    tracker.evaluation(10, {"eval/x/loss": float("inf"), "eval/ü {y}/loss": 1.0})
    tracker.finish("finished")
    return (directory / "metrics.jsonl").read_bytes().splitlines(keepends=True)


def resume(directory: Path, step: int) -> JsonlTracker:
    tracker = JsonlTracker(directory)
    tracker.start(RunStart(name="run", attempt=2, resumed_from=step))
    return tracker


def places(directory: Path) -> list[tuple[str, int]]:
    return [(line["kind"], step_of(line)) for line in read_metrics(directory / "metrics.jsonl")]


WHOLE = [
    ("eval", 0), *(("step", i) for i in range(1, 6)), ("eval", 5), *(("step", i) for i in range(6, 11)), ("eval", 10),
]  # fmt: skip
DEEP = b"[" * 100_000 + b"]" * 100_000 + b"\n"
# What is done to the lines, what is then left out or put in order again, and what is said of it. Line 0 is the
# evaluation before the first step, lines 1 to 5 are steps, line 6 is the evaluation after step 5.
BROKEN: dict[str, tuple[Callable[[Lines], Lines], set[tuple[str, int]], list[str]]] = {
    "an evaluation without values": (
        lambda lines: [*lines[:6], b'{"kind": "eval", "step": 5, "attempt": 1}\n', *lines[7:]],
        {("eval", 5)}, ["1 line was neither a step nor an evaluation, and left out"],
    ),
    "an evaluation whose values are a list": (
        lambda lines: [*lines[:6], b'{"kind": "eval", "step": 5, "values": [1], "attempt": 1}\n', *lines[7:]],
        {("eval", 5)}, ["1 line was neither a step nor an evaluation, and left out"],
    ),
    "a deep list": (
        lambda lines: [*lines[:3], DEEP, *lines[3:]], set(),
        ["1 line was neither a step nor an evaluation, and left out"],
    ),
    "lines of other kinds": (
        lambda lines: [b"null\n", b"3\n", b'"x"\n', b"\n", b"\xff\xfe\n", b'{"kind": "step", "trajectory": 3}\n',
                       b'{"kind": "step", "trajectory": {"step": true}}\n', *lines],
        set(), ["7 lines were neither a step nor an evaluation, and left out"],
    ),
    "a step that is no number, or none of ours": (
        lambda lines: [*lines[:2], lines[2].replace(b'"step": 2,', b'"step": "2",'),
                       lines[3].replace(b'"loss": 2.5', b'"loss": null'), *lines[4:]],
        {("step", 2), ("step", 3)},
        ["2 lines were neither a step nor an evaluation, and left out",
         "the lines of steps 2-3 are missing, and lost"],
    ),
    "a missing middle": (
        lambda lines: [*lines[:3], *lines[6:8], *lines[9:]], {("step", 3), ("step", 4), ("step", 5), ("step", 7)},
        ["the lines of steps 3-5, 7 are missing, and lost"],
    ),
    "lines twice": (
        lambda lines: [*lines[:7], *lines[4:7], *lines[7:]], set(),
        ["3 lines were there twice; one of each is kept", "lines were not in the order of their steps, and are now"],
    ),
    "another order": (
        lambda lines: [*lines[7:], *lines[:7]], set(), ["lines were not in the order of their steps, and are now"],
    ),
    "a torn end that a checkpoint relies on": (
        lambda lines: [*lines[:11], lines[11][:50]], {("step", 10), ("eval", 10)},
        ["the lines of step 10 are missing, and lost"],
    ),
    "zeros in the middle": (
        lambda lines: [*lines[:2], bytes(len(lines[2]) - 1) + b"\n", *lines[3:]], {("step", 2)},
        ["1 line was neither a step nor an evaluation, and left out", "the lines of step 2 are missing, and lost"],
    ),
    "nothing at all": (lambda lines: [], set(WHOLE), ["the lines of steps 1-10 are missing, and lost"]),
    "a line without an end": (
        lambda lines: [b"x" * (2**24 + 5), b' {"kind": "step"', *lines], {("eval", 0)},
        ["1 line was neither a step nor an evaluation, and left out"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_record_is_mended_from_what_can_be_trusted(tmp_path: Path, what: str) -> None:
    """The whole record, less what is lost; what was wrong is said, and the file kept as it was."""
    damage, lost, problems = BROKEN[what]
    broken = b"".join(damage(write(tmp_path)))
    (tmp_path / "metrics.jsonl").write_bytes(broken)
    assert not is_whole(tmp_path / "metrics.jsonl", 10)
    tracker = resume(tmp_path, 10)
    aside = tmp_path / "metrics.jsonl.a2.damaged"
    assert tracker.repaired == {"problems": problems, "kept": str(aside)}
    assert aside.read_bytes() == broken
    assert places(tmp_path) == [place for place in WHOLE if place not in lost]
    # Training goes on with a record.
    tracker.steps([step(11)], world_size=1, attempt=2)
    assert places(tmp_path)[-1] == ("step", 11)


@pytest.mark.parametrize(
    "harmless",
    [
        pytest.param(lambda lines: lines, id="nothing"),
        pytest.param(lambda lines: [*lines, lines[3][:40]], id="a torn end past the checkpoint"),
        pytest.param(lambda lines: [*lines, bytes(4096)], id="zeros past the checkpoint"),
        pytest.param(lambda lines: [*lines[:-1], lines[-1].rstrip(b"\n")], id="no end of the last line"),
        pytest.param(lambda lines: [line.replace(b"\n", b"\r\n") for line in lines], id="ends of lines of Windows"),
        pytest.param(lambda lines: [line.replace(b", ", b",") for line in lines], id="no spaces"),
        pytest.param(lambda lines: [re_time(line) for line in lines], id="without times, as older versions wrote it"),
    ],
)
def test_what_a_crash_or_an_editor_leaves_is_not_a_broken_record(
    tmp_path: Path, harmless: Callable[[Lines], Lines]
) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(harmless(write(tmp_path))))
    tracker = resume(tmp_path, 10)
    assert tracker.repaired == {} and places(tmp_path) == WHOLE
    tracker.evaluation(10, {"eval/x/loss": 0.5, "eval/z/loss": 0.5})
    assert read_evaluations(tmp_path / "metrics.jsonl", 10)[10]["eval/x/loss"] == float("inf"), "it was on record"
    assert read_evaluations(tmp_path / "metrics.jsonl", 10)[10]["eval/z/loss"] == 0.5
    assert {file.name for file in tmp_path.iterdir()} == {"metrics.jsonl", "events.jsonl"}, "no damaged one is kept"


def re_time(line: bytes) -> bytes:
    value = json.loads(line)
    value.pop("time")
    return json.dumps(value).encode() + b"\n"


def test_of_a_step_that_is_there_twice_the_last_line_counts(tmp_path: Path) -> None:
    """It was trained again, and what was trained last is in the weights."""
    lines = write(tmp_path)
    again = lines[5].replace(b'"attempt": 1', b'"attempt": 2')
    (tmp_path / "metrics.jsonl").write_bytes(b"".join([*lines, again]))
    resume(tmp_path, 10)
    found = [line["attempt"] for line in read_metrics(tmp_path / "metrics.jsonl") if line["kind"] == "step"]
    assert found == [1, 1, 1, 1, 2, 1, 1, 1, 1, 1]


def test_a_broken_record_past_the_checkpoint_is_simply_cut(tmp_path: Path) -> None:
    lines = write(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(b"".join([*lines[:8], DEEP, *lines[9:]]))
    assert resume(tmp_path, 5).repaired == {}
    assert places(tmp_path) == WHOLE[:7]


def test_what_cannot_be_a_record_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(ResumeError, match="metrics.jsonl is not a regular file"):
        resume(tmp_path, 5)
    config = make_config(tmp_path)
    for file in ("metrics.jsonl", "events.jsonl"):
        pipe = tmp_path / "runs" / "run" / file
        pipe.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(pipe)
        with pytest.raises(ResumeError, match=f"{file} is not a regular file"):
            check_first(config, 1)  # before anything is read or started
        pipe.unlink()


def test_a_record_is_never_lost_silently(tmp_path: Path) -> None:
    """Whatever keeps the record from being written stops training, though a tracker beside it may fail as it likes."""

    class Broken(Tracker):
        def start(self, run: RunStart) -> None:
            raise KeyError("values")

    beside = Composite([Broken()], record=JsonlTracker(tmp_path))
    beside.start(RunStart(name="run", attempt=1))
    beside.finish("finished")
    said = "the record of the run cannot be kept, so training stops: KeyError: 'values'. The same command continues"
    with pytest.raises(TrainingError, match=said) as raised:
        Composite([JsonlTracker(tmp_path)], record=Broken()).start(RunStart(name="run", attempt=1))
    assert isinstance(raised.value.__cause__, KeyError)


def test_lines_are_recognised_without_parsing_them(tmp_path: Path) -> None:
    """Ours and those of older versions: otherwise a long record takes a minute."""
    ours = [line for line in write(tmp_path) if line.startswith(b'{"kind": "step"')]
    older = [line for path in FIXTURES.glob("*/metrics.jsonl") for line in path.read_bytes().splitlines(keepends=True)]
    assert len(older) >= 12
    for line in ours + [line for line in older if line.startswith(b'{"kind": "step"')]:
        found, parsed = WHOLE_STEP.fullmatch(line), read_line(line)
        assert found and parsed and int(found[1]) == parsed["trajectory"]["step"]
    draw = random.Random(0)
    for line in ours * 300:  # a byte of garbage anywhere in the trajectory, or one that ends the line
        place = draw.randrange(line.index(b"}"))
        for byte in (b"\0", b"}", b"\n", b"\xff"):
            assert not WHOLE_STEP.fullmatch(line[:place] + byte + line[place + 1 :])


def long_record(path: Path, steps: int) -> None:
    """A record as it is written, with an evaluation every thousand steps."""
    tracker = JsonlTracker(path.parent)
    tracker.start(RunStart(name="run", attempt=1))
    tracker.steps([step(1_234_567)], world_size=16, attempt=1)
    tracker.finish("finished")
    line = path.read_bytes().replace(b"1234567", b"%d")
    evaluation = b'{"kind": "eval", "step": %d, "values": {"eval/x/loss": 2.5}, "attempt": 1}\n'
    with path.open("wb") as file:
        for first in range(1, steps + 1, 1000):
            file.write(b"".join(line % number for number in range(first, first + 1000)))
            file.write(evaluation % (first + 999))


@pytest.mark.parametrize("steps", [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_a_record_of_a_million_steps_is_resumed_in_seconds(tmp_path: Path, steps: int) -> None:
    """Of processor time, a million: 4.6 s, evaluations 0.8 s. When every line was parsed: 16 s and 29 s."""
    path = tmp_path / "metrics.jsonl"
    long_record(path, steps)
    before = time.process_time()
    tracker = resume(tmp_path, steps - 500)
    taken = time.process_time() - before
    before = time.process_time()
    assert len(read_evaluations(path, steps - 500)) == steps // 1000 - 1
    evaluations = time.process_time() - before
    assert tracker.repaired == {}
    reader = RecordReader(path)
    before = time.process_time()
    reader.seek(Position(steps - 1000, 1))
    after = [next(reader.lines(10**9))[0] for _ in range(2)]
    assert after == [Position(steps - 1000, 2), Position(steps - 999, 1)]
    sought = time.process_time() - before
    print(f"{steps:,} lines: resumed in {taken:.1f} s, evaluations in {evaluations:.1f} s, cursor in {sought:.3f} s")
    assert taken < steps / 1e5 and evaluations < steps / 2e5 and sought < 0.1


def test_a_cursor_finds_its_place_wherever_it_is(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = write(tmp_path)
    every = []
    reader = RecordReader(path)
    for place, line in reader.lines(100):
        every.append((place, step_of(line), line["kind"]))
    assert [(step, kind) for _, step, kind in every] == [(step, kind) for kind, step in WHOLE]
    assert [place for place, *_ in every][:3] == [Position(0, 1), Position(1, 1), Position(2, 1)]
    for index, (place, *_) in enumerate(every):
        again = RecordReader(path)
        again.seek(place)
        assert [found for found, _ in again.lines(100)] == [found for found, *_ in every[index + 1 :]]
    # It stops at the last step it may read, and before a line that is still being written.
    reader.seek(Position())
    assert [step_of(line) for _, line in reader.lines(5)] == [0, 1, 2, 3, 4, 5, 5]
    path.write_bytes(b"".join([*lines[:8], b"\xff\n", lines[8][:30]]))
    growing = RecordReader(path)
    assert len(list(growing.lines(100))) == 8 and list(growing.lines(100)) == []
    with path.open("ab") as file:
        file.write(lines[8][30:])
    assert [place for place, _ in growing.lines(100)] == [Position(7, 1)]


def test_a_cursor_waits_for_a_record_that_is_not_there_yet(tmp_path: Path) -> None:
    reader = RecordReader(tmp_path / "metrics.jsonl")
    reader.seek(Position(3, 1))
    assert list(reader.lines(100)) == []
    write(tmp_path)
    assert [step_of(line) for _, line in reader.lines(4)] == [4]


def test_a_cursor_as_text_is_read_back_or_is_none() -> None:
    sent = Sent(Position(350, 1), 400)
    assert Sent.from_text(sent.to_text()) == sent
    for text in (None, "", "3", "[]", "{}", "[" * 100_000, '{"step": 1, "lines": "x", "highest": 1}'):
        assert Sent.from_text(text) is None
