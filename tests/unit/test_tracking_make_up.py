"""The same command again, also of a finished run, makes up for what MLflow missed and for a record that was broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytune_fsdp.api import FinetuneResult, finetune
from raytune_fsdp.run import record
from raytune_fsdp.tracking import mlflow as tracking_mlflow
from raytune_fsdp.tracking.jsonl import read_events, read_trajectory
from raytune_fsdp.tracking.mlflow import mlflow_installed
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
    monkeypatch.setattr(tracking_mlflow, "connect", lambda uri: server)
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
