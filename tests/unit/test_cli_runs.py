"""The list of runs: what each directory says of its run, and which are alive."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.cli.main import main
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch import run_lock
from raytune_fsdp.launch.run_lock import locked
from tests.recorded import Recorded, step


def listed(storage: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    assert main(["runs", str(storage), "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {each["name"]: each for each in found}


def of_every_kind(storage: Path) -> None:
    run = Recorded(storage, "finished")
    run.attempt()
    for number in (40, 60):
        run.train(number)
        run.evaluate(a=3.0 if number == 60 else 2.0, b=1.0)
        run.save()
    run.end("finished")
    run = Recorded(storage, "ended-early")
    run.attempt()
    run.train(30)
    run.save()
    run.end("finished")
    run = Recorded(storage, "failed")
    run.attempt()
    run.train(7)
    run.tracker.steps([], 4, 1)
    run.end("failed")
    run = Recorded(storage, "failed-and-goes-on")
    run.attempt()
    run.train(7)
    run.end("failed")
    run.attempt(resumed_from=5)
    run.train(1)
    run.end("interrupted")
    run = Recorded(storage, "killed-under-ray")
    run.attempt()
    run.tracker.event("attempt_failed", rank=1, cause="a crash")
    Recorded(storage, "preparing")
    (storage / "cache" / "windows").mkdir(parents=True)


def test_states_and_numbers_follow_from_the_directories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_every_kind(tmp_path)
    found = listed(tmp_path, capsys)
    assert {name: each["state"] for name, each in found.items()} == {
        "finished": "finished", "failed": "failed", "failed-and-goes-on": "interrupted", "killed-under-ray": "failed",
        "preparing": "interrupted", "ended-early": "finished",
    }  # fmt: skip
    done = found["finished"]
    assert (done["step"], done["steps"], done["loss"], done["world"]) == (100, 100, 0.5, 4)
    assert done["best_evaluation"] == {"loss": 1.5, "step": 40} and done["attempt"] == 1
    assert (found["failed-and-goes-on"]["step"], found["failed-and-goes-on"]["attempt"]) == (6, 2)
    assert found["preparing"]["loss"] is None and found["preparing"]["productive_share"] is None
    assert done["productive_share"] == pytest.approx(1.0, abs=0.01), "steps of two seconds that took none"


def test_the_table_has_a_line_for_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_every_kind(tmp_path)
    assert main(["runs", str(tmp_path)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "state", "step", "loss", "best", "eval", "workers", "age"] and len(lines) == 6
    done = next(line for line in lines if line.startswith("finished"))
    assert done.split()[:8] == ["finished", "finished", "100/100", "0.5000", "1.5000", "at", "40", "4"]
    assert all(len(line) <= 80 for line in lines)


def test_a_run_is_alive_while_its_lock_beats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.1)
    Recorded(tmp_path, "run")
    config = FinetuneConfig.model_validate(
        {
            "run": {"name": "run", "storage": str(tmp_path)},
            "model": {"path": "x"},
            "data": {"train": [{"path": "y"}]},
            "train": {"global_batch": 1, "max_steps": 1},
        }
    )
    with locked(config):
        assert listed(tmp_path, capsys)["run"]["state"] == "running"
        lock, beat = (tmp_path / "run" / name for name in ("lock", "lock.beat"))
        kept = lock.read_text(), beat.read_text()
    assert listed(tmp_path, capsys)["run"]["state"] == "interrupted"
    # As a machine that is lost leaves them: of another boot, and nobody beats. Its clock may say anything.
    lock.write_text(json.dumps({**json.loads(kept[0]), "boot": "other", "namespace": "pid:[1]"}))
    beat.write_text(kept[1])
    os.utime(beat, (time.time() + 9999, time.time() + 9999))
    assert listed(tmp_path, capsys)["run"]["state"] == "stale"


def test_a_command_that_was_killed_here_is_known_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Recorded(tmp_path, "run")
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    content = {"pid": int(gone.stdout), "namespace": run_lock._namespace(), "boot": run_lock._boot(), "token": "t"}
    run.place.lock.write_text(json.dumps(content))
    began = time.monotonic()
    assert listed(tmp_path, capsys)["run"]["state"] == "stale"
    assert time.monotonic() - began < run_lock.BEAT_SECONDS


def test_records_of_strangers_are_listed_as_far_as_they_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Recorded(tmp_path, "odd\x1b[2J")
    run.attempt()
    run.train(3)
    with run.place.metrics.open("ab") as file:
        file.write(b'not json\n{"kind": "eval"}\n{"kind": "step", "trajectory": {"step": 99\n' + b"x" * 300_000)
    run.place.plan.write_text("[" * 100_000)
    with run.place.events.open("ab") as file:
        file.write(b'{"time": "soon", "attempt": 1, "event": "saved", "fields": {"step": [1]}}\n')
    os.mkfifo(Recorded(tmp_path, "pipe").place.events)
    found = listed(tmp_path, capsys)
    odd = found["odd\x1b[2J"]
    assert (odd["step"], odd["steps"], odd["state"]) == (3, None, "interrupted") and "pipe" in found
    assert main(["runs", str(tmp_path)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_loss_that_is_no_number_is_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Recorded(tmp_path, "run")
    run.attempt()
    run.train(1)
    run.tracker.steps([step(2, loss=math.nan)], 4, 1)
    assert listed(tmp_path, capsys)["run"]["loss"] is None


def test_what_is_no_storage_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Recorded(tmp_path / "runs", "mine")
    for argument, code, words in (
        (tmp_path / "nothing", 2, "no such directory; give the run.storage"),
        (tmp_path / "runs" / "mine", 2, f"is a run itself; its storage is {tmp_path}/runs"),
        (tmp_path, 0, "has no runs"),
    ):
        assert main(["runs", str(argument)]) == code
        said = capsys.readouterr()
        assert words in said.out + said.err
