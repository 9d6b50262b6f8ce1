"""`checkpoint` and `average` of what has no such checkpoints, and of a run that nobody trains."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from raytune_fsdp.checkpoint.storage import MANIFEST_FILE
from raytune_fsdp.cli.main import main
from tests.recorded import Recorded

HOLDER = """
import sys, time
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch.run_lock import locked
config = FinetuneConfig.model_validate({
    "run": {"name": sys.argv[2], "storage": sys.argv[1]}, "model": {"path": "x"}, "data": {"train": [{"path": "y"}]},
    "train": {"global_batch": 1, "max_steps": 1},
})
with locked(config):
    print("held", flush=True)
    time.sleep(60)
"""


def recorded(storage: Path, name: str = "run", *, steps: int = 60) -> Recorded:
    """A run of 100 steps that was stopped, or is finished."""
    run = Recorded(storage, name)
    run.attempt()
    run.train(steps)
    run.save()
    run.end("finished" if steps == 100 else "interrupted")
    return run


@contextmanager
def held(run: Recorded) -> Iterator[None]:
    """A process that has the run's lock, and is killed."""
    command = [sys.executable, "-c", HOLDER, str(run.path.parent), run.path.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        yield
        holder.kill()


def with_checkpoints(directory: Path, *steps: int) -> None:
    """Checkpoints by their names, with a manifest that says nothing."""
    for step in steps:
        place = directory / "checkpoints" / f"step-{step:08d}.a1"
        place.mkdir(parents=True)
        (place / MANIFEST_FILE).write_text("{}")


@pytest.mark.parametrize("what", ["checkpoint list", "checkpoint verify", "checkpoint now", "stop"])
def test_a_directory_that_is_no_run_is_refused(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # where there may be runs, they are named
    with_checkpoints(recorded(tmp_path, steps=100).path, 100)
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    for wrong, why in (
        (tmp_path, "is not a run: it has no plan.json; the runs in .* are run"),
        (tmp_path / "run" / "checkpoints", "is not a run: .*; give a run directory"),
        (tmp_path / "rum", "no such directory; .* are run; nearest: run"),
        (tmp_path / "file", "is not a directory"),
    ):
        assert main([*what.split(), str(wrong)]) == 2, wrong
        out, err = capsys.readouterr()
        assert out == "" and re.fullmatch(f"error: {re.escape(str(wrong))}: {why}.*\n", err), err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("what", ["list", "verify"])
def test_a_run_without_checkpoints_says_so(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded(tmp_path).path
    assert main(["checkpoint", what, str(run)]) == 0
    assert capsys.readouterr().out == f"{run} has no checkpoint in {run / 'checkpoints'}\n"


def test_the_place_of_checkpoints_that_are_elsewhere_is_listed_as_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`<checkpoint.storage>/<run.name>` has checkpoints and no plan."""
    with_checkpoints(tmp_path / "elsewhere" / "run", 40, 60)
    assert main(["checkpoint", "list", str(tmp_path / "elsewhere" / "run")]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["40", "60"]


def test_a_mean_of_more_checkpoints_than_there_are_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recorded(tmp_path).path
    with_checkpoints(run, 40, 60)
    assert main(["average", str(run), str(tmp_path / "mean"), "--last", "50"]) == 2
    assert capsys.readouterr().err == (
        f"error: --last 50: {run} has only 2 checkpoints, from step 40 to step 60: use --last 2\n"
    )
    # Both are taken, with this number or with none: that they are damaged is found after that.
    for last in (["--last", "2"], []):
        assert main(["average", str(run), str(tmp_path / "mean"), *last]) == 2
        assert "step-00000040.a1 is damaged" in capsys.readouterr().err
    assert not (tmp_path / "mean").exists()


@pytest.mark.slow
def test_a_checkpoint_of_a_run_that_nobody_trains_is_refused_within_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only one that beats is waited for, however long its step takes."""
    runs = {name: recorded(tmp_path, name) for name in ("stopped", "killed", "lost", "trained")}
    runs["finished"] = recorded(tmp_path, "finished", steps=100)
    with held(runs["killed"]), held(runs["lost"]):
        pass
    lock = runs["lost"].place.lock  # as a machine leaves it that is no more: nothing here tells of its processes
    lock.write_text(json.dumps({**json.loads(lock.read_text()), "boot": "other", "namespace": "pid:[1]"}))

    def ask(name: str) -> float:
        began = time.monotonic()
        assert main(["checkpoint", "now", str(runs[name].path), "--wait", "6"]) == 1
        return time.monotonic() - began

    with held(runs["trained"]), ThreadPoolExecutor() as threads:
        before = sorted(tmp_path.rglob("*"))
        seconds = dict(zip(runs, threads.map(ask, runs), strict=True))
        assert sorted(tmp_path.rglob("*")) == before, "no request is left"
    assert seconds.pop("trained") >= 6 and max(seconds.values()) < 5
    err = capsys.readouterr().err.splitlines()
    for name in ("finished", "stopped", "killed"):
        assert main(["stop", str(runs[name].path)]) == 1
        assert capsys.readouterr().err.splitlines() == [line for line in err if f"{tmp_path}/{name}" in line]
    lines = {name: line for line in err for name in runs if f"{tmp_path}/{name}" in line}
    at = "at step 60 of 100"
    silent = rf"process \d+ on .*, which works on {{}}, gives no sign of life, {at}: .*the same command continues it"
    for name, why in {
        "finished": "{} is finished, at step 100 of 100: it makes no more checkpoints",
        "stopped": f"no command works on {{}}, which is {at}: the command that trained it continues it",
        "killed": silent,
        "lost": silent,
        "trained": r"{} does not answer: is it training\? \(--wait 6\)",
    }.items():
        assert re.search(why.format(re.escape(str(runs[name].path))), lines[name]), lines[name]
        assert lines[name].endswith("; nothing was changed")
