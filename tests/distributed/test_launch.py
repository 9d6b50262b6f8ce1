"""The program as a person runs it: one command, processes of its own or torchrun's, exit codes, what is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.cli.main import main
from raytune_fsdp.config.load import load_config
from raytune_fsdp.record.jsonl import read_evaluations, read_events, read_trajectory
from raytune_fsdp.record.names import with_perplexity
from tests.checkpoints import checkpoints
from tests.config_text import dump_config
from tests.mlflow_server import whole
from tests.runs import GPT2, make_config, trajectory

ROOT = Path(__file__).parents[2]
TRAIN = {"global_batch": 4, "micro_batch": 2, "max_steps": 6}


BARE = """
import sys

sys.modules.update(ray=None, mlflow=None, matplotlib=None)
"""

LEFT_AT_EXIT = """
import atexit, sys
from pathlib import Path

def look():
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        Path(__file__).with_name("left").touch()

atexit.register(look)
"""


def write_config(directory: Path, **sections: Any) -> Path:
    config = make_config(directory, GPT2, **{"train": TRAIN, "parallel": {"precision": "fp32"}, **sections})
    path = directory / "config.yaml"
    path.write_text(dump_config(config))
    return path


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def start(*command: str, **kwargs: Any) -> subprocess.Popen[str]:
    """A command in a session of its own, so that nothing it starts can outlive the test."""
    kwargs = {"env": environment(), **kwargs}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, **kwargs
    )


def end(process: subprocess.Popen[str], seconds: float = 240) -> subprocess.CompletedProcess[str]:
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def run(*command: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return end(start(*command, **kwargs))


def job(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "jobs" / "finetune.py"), *arguments]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_one_command_trains_exports_and_says_what_it_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """In this process, or in two that the job starts itself, with MLflow, a question, an export and a curve."""
    pytest.importorskip("mlflow")
    pytest.importorskip("matplotlib")
    config = write_config(
        tmp_path,
        cluster={"launch": "local", "device": "cpu", "workers": workers},
        tracking={"console": True, "mlflow": {"enabled": True}},
        eval={"prompts": ["w5 w6"], "at_start": True, "max_new_tokens": 4},
        export={"at_end": True, "dtype": "fp32"},
        data={"eval": [{"name": "seen", "path": str(tmp_path / "tokens.jsonl"), "format": {"type": "tokens"}}]},
    )
    monkeypatch.chdir(tmp_path)
    if workers == 1:
        assert main(["train", "--config", str(config)]) == 0
        said = capsys.readouterr().out
    else:
        done = run(*job("--config", str(config)))
        assert done.returncode == 0, done.stderr
        said = done.stdout
    run_dir = tmp_path / "runs" / "run"
    for expected in ("step 6/6", "w5 w6", "export ", "next:", "mlflow ui", "report      runs/run/report/index.html"):
        assert expected in said, said
    assert {path.name for path in run_dir.iterdir()} >= {
        "config.yaml", "plan.json", "metrics.jsonl", "events.jsonl", "checkpoints", "model", "export", "report",
    }  # fmt: skip
    assert (run_dir / "report" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "done: all 6 steps" in (run_dir / "report" / "index.html").read_text()
    assert "memory that a rank keeps from step to step" in (run_dir / "report" / "index.html").read_text()
    assert json.loads((run_dir / "plan.json").read_text())["steps"] == 6
    assert mlflow_runs(tmp_path) == [("run", "FINISHED", 6)]
    found = {event["event"]: event["fields"] for event in read_events(run_dir / "events.jsonl")}
    predicted, checked = found["predicted"], found["prediction_checked"]
    assert checked["kept_bytes"] == predicted["kept_bytes"] > 0 and checked["step"] == 6
    assert 0 < found["saved"]["bytes"] - predicted["checkpoint_bytes"] < 5e5, "what is in a checkpoint beside tensors"
    longer = ("--train.max_steps", "8", "--optim.schedule_steps", "8")
    assert main(["train", "--config", str(config), "--cluster.workers", "1", *longer]) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert [row["step"] for row in read_trajectory(run_dir / "metrics.jsonl")] == list(range(1, 9))
    assert mlflow_runs(tmp_path) == [("run", "FINISHED", 8)], "a continued run is the same MLflow run"
    answers = []
    for model in (run_dir, run_dir / "export"):
        assert main(["generate", str(model), "w5 w6"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != ""
    trained = with_perplexity(read_evaluations(run_dir / "metrics.jsonl", 8)[8])
    for model in (run_dir, run_dir / "export"):
        assert main(["eval", str(model), "--json", "--data.train.0.path", "not-there.jsonl"]) == 0
        assert json.loads(capsys.readouterr().out) == pytest.approx(trained, rel=1e-6), "as it was when it was trained"


def mlflow_runs(directory: Path) -> list[tuple[str, str, int]]:
    """Name, status and last step of every run in the default database."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{directory}/runs/mlflow.db")
    ids = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = whole(client.search_runs(ids))
    steps = [max(point.step for point in client.get_metric_history(r.info.run_id, "train/loss")) for r in runs]
    assert all(r.data.metrics["predicted/kept_error"] == 0 for r in runs)
    return [(r.info.run_name, r.info.status, step) for r, step in zip(runs, steps, strict=True)]


