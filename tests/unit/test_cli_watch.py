"""A run followed by another process than its own: what is shown while its record grows, shrinks and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from raytune_fsdp.cli.main import main
from raytune_fsdp.launch import run_lock
from raytune_fsdp.record.lines import metrics_of, step_of
from raytune_fsdp.record.tail import EventFollower, RecordFollower
from tests.recorded import Recorded, step
from tests.terminal import on_terminal

WATCH = [sys.executable, "-m", "raytune_fsdp.cli.main", "watch"]


@contextmanager
def alive(run: Recorded) -> Iterator[None]:
    """A lock that beats as a command's does, of another machine."""
    run.place.lock.write_text('{"token": "theirs", "boot": "other"}')
    stop = threading.Event()

    def beat() -> None:
        count = 0
        while not stop.wait(0.2):
            count += 1
            run.place.beat.write_text(f"theirs {count}")

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        run.place.lock.unlink(missing_ok=True)


def test_every_line_is_read_once_also_of_an_attempt_that_goes_back(tmp_path: Path) -> None:
    run = Recorded(tmp_path)
    record, events = RecordFollower(run.place.metrics), EventFollower(run.place.events)
    assert list(record.lines()) == [] == list(events.events())
    run.attempt()
    run.train(7)
    seen = [(line["attempt"], step_of(line)) for line in record.lines()]
    with run.place.metrics.open("ab") as file:
        file.write(b'{"kind": "step", "trajec')  # is being written
    assert [*record.lines()] == []
    run.end("failed")
    run.attempt(resumed_from=3)
    run.train(6)  # more lines than there were before anybody looks
    run.evaluate(a=1.0)
    seen += [(line["attempt"], step_of(line)) for line in record.lines()]
    run.evaluate(b=2.0)  # of the same step
    assert seen == [*((1, each) for each in range(1, 8)), *((2, each) for each in range(4, 10)), (2, 9)]
    assert [each["event"] for each in events.events()] == ["attempt_started", "attempt_ended", "attempt_started"]
    assert [*record.lines()][0]["values"] == {"eval/b/loss": 2.0}


def test_the_evaluation_of_the_newest_step_is_read_where_the_file_is_opened_again(tmp_path: Path) -> None:
    """An open file of NFS may end after the step, and an attempt may end after its evaluation."""
    run = Recorded(tmp_path)
    record = RecordFollower(run.place.metrics)
    run.attempt()
    run.train(3)
    assert [step_of(line) for line in record.lines()] == [1, 2, 3]
    run.evaluate(a=1.0)
    record.reopen()
    assert [line["kind"] for line in record.lines()] == ["eval"]
    record.reopen()
    assert [*record.lines()] == []
    run.evaluate(b=1.0)
    assert [line["values"] for line in record.lines()] == [{"eval/b/loss": 1.0}]
    run.evaluate(c=1.0)
    run.end("failed")
    run.attempt(resumed_from=3)  # another file, with all of these lines
    run.train(1)
    assert [(line["attempt"], step_of(line)) for line in record.lines()] == [(1, 3), (2, 4)]


def test_what_was_before_is_left_out(tmp_path: Path) -> None:
    run = Recorded(tmp_path)
    run.attempt()
    run.train(50)
    record = RecordFollower(run.place.metrics, after=45)
    assert [step_of(line) for line in record.lines()] == [46, 47, 48, 49, 50]


def test_a_line_gives_the_step_back(tmp_path: Path) -> None:
    run = Recorded(tmp_path)
    run.attempt()
    run.tracker.steps([step(1, skipped=True, mfu=None)], 4, 1)
    (line,) = RecordFollower(run.place.metrics).lines()
    assert metrics_of(line) == step(1, skipped=True, mfu=None)
    assert metrics_of({"trajectory": line["trajectory"], "step_seconds": "x"}).step_seconds == 0.0


