"""Evaluations beside training: they measure what the ranks would have, and nothing that happens to them is noticed."""

from __future__ import annotations

import resource
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from raytune_fsdp.record.jsonl import read_metrics, read_trajectory
from tests.ray.jobs import Command, Nodes, config_of, events
from tests.runs import trajectory, write_tokens

pytestmark = pytest.mark.slow


def test_what_becomes_of_a_task_is_not_noticed(tmp_path: Path) -> None:
    """Of six evaluations the first is killed, the second hangs, and the third gets no memory."""
    held_out = write_tokens(tmp_path / "held-out.jsonl", rows=8, seed=5)
    sections: dict[str, Any] = {
        "train": {"global_batch": 10, "micro_batch": 2, "max_steps": 60},
        "data": {"eval": [{"path": str(held_out), "format": {"type": "tokens"}}]},
        "checkpoint": {"every": 10, "keep_last": 10},
    }
    config = config_of(
        tmp_path,
        **sections,
        eval={"every": 10, "where": "task", "task_minutes": 0.6, "prompts": ["w5 w6"], "max_new_tokens": 4},
        cluster={"launch": "ray", "workers": 2, "device": "cpu", "max_failures": 0},
        tracking={"console": True, "mlflow": {"enabled": True}, "tensorboard": {"enabled": True}},
    )
    with Nodes(tmp_path, head_cpus=6) as nodes:
        run = Command(config, tmp_path, RAY_ADDRESS=nodes.address, RAY_AUTH_MODE="disabled")
        (run.faults / "pace").write_text("0.02")
        done = {psutil.Process(nodes.pid).pid}

        def task() -> psutil.Process:
            """The next one that measures."""
            while True:
                run.until(lambda: True)
                for process in psutil.process_iter():
                    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                        named = "".join(process.cmdline()[:1]).startswith("ray::_measure")
                        if named and process.pid not in done and str(tmp_path) in process.environ().get("FAULTS", ""):
                            done.add(process.pid)
                            return process

        task().kill()
        hung = task()
        hung.send_signal(signal.SIGSTOP)
        run.until(lambda: len(events(run.run_dir, "evaluation_failed")) == 2)
        resource.prlimit(task().pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))
        code, said = run.end(400)
        assert code == 0, said
        assert not hung.is_running() or hung.status() == psutil.STATUS_ZOMBIE

    whole = config_of(tmp_path, **sections, run={"name": "whole"}, eval={"every": 10})
    assert read_trajectory(run.run_dir / "metrics.jsonl") == trajectory(whole, 2)
    assert len(events(run.run_dir, "attempt_started")) == 1

    failed = [event["fields"] for event in events(run.run_dir, "evaluation_failed")]
    assert [fields["step"] for fields in failed] == [10, 20, 30], said
    died, late = "its process died (killed, out of memory, or crashed)", "it had not ended after 0.6 minutes"
    problems = [fields["problem"] for fields in failed]
    assert problems[:2] == [died, late]
    assert problems[2] in (died, late), "where its memory ends decides whether a process dies of it, or waits for ever"
    measured = read_metrics(run.run_dir / "evaluations.jsonl")
    assert [line["step"] for line in measured] == [40, 50, 60]
    by_ranks = {
        line["step"]: line["values"]
        for line in read_metrics(Path(whole.run.storage) / "whole" / "metrics.jsonl")
        if line["kind"] == "eval"
    }
    for line in measured:
        assert line["values"] == pytest.approx(by_ranks[line["step"]], rel=1e-6)
    assert [event["fields"]["step"] for event in events(run.run_dir, "answered")] == [40, 50, 60]
    assert "eval/held-out/loss" in said and f"{measured[-1]['values']['eval/held-out/loss']:.4f}" in said
    assert in_mlflow(config.run.storage, "eval/held-out/loss") == [
        (line["step"], line["values"]["eval/held-out/loss"]) for line in measured
    ]
    assert list((run.run_dir / "tensorboard").glob("events.*.a0001.0001")), "and in TensorBoard"


def in_mlflow(storage: str, key: str) -> list[tuple[int, float]]:
    from mlflow.tracking import MlflowClient

    from tests.ray.jobs import mlflow_runs

    ((run_id, status),) = mlflow_runs(Path(storage))
    assert status == "FINISHED"
    found = MlflowClient(f"sqlite:///{storage}/mlflow.db").get_metric_history(run_id, key)
    return sorted((point.step, point.value) for point in found)
