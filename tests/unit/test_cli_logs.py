"""The output of ranks, from the files that they leave in the run's directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raytune_fsdp.cli.main import main
from tests.recorded import Recorded
from tests.unit.test_cli_watch import alive

LOGS = [sys.executable, "-m", "raytune_fsdp.cli.main", "logs"]


def write(run: Recorded, attempt: int, rank: int, text: str) -> None:
    path = run.place.log(attempt, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def logged(tmp_path: Path) -> Recorded:
    run = Recorded(tmp_path)
    for attempt, ranks in ((1, 3), (2, 2), (10, 2)):
        for rank in range(ranks):
            write(run, attempt, rank, f"attempt {attempt} rank {rank}\nsecond\n")
    (run.place.logs(10) / "stacks").mkdir()
    return run


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        ([], ["rank 0 | attempt 10 rank 0", "rank 0 | second", "rank 1 | attempt 10 rank 1", "rank 1 | second"]),
        (["--rank", "1"], ["attempt 10 rank 1", "second"]),
        (["--rank", "2", "--attempt", "1"], ["attempt 1 rank 2", "second"]),
        (["--lines", "1"], ["rank 0 | second", "rank 1 | second"]),
    ],
)
def test_the_newest_attempt_or_the_one_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], lines: list[str]
) -> None:
    assert main(["logs", str(logged(tmp_path).path), *arguments]) == 0
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rank", "7"], "--rank 7: attempt 10 of run has logs of ranks 0, 1"),
        (["--rank", "3", "--attempt", "1"], "--rank 3: attempt 1 of run has logs of ranks 0 to 2"),
        (["--attempt", "3"], "--attempt 3: run has logs of attempts 1, 2, 10"),
        (["--lines", "-1"], "--lines -1: must be 0 or more"),
    ],
)
def test_what_is_not_there_is_named_with_what_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["logs", str(logged(tmp_path).path), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_run_without_logs_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Recorded(tmp_path)
    assert main(["logs", str(run.path)]) == 2
    assert "has no logs: only Ray keeps the output of ranks in files" in capsys.readouterr().err
    with alive(run):
        assert main(["logs", str(run.path)]) == 2
    assert "has no logs: its ranks have not started yet" in capsys.readouterr().err
    assert main(["logs", str(tmp_path / "other")]) == 2
    assert f"other: no such directory; the runs in {tmp_path} are run" in capsys.readouterr().err


def test_a_log_can_hold_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Recorded(tmp_path)
    write(run, 1, 0, "\x1b[2J\x1b[31mred\x1b[0m\n50%\r100%\nunfinished")
    run.place.log(1, 0).open("ab").write(b"\xff")
    os.mkfifo(run.place.log(1, 1))
    assert main(["logs", str(run.path), "--rank", "0"]) == 0
    assert capsys.readouterr().out == "\x1b[31mred\x1b[0m\x1b[0m\n100%\nunfinished\ufffd\n"
    assert main(["logs", str(run.path)]) == 2
    assert "rank-1.log cannot be read: it is a pipe" in capsys.readouterr().err


def test_it_follows_until_the_run_ends_also_into_the_next_attempt(tmp_path: Path) -> None:
    run = Recorded(tmp_path)
    with alive(run):
        process = subprocess.Popen(
            [*LOGS, str(run.path), "--follow"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        write(run, 1, 0, "first\nunfin")
        assert process.stdout.readline() == "rank 0 | first\n"
        write(run, 1, 0, "ished\n")
        assert process.stdout.readline() == "rank 0 | unfinished\n"
        write(run, 2, 1, "another attempt\n")
        assert process.stdout.readline() == "rank 1 | another attempt\n"
        write(run, 2, 1, "the last\n")
    rest, error = process.communicate(timeout=60)
    assert (process.returncode, rest, error) == (0, "rank 1 | the last\n", "")
