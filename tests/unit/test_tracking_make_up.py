"""The same command again, also of a finished run, makes up for what MLflow missed and for a record that was broken."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytune_fsdp.api import FinetuneResult, finetune
from raytune_fsdp.run import record
from raytune_fsdp.rundir import RunDir
from raytune_fsdp.tracking import mlflow as tracking_mlflow
from raytune_fsdp.tracking.jsonl import append_event, read_events, read_trajectory
from raytune_fsdp.tracking.mlflow import mlflow_installed
from raytune_fsdp.tracking.mlflow_run import ENVIRONMENT
from raytune_fsdp.tracking.tracker import RunStart
from tests.runs import make_config
from tests.unit.fake_mlflow import FakeServer, Fault, on_record

pytestmark = [
    pytest.mark.skipif(not mlflow_installed(), reason="MLflow is not installed"),
    pytest.mark.thorough,
]


def test_the_same_command_sends_what_is_missing_and_mends_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeServer()
    outage: list[Fault] = ["away"]
    server.fault = lambda call: outage[0]
    seen: list[dict[str, str]] = []

    def connect(uri: str) -> FakeServer:
        seen.append({name: os.environ[name] for name in ENVIRONMENT})
        return server

    monkeypatch.setattr(tracking_mlflow, "connect", connect)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    variables = dict(os.environ)
    monkeypatch.setattr(record, "RANKS_WAIT_SECONDS", 0.2)
    monkeypatch.setattr(tracking_mlflow, "_LAST_PAUSES_SECONDS", 0.05)
    uri = "http://127.0.0.1:9"
    config = make_config(
        tmp_path, train={"max_steps": 6}, tracking={"console": False, "mlflow": {"enabled": True, "uri": uri}}
    )
    run_dir = tmp_path / "runs" / "run"
    shown: list[tuple[str, int, int]] = []

    def command(seconds: float) -> FinetuneResult:
        return finetune(config, lambda *how: shown.append(how), wait_for_tracking=seconds)

    first = command(0.7)
    assert dict(os.environ) == variables
    assert seen[0] == {**ENVIRONMENT, "MLFLOW_HTTP_REQUEST_TIMEOUT": "77"}, "what a user has set stays"
    assert first.trained == 6 and first.unsent is not None
    assert first.unsent.startswith(f"MLflow at {uri} has not answered") and "the same command sends" in first.unsent
    assert ("steps sent to MLflow", 0, 6) in shown
    last = read_events(run_dir / "events.jsonl")[-1]
    assert last["event"] == "not_sent_to_mlflow" and last["fields"]["because"].startswith(f"MLflow at {uri}")

    outage[0] = None
    second = command(30)
    assert (second.trained, second.unsent) == (0, None)
    ((run_id, run),) = server.runs.items()
    assert server.values(run_id) == on_record(run_dir / "metrics.jsonl") and run.info.status == "FINISHED"
    total = int(run.data.params["parameters.total"])
    assert total == int(run.data.params["parameters.trainable"]) > 1000

    lines = (run_dir / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_bytes(b"".join([lines[1], lines[0], b"[]\n", *lines[2:]]))
    assert command(30).unsent is None
    assert [row["step"] for row in read_trajectory(run_dir / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    (mended,) = (event for event in read_events(run_dir / "events.jsonl") if event["event"] == "record_repaired")
    assert len(mended["fields"]["problems"]) == 2 and Path(mended["fields"]["kept"]).exists()


@pytest.mark.parametrize(
    ("story", "asks"),
    [
        ("1 attempt_started", False),
        ("1 attempt_started, 1 attempt_failed, 2 attempt_started", False),
        ("1 attempt_started, 1 not_sent_to_mlflow", True),
        ("1 attempt_started, 1 attempt_failed, 2 ranks_joined", True),  # it died after its last step
    ],
)
def test_mlflow_is_asked_after_an_attempt_that_cannot_have_sent_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, story: str, asks: bool
) -> None:
    config = make_config(tmp_path, tracking={"mlflow": {"enabled": True, "uri": "http://127.0.0.1:9"}})
    place = RunDir.of(config)
    place.path.mkdir(parents=True)
    for each in story.split(", "):
        attempt, name = each.split()
        append_event(place.events, name, attempt=int(attempt), fields={})
    asked = SimpleNamespace(start=lambda start: None)
    monkeypatch.setattr(record, "mlflow_tracker", lambda *_, **__: asked)
    monkeypatch.setattr(record, "run_start", lambda *_: RunStart(name="run", attempt=1))
    prepared: Any = SimpleNamespace(place=place)
    before: Any = SimpleNamespace(complete=False, plan=SimpleNamespace(steps=6))
    found = record.make_up_tracking(config, prepared, before, 6, seconds=1, progress=None)
    assert (found is asked) == asks
