"""`raytune-fsdp train --dry-run` as a person runs it: what it prints, and that nothing is left of it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from raytune_fsdp.cli.main import main
from raytune_fsdp.run import loop
from tests.distributed.test_launch import end, environment, job, newest_child, run, start, wait_for, write_config
from tests.runs import make_config

TWO = {"launch": "local", "device": "cpu", "workers": 2}
LONG = {"global_batch": 2000, "micro_batch": 2, "max_steps": 6}
"""A step takes seconds."""


def tree(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Everything in a directory: of files when they were changed, and what is in them."""
    return {
        str(path.relative_to(directory)): (0, b"") if path.is_dir() else (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(directory.rglob("*"))
    }


def with_a_system(directory: Path) -> dict[str, str]:
    """The environment of a command whose system has its temporary directory in here."""
    (directory / "system").mkdir()
    return {**environment(), "TMPDIR": str(directory / "system")}


def with_a_run(directory: Path) -> None:
    """A directory of the run's name, which no one could go on from; a cache; and a database of MLflow."""
    for name, text in (
        ("run/plan.json", "{"), ("run/metrics.jsonl", "broken"), ("run/lock", "{}"),
        ("run/checkpoints/step-00000004.a1/manifest.json", "x"), ("cache/files/other", "y"), ("mlflow.db", "z"),
    ):  # fmt: skip
        file = directory / "runs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "torchrun"])
def test_two_steps_are_measured_and_nothing_is_left(tmp_path: Path, launcher: str) -> None:
    held_out = {"eval": {"fraction": 0.1}} if launcher == "local" else {}
    config = write_config(
        tmp_path, cluster=TWO, data={"train": [{"path": str(tmp_path / "tokens.jsonl"), "format": {"type": "tokens"}}],
        "seq_len": 48, "window": 32, **held_out}, train={"global_batch": 6, "micro_batch": 2, "max_steps": 600},
        tracking={"console": True, "mlflow": {"enabled": True}}, export={"at_end": True},
        eval={"prompts": ["w5 w6"], "at_start": True}, checkpoint={"every": 1}, optim={"warmup_steps": 50},
    )  # fmt: skip
    with_a_run(tmp_path)
    system = with_a_system(tmp_path)
    if launcher == "torchrun":
        system.pop("TMPDIR")  # torchrun leaves its own directory behind
    before = tree(tmp_path)
    command = job("--config", str(config), "--dry-run", "--json")
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *command[1:]]
    done = run(*command, cwd=tmp_path, env=system)
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path) == before
    found = json.loads(done.stdout)
    assert found["name"] == "run" and found["ranks"] == 2 and found["device"].startswith("cpu: ")
    assert 1e8 < found["memory_bytes_least"] <= found["memory_bytes"] < 1e10 and found["reserved_bytes"] is None
    assert found["predicted_bytes"] > 1e5, found["predicted_where"]
    assert found["steps"] == 600 and found["run_seconds"] == 600 * found["second_step_seconds"] > 0
    assert found["first_step_seconds"] != found["second_step_seconds"] and found["tokens_per_second"] > 0
    assert 0.5 < found["filled"] <= 1 and 0.5 < found["trained_on"] <= 1 and 0 < found["load_seconds"] < 240


@pytest.mark.slow
def test_in_words_of_a_run_in_epochs_in_storage_that_is_not_there(tmp_path: Path) -> None:
    config = write_config(
        tmp_path, cluster={**TWO, "workers": 1}, tracking={"console": True, "mlflow": {"enabled": False}},
        train={"global_batch": 4, "micro_batch": 2, "epochs": 3.0, "max_steps": None},
    )  # fmt: skip
    before = tree(tmp_path)
    done = run(*job("--config", str(config), "--dry-run"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path) == before
    assert "step 1/2 " in done.stdout and "step 2/2 " in done.stdout, "what happens is shown while it does"
    said = done.stdout.partition("run fits: 2 steps of a dry run on 1 rank, cpu: ")[2].splitlines()
    assert [line.split()[0] for line in said[1:]] == [
        "memory", "host", "predicted", "load", "steps", "speed", "data", "run", "nothing",
    ]  # fmt: skip
    from raytune_fsdp.config.load import load_config
    from raytune_fsdp.run.prepare import prepare

    counted = prepare(load_config(config, ["--run.name=counted"]), 1)[1].plan.steps
    about = int(said[-2].split("about ")[1].split()[0])
    assert abs(about - counted) <= 0.25 * counted, (about, counted)


def test_memory_that_runs_out_is_explained_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path)
    with_a_run(tmp_path)
    step = loop.train_step

    def second(*arguments: Any, **how: Any) -> Any:
        if arguments[3].step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return step(*arguments, **how)

    monkeypatch.setattr(loop, "train_step", second)
    before = tree(tmp_path)
    assert main(["train", "--config", str(config), "--dry-run", "--cluster.workers", "1"]) == 1
    said = capsys.readouterr()
    assert "error: rank 0 ran out of memory on cpu: " in said.err and "Cheapest change: " in said.err
    assert "error: this was a dry run: nothing is left of it" in said.err and "fits" not in said.out
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=pytest.mark.slow) for how in ("ctrl-c", "a rank", "the command")]
)
def test_nothing_is_left_of_one_that_is_stopped_or_killed(tmp_path: Path, how: str) -> None:
    config = write_config(tmp_path, cluster=TWO, train=LONG, tracking={"console": True, "mlflow": {"enabled": False}})
    with_a_run(tmp_path)
    system = with_a_system(tmp_path)
    before, storage = tree(tmp_path), tmp_path / "runs"
    process = start(*job("--config", str(config), "--dry-run"), env=system)
    begun = "dry-run-*/run/events.jsonl"
    wait_for(lambda: any("attempt_started" in each.read_text() for each in storage.glob(begun)), process)
    if how == "ctrl-c":
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    elif how == "a rank":
        os.kill(newest_child(process.pid), signal.SIGKILL)
    else:
        os.kill(process.pid, signal.SIGKILL)
    done = end(process)
    if how == "ctrl-c":
        assert done.returncode == 130 and "error: the dry run was stopped" in done.stderr, done.stderr
        assert "the same command continues" not in done.stdout + done.stderr
    elif how == "a rank":
        assert done.returncode == 1 and "was killed by SIGKILL" in done.stderr, done.stderr
    if how == "the command":
        deadline = time.monotonic() + 40
        while tree(tmp_path) != before and time.monotonic() < deadline:
            time.sleep(0.1)
    assert tree(tmp_path) == before


@pytest.mark.slow
def test_ranks_that_fail_leave_nothing_in_the_temporary_directory_of_the_system(tmp_path: Path) -> None:
    """Of an ordinary run: not what they write of their failure, either."""
    data = {**make_config(tmp_path).model_dump()["data"], "window": 8, "shuffle": "none"}
    config = write_config(
        tmp_path, cluster=TWO, data=data, train={"global_batch": 4, "micro_batch": 2, "max_steps": 20}
    )
    lines = (tmp_path / "tokens.jsonl").read_text().splitlines()
    (tmp_path / "tokens.jsonl").write_text("\n".join([*lines[:70], '{"ids": [1]}', *lines[70:]]) + "\n")
    system = with_a_system(tmp_path)
    done = run(*job("--config", str(config)), cwd=tmp_path, env=system)
    assert done.returncode == 1 and "tokens.jsonl:71: has no column" in done.stderr, done.stderr
    assert (tmp_path / "runs" / "run" / "metrics.jsonl").exists(), "ranks were there"
    assert not list((tmp_path / "system").iterdir())
