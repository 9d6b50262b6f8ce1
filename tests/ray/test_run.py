"""A run through Ray Train: whatever happens to it, its trajectory is the one of an undisturbed run without Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from raytune_fsdp.cli.main import main
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch.notices import STOP_SECONDS
from raytune_fsdp.record.goodput import read_goodput
from raytune_fsdp.record.jsonl import read_evaluations, read_trajectory
from tests.checkpoints import checkpoints
from tests.ray.jobs import TEMPORARY, TRAIN, Command, config_of, events, is_there, mlflow_runs
from tests.runs import trajectory

SNAPSHOT = "checkpoint_manager_snapshot.json"
TWICE = """
import ray
from raytune_fsdp.config import ClusterConfig
from raytune_fsdp.launch.ray import session
for _ in range(2):
    own = session.connect(ClusterConfig(), 1, None)
    assert ray.get(ray.remote(lambda: 3).options(num_cpus=0).remote()) == 3
    own.close()
"""
LONG = {**TRAIN, "max_steps": None, "epochs": 20.3}
"""It must not be over before what is done to it."""


def command_line(process: psutil.Process) -> str:
    with suppress(psutil.Error):  # it may end by itself meanwhile
        return "".join(process.cmdline())
    return ""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "dying", [("forward-1-15",), pytest.param(("forward-1-15", "save-0-12"), marks=pytest.mark.slow)]
)
def test_killed_in_forward_and_in_save_and_the_driver_too(tmp_path: Path, dying: tuple[str, ...]) -> None:
    """A rank dies in the middle of a forward pass of step 6, then another while it writes the checkpoint of step 12."""
    whole = trajectory(config_of(tmp_path, run={"name": "whole"}, train=LONG), 2)
    config = disturbed(tmp_path)
    began = time.time()
    first = Command(config, tmp_path)
    for fault in dying:
        (first.faults / fault).touch()
    (first.faults / "pace").write_text("0.1")  # a save that is due while one is written waits: not step 12's
    run_dir = first.run_dir
    first.until(lambda: first.steps() >= 14)
    (first.faults / "pace").unlink()
    # Then the driver is killed, and what Ray Train has written down is torn.
    assert not list(first.faults.iterdir())
    processes = first.all()
    workers = [each for each in processes if "Train" in command_line(each)]  # its ranks and its controller
    assert workers
    first.process.kill()
    _, said = first.end()
    failed = [line["fields"] for line in events(run_dir, "attempt_failed")]
    assert [each["rank"] for each in failed] == [1, 0][: len(dying)]
    reached = [each["last_step"] for each in failed]
    assert reached[0] in (0, 4) and reached[-1] in (0, 4, 8), "the save of steps 4 and 8 may have been in flight"
    assert all("its process died" in each["cause"] and each["node"] for each in failed)
    assert "rank 1 on" in said and "the logs of all ranks are in" in said
    assert (f"The last committed step is {reached[-1]}" if reached[-1] else "No step was committed yet") in said
    assert [line["fields"]["resumed_from"] for line in events(run_dir, "attempt_started")] == [0, *reached]
    _, left = psutil.wait_procs(workers, timeout=60)  # until then Ray Train may still write its list
    assert not [each for each in left if is_there(each)]
    snapshot = run_dir / SNAPSHOT
    snapshot.write_bytes(snapshot.read_bytes()[:100])
    second = Command(config, tmp_path)
    code, said = second.end(400)
    assert code == 0, said
    assert read_trajectory(run_dir / "metrics.jsonl") == whole
    assert events(run_dir, "prediction_checked")[-1]["fields"]["kept_error"] == 0
    assert events(run_dir, "registry_repaired")
    check_time(run_dir, failures=len(dying), seconds=time.time() - began)
    assert [status for _, status in mlflow_runs(run_dir.parent)] == ["FINISHED"]
    latest = json.loads(snapshot.read_text())["latest_checkpoint_result"]["checkpoint_dir_name"]
    assert latest == f"checkpoints/{checkpoints(run_dir)[-1].name}"
    for attempt in range(1, 3 + len(dying)):
        assert (run_dir / "logs" / f"attempt-{attempt}" / "rank-1.log").exists()
    assert not list(TEMPORARY.glob("raytune-ray-*"))
    left = [each for each in processes if is_there(each)]
    if len(dying) > 1:  # Ray's agents look for the driver that was killed for up to 80 seconds
        _, left = psutil.wait_procs(left, timeout=100)
        assert not [each for each in left if is_there(each)]
    for each in left:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    assert not list(run_dir.glob(".shared-*")) and not list((run_dir / "checkpoints").glob("*.tmp"))


def check_time(run_dir: Path, *, failures: int, seconds: float) -> None:
    """Of a run with so many failures, and a driver that was killed: every second is of one phase, or of the pause."""
    found = read_goodput(run_dir)
    assert found is not None, events(run_dir, "attempt_started")
    said = found.attempts
    assert found.failures in (failures, failures + 1), "the ranks may outlive the driver, and say that they failed"
    assert found.steps == len(read_trajectory(run_dir / "metrics.jsonl")), said
    assert [each.begins_command for each in said] == [True, *[False] * failures, True], said
    for each in said[:failures]:
        assert all(each.seconds[phase] > 0 for phase in ("start", "load", "productive", "detect")), said
        assert each.seconds["detect"] < 30 and each.seconds["stop"] < 30, said
    assert 0.6 * seconds < found.seconds + found.pauses < seconds and 0 < found.pauses < found.seconds, said
    assert 0 < found.share < 1 and found.steps_again <= sum(each.steps_lost for each in said), said
    known = [line["fields"] for line in events(run_dir, "attempt_failed")]
    assert all(each["seconds"] > (each["stop_seconds"] or 0) and "phases" not in each for each in known), known
    print(found.in_words(), *said, sep="\n", flush=True)


@pytest.mark.slow
def test_a_signal_or_a_request_saves_and_the_same_command_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = trajectory(config_of(tmp_path, run={"name": "whole"}, train=LONG), 2)
    config = disturbed(tmp_path)
    first = Command(config, tmp_path)
    run_dir = first.run_dir
    first.until(lambda: first.steps() >= 14)
    first.process.send_signal(signal.SIGTERM)
    code, said = first.end()
    assert code == 130, said
    stopped = checkpoints(run_dir)[-1].step
    assert stopped >= 14 and read_trajectory(run_dir / "metrics.jsonl")[-1]["step"] == stopped
    second = Command(config, tmp_path)
    second.until(lambda: second.steps() > stopped)
    assert main(["stop", str(run_dir)]) == 0
    code, said = second.end()
    assert code == 130, said
    again = checkpoints(run_dir)[-1].step
    assert again > stopped and f" has stopped, at step {again} of " in capsys.readouterr().out
    code, said = Command(config, tmp_path).end()
    assert code == 0, said
    assert read_trajectory(run_dir / "metrics.jsonl") == whole
    assert [line["fields"]["resumed_from"] for line in events(run_dir, "attempt_started")] == [0, stopped, again]
    assert len({line["attempt"] for line in events(run_dir, "attempt_started")}) == 3, "no attempt between"
    assert [status for _, status in mlflow_runs(run_dir.parent)] == ["FINISHED"]


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["ray", pytest.param("local", marks=pytest.mark.slow)])
def test_a_rank_that_dies_in_the_last_evaluation(tmp_path: Path, launch: str) -> None:
    """All steps are committed by then: ranks start for the evaluation alone, under Ray within the same command."""
    sections = {"train": {**TRAIN, "max_steps": 8}, "eval": {"prompts": ["w5 w6"], "max_new_tokens": 3}}
    config = config_of(tmp_path, **sections)
    values = {**config.model_dump(), "data": {**config.data.model_dump(), "eval": config.data.model_dump()["train"]}}
    whole = values | {"run": {**values["run"], "name": "whole"}}
    expected = trajectory(FinetuneConfig.model_validate(whole), 2)
    cluster = {"launch": launch, "workers": 2, "device": "cpu", "max_failures": 2}
    notice = {STOP_SECONDS: "0"}
    first = Command(FinetuneConfig.model_validate(values | {"cluster": cluster}), tmp_path, **notice)
    (first.faults / "at-evaluation-1").touch()
    code, said = first.end()
    if launch == "local":
        assert code == 1 and "the same command continues" in said, said
        code, said = Command(FinetuneConfig.model_validate(values | {"cluster": cluster}), tmp_path).end()
    assert code == 0, said
    run_dir, other = first.run_dir, first.run_dir.with_name("whole")
    assert [line["fields"]["resumed_from"] for line in events(run_dir, "attempt_started")] == [0, 8]
    assert read_trajectory(run_dir / "metrics.jsonl") == expected
    assert read_evaluations(run_dir / "metrics.jsonl", 8) == read_evaluations(other / "metrics.jsonl", 8) != {}
    answers = [[line["fields"]["answer"] for line in events(place, "answered")] for place in (run_dir, other)]
    assert answers[0] == answers[1] and len(answers[0]) == 1
    # Which rank 0 cannot know: the command tells it.
    assert [line["fields"]["notices"] for line in events(run_dir, "notice_short")] == [{"scheduler": 0.0}]


def disturbed(directory: Path) -> FinetuneConfig:
    """A run on two workers with MLflow, which goes on after two failures."""
    return config_of(
        directory,
        train=LONG,
        data={"cache": {"path": str(directory / "other")}},  # so that the census is taken on the cluster
        cluster={"launch": "ray", "workers": 2, "device": "cpu", "max_failures": 2},
        tracking={"console": True, "mlflow": {"enabled": True}},
    )


@pytest.mark.slow
def test_what_ends_a_run_at_once(tmp_path: Path) -> None:
    """A row that nobody had read before, and a signal before training: no attempt follows, and nothing is left."""
    config = config_of(
        tmp_path,
        train={**TRAIN, "max_steps": 200},
        data={"train": [{"path": str(tmp_path / "broken.jsonl"), "format": {"type": "tokens"}}], "shuffle": "none"},
        cluster={"launch": "ray", "workers": 2, "device": "cpu", "max_failures": 3},
    )
    lines = (tmp_path / "tokens.jsonl").read_text().splitlines()
    (tmp_path / "broken.jsonl").write_text("\n".join([*lines[:100], '{"input_ids": "none"}', *lines[100:]]))
    early = Command(config, tmp_path, "--run.name", "early")
    early.until(lambda: bool(list(TEMPORARY.glob("raytune-ray-*"))))  # Ray is being started
    early.process.send_signal(signal.SIGTERM)
    code, said = early.end(60)
    assert code == 130 and "before training began" in said, said
    assert not early.run_dir.with_name("early").exists()
    broken = Command(config, tmp_path)
    code, said = broken.end()
    assert code == 1, said
    assert "broken.jsonl:101" in said and "data.bad_rows=skip" in said, said
    (failed,) = events(broken.run_dir, "attempt_failed")
    assert "broken.jsonl:101" in failed["fields"]["cause"]
    assert len(events(broken.run_dir, "attempt_started")) == 1
    assert not list(TEMPORARY.glob("raytune-ray-*"))


@pytest.mark.slow
def test_ranks_that_cannot_be_brought_together_at_first(tmp_path: Path) -> None:
    """Ray Train gives up on an error while it makes the process group, and forgets the resources of ranks that die."""
    cluster = {"launch": "ray", "workers": 2, "device": "cpu", "max_failures": 2}
    config = config_of(tmp_path, train={**TRAIN, "max_steps": 4}, cluster=cluster)
    command = Command(config, tmp_path)
    (command.faults / "join-raise-1").touch()
    (command.faults / "join-kill-1").touch()
    code, said = command.end()
    assert code == 0, said
    assert not list(command.faults.iterdir())
    causes = [line["fields"]["cause"] for line in events(command.run_dir, "attempt_failed")]
    assert len(causes) == 2, causes
    assert any("while the ranks were starting" in each for each in causes), causes
    assert any("no route to host" in each for each in causes), causes
    assert len(read_trajectory(command.run_dir / "metrics.jsonl")) == 4


@pytest.mark.slow
def test_a_ray_of_our_own_that_dies_is_one_line_and_the_same_command_continues(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        train={**TRAIN, "max_steps": 100_000},
        cluster={"launch": "ray", "workers": 1, "device": "cpu"},
        tracking={"console": True, "mlflow": {"enabled": False}},
    )
    reached = 0
    for name in ("raylet", "gcs_server"):
        command = Command(config, tmp_path)
        command.until(lambda: command.steps() >= reached + 6, 400)  # noqa: B023
        process = next(each for each in command.all() if each.name() == name)
        processes = command.all()
        process.kill()
        killed = time.monotonic()
        code, said = command.end(90)
        assert code == 1, said
        assert time.monotonic() - killed < 60, said
        (error,) = [line for line in said.splitlines() if line.startswith("error: ")]
        assert error.startswith(f"error: the run failed: Ray's {name} process on this machine died (killed"), said
        # Ranks commit steps of milliseconds for as long as they do not know that their Ray is gone.
        step = int(error.partition(". The last committed step is ")[2].partition(";")[0])
        assert 0 < step <= checkpoints(command.run_dir)[-1].step
        assert error.endswith("; the same command continues")
        assert len(events(command.run_dir, "attempt_failed")) == (1 if name == "raylet" else 2)
        assert not list(TEMPORARY.glob("raytune-ray-*"))
        _, left = psutil.wait_procs([each for each in processes if is_there(each)], timeout=100)
        assert not [each for each in left if is_there(each)]
        reached = checkpoints(command.run_dir)[-1].step


@pytest.mark.slow
def test_one_process_starts_a_ray_of_its_own_twice() -> None:
    """As a notebook does with two runs. Each has a token of its own, and Ray keeps the first that it has read."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run([sys.executable, "-c", TWICE], env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