def watch(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["watch", str(run)])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        ("finished", 0, "run is finished: step 100 of 100, loss 0.5000"),
        ("failed", 1, "error: run has failed, at step 9 of 100; what its ranks said: raytune-fsdp logs"),
        ("interrupted", 130, "error: run was stopped, at step 9 of 100; the same command continues it"),
    ],
)
def test_a_run_that_has_ended_is_said_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: str, code: int, words: str
) -> None:
    run = Recorded(tmp_path)
    run.attempt()
    run.train(100 if status == "finished" else 9)
    if status == "finished":
        run.save()
    run.end(status)  # type: ignore[arg-type]
    found, out, err = watch(run.path, capsys)
    assert found == code and words in out + err
    assert len((out + err).splitlines()) == 1, "it is not played again"


def test_a_run_without_a_sign_of_life_is_not_watched_for_ever(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.1)
    run = Recorded(tmp_path)
    run.place.lock.write_text('{"token": "theirs", "boot": "other"}')
    code, _, err = watch(run.path, capsys)
    assert code == 1 and "run gives no sign of life, at step 0 of 100" in err


def test_a_growing_run_is_shown_to_its_end(tmp_path: Path) -> None:
    run = Recorded(tmp_path)
    run.attempt()
    run.train(20)
    run.save()
    with on_terminal([*WATCH, str(run.path)], columns=100) as session:
        with alive(run):
            session.shows("run  step 20/100")
            run.train(5)
            session.shows("run  step 25/100")
            run.evaluate(a=1.0)
            session.shows("eval  25/100  a/loss 1.0000")
            run.end("failed")
            run.attempt(resumed_from=20)
            run.train(2)
            session.shows("run  step 22/100")
            run.tracker.event("resized", before=4, after=3)
            session.shows("resized from 4 to 3 workers")
            run.train(78)
            run.save()
            run.end("finished")
            session.shows("saved step 100")
        assert session.end() == 0
    shown = session.screen.text
    assert shown.index("run: attempt 1") < shown.index("run: attempt 2, continues after step 20")
    assert shown.endswith("run is finished: step 100 of 100, loss 0.5000") and "left" not in shown


def test_ctrl_c_ends_the_watching_and_not_the_run(tmp_path: Path) -> None:
    run = Recorded(tmp_path)
    with alive(run), on_terminal([*WATCH, str(run.path)]) as session:
        session.shows("run  no step yet")
        run.attempt()
        run.train(3)
        session.shows("run  step 3/100")
        session.press(b"\x03")
        assert session.end() == 0
    assert session.screen.lines[-2:] == ["^C", "run goes on; this command has only watched it"]


def test_into_a_pipe_it_prints_lines(tmp_path: Path) -> None:
    run = Recorded(tmp_path)
    run.attempt()
    run.train(4)
    with alive(run):
        process = subprocess.Popen([*WATCH, str(run.path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(6)]
        process.send_signal(signal.SIGINT)
        rest, error = process.communicate(timeout=30)
    assert lines[0] == "run: attempt 1, from the beginning\n" and lines[5].startswith("step   4/100  loss   2.5000")
    assert rest == "run goes on; this command has only watched it\n" and error == ""


def test_what_is_no_run_is_named_with_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # `runs` in the directory of a user has runs
    storage = tmp_path / "runs"
    for name in ("alpha", "beta"):
        Recorded(storage, name)
    (storage / "cache").mkdir()
    (tmp_path / "file").touch()
    for path, words in (
        (storage / "alpa", f"{storage}/alpa: no such directory; the runs in {storage} are alpha, beta; nearest: alpha"),
        (storage / "cache", f"is not a run: it has no plan.json; the runs in {storage} are alpha, beta"),
        (storage, f"is not a run: it has no plan.json; the runs in {storage} are alpha, beta"),
        (tmp_path / "file", "is not a directory; the runs in runs are alpha, beta"),
    ):
        code, _, err = watch(path, capsys)
        assert code == 2 and words in err, err


def test_a_record_that_is_a_pipe_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Recorded(tmp_path)
    os.mkfifo(run.place.metrics)
    os.mkfifo(run.place.events)
    with alive(run):
        code, _, err = watch(run.path, capsys)
    assert code == 2 and "is a pipe, not a regular file" in err
