"""MLflow there, away, slow and back again. Training must not notice."""

from __future__ import annotations

import logging
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.rundir import mlflow_database
from raytune_fsdp.tracking import RunStart
from raytune_fsdp.tracking.jsonl import JsonlTracker, read_trajectory
from raytune_fsdp.tracking.mlflow import RUN_ID, MlflowTracker, mlflow_installed
from raytune_fsdp.tracking.outbox import Outbox, Parcel
from raytune_fsdp.tracking.tracker import Composite
from raytune_fsdp.types import StepMetrics

pytestmark = [
    pytest.mark.skipif(not mlflow_installed(), reason="MLflow is not installed"),
    pytest.mark.thorough,
]

DEAD = "http://user:hunter2@127.0.0.1:9"


def step(number: int, loss: float = 2.5) -> StepMetrics:
    return StepMetrics(
        step=number, epoch=0.1, samples="0" * 16, tokens=4096, target_tokens=1000, loss=loss, grad_norm=1.25, lr=1e-4,
        skipped=False, step_seconds=2.0, data_seconds=0.01, tokens_per_second=12345.0, mfu=None, memory_bytes=2**30,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing may land in the current directory."""
    current = tmp_path / "current"
    current.mkdir()
    monkeypatch.chdir(current)
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_DISABLE_TELEMETRY"):
        # Set and then deleted, so that what the tracker sets is undone as well.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    assert list(current.iterdir()) == []


def run(attempt: int, state: dict[str, str] | None = None, **changes: Any) -> RunStart:
    params = {f"section.key{i}": i for i in range(150)} | {"long": "x" * 9000, "hub.token": "my-own", "odd (key)": None}
    given = {"params": params, "plan": {"steps": 10, "uri": DEAD}, "config": "run: {name: demo}\n", **changes}
    return RunStart(name="demo", attempt=attempt, resumed_from=(attempt - 1) * 2, state=state or {}, **given)


def test_one_run_through_resumes_on_sqlite(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    uri, artifacts = mlflow_database(tmp_path / "the storage")
    first = MlflowTracker(uri, experiment="e", artifact_root=artifacts, state_timeout_seconds=120)
    with caplog.at_level(logging.INFO):
        first.start(run(1))
        first.steps([step(i, loss=1 / i) for i in range(1, 300)] + [step(300, math.nan)], world_size=2, attempt=1)
        first.evaluation(2, {"eval/my chat (v2)/loss": 1.5})
        first.event("saved", step=2, api_key="my-own")
        state = first.state()
        first.finish("interrupted")
    assert [r.name for r in caplog.records if r.name.startswith(("alembic", "mlflow.store"))] == []

    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    found = client.get_run(state[RUN_ID])
    assert found.info.status == "KILLED" and found.info.run_name == "demo"
    assert len(found.data.params) == 153 and len(found.data.params["long"]) == 6000
    assert found.data.params["hub.token"] == "<redacted>" and found.data.params["odd _key_"] == "None"
    assert "my-own" not in str(found.data.tags) and found.data.tags["raytune_fsdp.attempt"] == "1"
    history = sorted(client.get_metric_history(state[RUN_ID], "train/loss"), key=lambda metric: metric.step)
    assert [m.value for m in history[:-1]] == [1 / i for i in range(1, 300)] and math.isnan(history[-1].value)
    assert history[1].timestamp - history[0].timestamp == 2000
    assert found.data.metrics["eval/my chat _v2_/loss"] == 1.5 and found.data.metrics["perf/memory_bytes"] == 2**30
    names = {"train/grad_norm", "train/lr", "train/epoch", "perf/tokens_per_second", "perf/step_seconds"}
    assert names | {"perf/data_seconds"} <= found.data.metrics.keys() and "perf/mfu" not in found.data.metrics
    assert {file.path for file in client.list_artifacts(state[RUN_ID])} == {"config.yaml", "plan.json"}
    plan = next((tmp_path / "the storage/mlartifacts").rglob("plan.json")).read_text()
    assert "hunter2" not in plan and '"steps": 10' in plan

    second = MlflowTracker(uri, experiment="e")
    second.start(run(2, state, params={"section.key0": "changed", "added": 1}))
    second.steps([step(301, 0.25)], world_size=4, attempt=2)
    assert second.state() == state
    second.finish("finished")
    again = client.get_run(state[RUN_ID])
    assert again.info.status == "FINISHED" and again.data.metrics["train/loss"] == 0.25
    assert again.data.params["added"] == "1" and again.data.params["section.key0"] == "0"

    caplog.clear()
    client.delete_run(state[RUN_ID])
    third = MlflowTracker(uri, experiment="e", id_file=tmp_path / "run/mlflow_run_id")
    third.start(run(3, state))
    new = third.state()
    third.finish("failed")
    assert new.keys() == {RUN_ID} and new != state and client.get_run(new[RUN_ID]).info.status == "FAILED"
    assert sum("metrics go to a new one" in r.message for r in caplog.records) == 1

    # A crash before the first checkpoint: no state, but the run directory remembers.
    fourth = MlflowTracker(uri, experiment="e", id_file=tmp_path / "run/mlflow_run_id")
    fourth.start(run(1))
    assert fourth.state() == new
    fourth.finish("finished")


def test_a_server_that_is_away_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mlflow = MlflowTracker(DEAD, experiment="e", queue_batches=20, state_timeout_seconds=1, finish_timeout_seconds=4)
    tracker = Composite([JsonlTracker(tmp_path / "run"), mlflow])
    tracker.start(run(1, {RUN_ID: "of-the-checkpoint"}))
    slowest = 0.0
    for number in range(1, 41):
        before = time.perf_counter()
        mlflow.steps([step(number)], world_size=1, attempt=1)
        slowest = max(slowest, time.perf_counter() - before)
        tracker.steps([step(number + 40)], world_size=1, attempt=1)
    assert slowest < 0.05
    before = time.perf_counter()
    assert [tracker.state() for _ in range(50)] == [{RUN_ID: "of-the-checkpoint"}] * 50
    assert time.perf_counter() - before < 2
    before = time.perf_counter()
    tracker.finish("finished")
    assert time.perf_counter() - before < 4.5
    assert len(read_trajectory(tmp_path / "run/metrics.jsonl")) == 40
    assert "20 batches left at the end, 60 dropped" in caplog.text and "hunter2" not in caplog.text


def test_a_server_that_never_answers_costs_no_more_than_the_deadlines() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        tracker = MlflowTracker(uri, experiment="e", state_timeout_seconds=0.5, finish_timeout_seconds=1)
        before = time.perf_counter()
        tracker.start(run(1))
        for number in range(1, 1001):
            tracker.steps([step(number)], world_size=1, attempt=1)
            tracker.state() if number % 100 == 0 else None
        assert time.perf_counter() - before < 2
        before = time.perf_counter()
        tracker.finish("finished")
        assert time.perf_counter() - before < 1.5


def test_mlflow_is_not_imported_before_it_is_used() -> None:
    code = "import sys, raytune_fsdp.tracking.mlflow, raytune_fsdp.tracking.console, raytune_fsdp.report.curves\n"
    code += "assert not {'mlflow', 'torch', 'ray', 'matplotlib'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


class FakeClient:
    """A server that fails when told to."""

    def __init__(self) -> None:
        self.fails: Exception | None = None
        self.steps: list[int] = []
        self.status = ""

    def log_batch(self, run_id: str, metrics: Any = (), **rest: Any) -> None:
        if self.fails is not None:
            raise self.fails
        self.steps += sorted({metric.step for metric in metrics})

    def set_terminated(self, run_id: str, status: str) -> None:
        self.status = status


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    fake = FakeClient()
    monkeypatch.setattr(MlflowTracker, "_open", lambda self: fake)
    return fake


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_a_server_that_comes_back_gets_what_it_missed(client: FakeClient) -> None:
    tracker = MlflowTracker("fake", experiment="e")
    client.fails = ConnectionError("away")
    tracker.start(run(1))
    for number in range(1, 51):
        tracker.steps([step(number)], world_size=1, attempt=1)
    time.sleep(0.2)
    client.fails = None
    tracker.finish("finished")
    assert client.steps == list(range(1, 51)) and client.status == "FINISHED"


def test_a_refused_batch_does_not_hold_up_the_others(client: FakeClient, caplog: pytest.LogCaptureFixture) -> None:
    from mlflow.exceptions import MlflowException

    tracker = MlflowTracker("fake", experiment="e")
    client.fails = MlflowException.invalid_parameter_value("no such name")
    tracker.start(run(1))
    tracker.steps([step(1)], world_size=1, attempt=1)
    wait_for(lambda: tracker._outbox.dropped == 1)
    client.fails = None
    tracker.steps([step(2)], world_size=1, attempt=1)
    tracker.finish("failed")
    assert client.steps == [2] and client.status == "FAILED"
    assert "0 batches left at the end, 1 dropped" in caplog.text


def test_the_settings_of_the_user_win(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    tracker = MlflowTracker("fake", experiment="e")
    tracker.start(run(1))
    tracker.finish("finished")
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77" and os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "1"


def test_outbox_drops_the_oldest_and_keeps_the_order() -> None:
    outbox = Outbox(capacity=3)
    parcels = [Parcel(points=(("x", float(i), 0, i),) * 400) for i in range(6)]
    for parcel in parcels[:4]:
        outbox.put(parcel)
    assert outbox.take(1000, 100) == parcels[1:3] and (outbox.left, outbox.dropped) == (3, 1)
    outbox.put(parcels[4])
    outbox.give_back()
    assert outbox.take(1000, 100) == parcels[2:4] and outbox.dropped == 2
    outbox.delivered()
    assert outbox.take(1, 1) == parcels[4:5]
    outbox.delivered()
    outbox.close()
    outbox.put(parcels[5])
    assert outbox.take(1000, 100) == [] and outbox.left == 0