@pytest.mark.parametrize("launch", [pytest.param(launch, marks=pytest.mark.slow) for launch in ("local", "auto")])
def test_without_ray_and_the_extras(tmp_path: Path, launch: str) -> None:
    """No process can import Ray, MLflow or matplotlib: it fails as it does where they are not installed."""
    (tmp_path / "sitecustomize.py").write_text(BARE)
    config = write_config(
        tmp_path,
        cluster={"launch": launch, "device": "cpu", "workers": 2},
        tracking={"console": True, "mlflow": {"enabled": True}},
    )
    without = {**environment(), "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    assert subprocess.run([sys.executable, "-c", "import ray"], env=without, capture_output=True).returncode == 1
    done = run(*job("--config", str(config)), env=without)
    assert done.returncode == 0, done.stderr
    assert len(read_trajectory(tmp_path / "runs" / "run" / "metrics.jsonl")) == 6
    told = [line.strip() for line in done.stdout.splitlines() if "not installed" in line]
    assert told == [
        "not sent to MLflow: it is not installed: pip install 'raytune-fsdp[mlflow]'",
        "loss curve  none, matplotlib is not installed: pip install 'raytune-fsdp[plots]'",
    ]
    assert "mlflow" not in done.stderr and "mlflow ui" not in done.stdout
    refused = run(*job("--config", str(config), "--cluster.launch", "ray"), env=without)
    assert refused.returncode == 2 and "cluster.launch=ray, but Ray is not installed" in refused.stderr


@pytest.mark.parametrize(
    ("agents", "ranks", "dies"),
    [
        (1, 1, None),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 2, None), (1, 2, 1), (2, 2, 0), (2, 2, 1))),
    ],
)
def test_torchrun_gives_the_same_run(tmp_path: Path, agents: int, ranks: int, dies: int | None) -> None:
    """Also if a rank dies after a few steps, and torchrun starts all of them again: each of its agents counts by
    itself."""
    ours = make_config(tmp_path, GPT2, train=TRAIN, parallel={"precision": "fp32"})
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    torchrun = [
        sys.executable, "-m", "torch.distributed.run",
        "--nnodes", str(agents), "--nproc_per_node", str(ranks // agents),
        "--max-restarts", "1", "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}",
    ]  # fmt: skip
    cluster = {"launch": "local", "device": "cpu", "workers": ranks}
    config = write_config(tmp_path, cluster=cluster, checkpoint={"every": 2})
    (faults := tmp_path / "faults").mkdir()
    if dies is not None:
        (faults / f"forward-{dies}-4").touch()
    env = {**environment(), "FAULTS": str(faults), "PYTHONPATH": f"{ROOT / 'tests' / 'ray' / 'faults'}:{ROOT}"}
    theirs = [*torchrun, *job("--config", str(config), "--run.name", "torchrun")[1:]]
    for done in [end(each) for each in [start(*theirs, env=env) for _ in range(agents)]]:
        assert done.returncode == 0, done.stderr
    assert not list(faults.iterdir())
    assert read_trajectory(tmp_path / "runs" / "torchrun" / "metrics.jsonl") == trajectory(ours, ranks)


@pytest.mark.parametrize(
    ("workers", "kind"), [(1, signal.SIGTERM), pytest.param(2, signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_saves_and_exits_130(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: int, kind: signal.Signals
) -> None:
    """SIGTERM to the process that was started, as schedulers do; SIGINT to all, as a terminal does for Ctrl-C.

    A second start meanwhile is refused.
    """
    config = write_config(
        tmp_path, cluster={"device": "cpu", "workers": workers}, train={**TRAIN, "max_steps": 100_000}
    )
    (tmp_path / "sitecustomize.py").write_text(LEFT_AT_EXIT)
    process = start(*job("--config", str(config)), env={**environment(), "PYTHONPATH": f"{tmp_path}:{ROOT}"})
    metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size > 2000, process)
    assert main(["train", "--config", str(config)]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1, said
    assert f"another command works on {metrics.parent}: process {process.pid} on " in said
    if kind == signal.SIGINT:
        os.killpg(process.pid, kind)
    else:
        process.send_signal(kind)
    done = end(process)
    assert done.returncode == 130, done.stderr
    assert done.stderr.startswith("error: stopped"), done.stderr
    assert not (tmp_path / "left").exists(), "with threads of a process group an interpreter may end in an abort"
    newest = checkpoints(tmp_path / "runs" / "run")[-1]
    assert read_trajectory(metrics)[-1]["step"] == newest.step


def test_a_signal_before_training_exits_130_with_a_line_and_leaves_nothing(tmp_path: Path) -> None:
    config = write_config(tmp_path, cluster={"launch": "local", "device": "cpu", "workers": 1})
    process = start(*job("--config", str(config)))
    lock = tmp_path / "runs" / "run" / "lock"  # from here on it imports, and prepares
    wait_for(lambda: lock.exists() and handles(process.pid, signal.SIGTERM), process)
    process.send_signal(signal.SIGTERM)
    done = end(process, 120)
    assert done.returncode == 130, done.stderr
    assert done.stderr == "error: stopped by SIGTERM before training began; nothing is lost\n"
    assert not (tmp_path / "runs").exists()


def handles(pid: int, kind: signal.Signals) -> bool:
    caught = re.search(r"SigCgt:\s+(\w+)", Path(f"/proc/{pid}/status").read_text())
    assert caught is not None
    return bool(int(caught[1], 16) >> (kind - 1) & 1)


def wait_for(condition: Any, process: subprocess.Popen[str], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_rank_that_dies_takes_the_run_with_it_and_is_named(tmp_path: Path) -> None:
    config = write_config(
        tmp_path, cluster={"launch": "local", "device": "cpu", "workers": 2}, train={**TRAIN, "max_steps": 100_000}
    )
    process = start(*job("--config", str(config)))
    metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size > 2000, process)
    os.kill(newest_child(process.pid), signal.SIGKILL)
    done = end(process)
    assert done.returncode == 1, done.stderr
    assert "was killed by SIGKILL" in done.stderr.splitlines()[-1], done.stderr
    assert not [event for event in read_events(tmp_path / "runs" / "run" / "events.jsonl") if event["event"] == "saved"]


def newest_child(pid: int) -> int:
    import psutil

    children = [c for c in psutil.Process(pid).children(recursive=True) if "spawn_main" in " ".join(c.cmdline())]
    return max(child.pid for child in children)


@pytest.mark.slow
def test_a_bad_row_met_while_training_is_named_and_can_be_skipped(tmp_path: Path) -> None:
    """On two ranks: exit code 1, the row in one line, and the way out it names goes on from the checkpoint."""
    config = write_config(
        tmp_path,
        cluster={"launch": "local", "device": "cpu", "workers": 2},
        data={**make_config(tmp_path).model_dump()["data"], "window": 8, "shuffle": "none"},
        train={**TRAIN, "max_steps": 20},
        checkpoint={"every": 2},
    )
    lines = (tmp_path / "tokens.jsonl").read_text().splitlines()
    (tmp_path / "tokens.jsonl").write_text("\n".join([*lines[:70], '{"ids": [1]}', *lines[70:]]) + "\n")
    stopped = run(*job("--config", str(config)))
    assert stopped.returncode == 1, stopped.stderr
    (line,) = [line for line in stopped.stderr.splitlines() if line.startswith("error:")]
    assert "tokens.jsonl:71: has no column 'input_ids', it has 'ids'" in line and "data.bad_rows=skip" in line
    assert "Traceback" not in stopped.stderr
    reached = checkpoints(tmp_path / "runs" / "run")[-1].step
    assert 0 < reached < 20
    skipping = load_config(config, ["--data.bad_rows=skip"])
    assert len(trajectory(skipping, 2)) == 20
    events = read_events(tmp_path / "runs" / "run" / "events.jsonl")
    assert [e["fields"]["resumed_from"] for e in events if e["event"] == "attempt_started"] == [0, reached]
    (told,) = [e["fields"] for e in events if e["event"] == "rows_skipped"]
    assert told["reasons"] == {"missing_column": 1} and told["rows"][0]["where"].endswith("tokens.jsonl:71")
