"""The same command again, also of a finished run, makes up for what MLflow missed and for a record that was broken."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from raytune_fsdp.launch.environment import environment
from raytune_fsdp.launch.finetune import finetune
from raytune_fsdp.launch.result import FinetuneResult
from raytune_fsdp.record.copies import following, mlflow, mlflow_model
from raytune_fsdp.record.copies.mlflow import mlflow_installed
from raytune_fsdp.record.copies.mlflow_run import ENVIRONMENT
from raytune_fsdp.record.jsonl import read_events, read_trajectory
from raytune_fsdp.run import open_record
from raytune_fsdp.run.described import commit_here
from tests.runs import GPT2, make_config
from tests.unit.fake_mlflow import FakeServer, Fault, on_record

pytestmark = [
    pytest.mark.skipif(not mlflow_installed(), reason="MLflow is not installed"),
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

    monkeypatch.setattr(mlflow, "connect", connect)
    monkeypatch.setattr(mlflow_model, "connect", connect)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    variables = dict(os.environ)
    monkeypatch.setattr(open_record, "RANKS_WAIT_SECONDS", 0.2)
    monkeypatch.setattr(following, "LAST_PAUSES_SECONDS", 0.05)
    monkeypatch.setattr("raytune_fsdp.record.report.page.can_draw", lambda: False)  # it takes as long as the steps
    uri = "http://127.0.0.1:9"
    config = make_config(
        tmp_path,
        {**GPT2, "n_layer": 1},
        train={"max_steps": 6},
        tracking={"console": False, "mlflow": {"enabled": True, "uri": uri, "register": "tiny"}},
        eval={"prompts": ["w5 w6"], "at_start": True},
        export={"at_end": True},
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
    (run_dir / "report" / "index.html").write_text("a report")
    second = command(30)
    assert (second.trained, second.unsent, second.registered) == (0, None, "tiny, version 1")
    (run_id,) = server.whole()
    run = server.runs[run_id]
    values = server.values(run_id)
    share = [values.pop(each) for each in list(values) if each[0] == "goodput/productive_share"]
    assert len(share) == 1 and share[0][0] and share[0][0] < 1
    values = {each: found for each, found in values.items() if not each[0].startswith("goodput/")}
    assert values == on_record(run_dir / "metrics.jsonl") and run.info.status == "FINISHED"
    total = int(run.data.params["parameters.total"])
    assert total == int(run.data.params["parameters.trainable"]) > 1000
    assert run.data.params["train.max_steps"] == "6" and "train.label_smoothing" not in run.data.params
    ((used, purpose),) = [(each.dataset, each.tags[0].value) for each in run.inputs.dataset_inputs]
    assert (used.name, used.source_type, purpose) == ("tokens", "local", "training") and 0 < len(used.digest) <= 36
    assert json.loads(used.source) == {"uri": str(tmp_path / "tokens.jsonl")}
    assert run.data.tags.get("mlflow.source.git.commit") == commit_here()
    answers = json.loads(server.texts[run_id, "answers.json"])
    assert [row[:2] for row in answers["data"]] == [[0, "w5 w6"], [6, "w5 w6"]]
    (below,) = server.of_attempts(run_id).values()
    figures = {key.rpartition("/")[2] for key, _ in server.values(below.info.run_id)}
    assert figures == {"host_rss_gib", "host_free_gib"} and below.info.status == "FINISHED"
    (version,) = server.versions["tiny"]
    assert (version.run_id, version.source) == (run_id, f"fake:/{run_id}/export")
    assert {
        (run_id, "export/model/config.json"),
        (run_id, "export/MLmodel"),
        (run_id, "report/index.html"),
    } <= server.files.keys()
    sent = len(server.calls)
    server.files.clear()

    lines = (run_dir / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_bytes(b"".join([lines[1], lines[0], b"[]\n", *lines[2:]]))
    third = command(30)
    assert (third.unsent, third.registered) == (None, "tiny, version 1")
    assert not {"create_model_version", "log_inputs"} & set(server.calls[sent:]), "once is enough"
    assert [row["step"] for row in read_trajectory(run_dir / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    (mended,) = (event for event in read_events(run_dir / "events.jsonl") if event["event"] == "record_repaired")
    assert len(mended["fields"]["problems"]) == 2 and Path(mended["fields"]["kept"]).exists()
    assert {name.split("/")[0] for _, name in server.files} == {"report"}, "which names the mended record"
    sent = len(server.calls)
    time.sleep(1.01 - time.time() % 1)  # the page says to the second when it was made
    assert command(30).unsent is None and "log_artifact" not in server.calls[sent:]


@pytest.mark.parametrize(("set_to", "files", "points"), [(None, "3600", "30"), ("77", "77", "77")])
def test_a_server_may_take_long_for_a_file_of_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_to: str | None, files: str, points: str
) -> None:
    """It may answer only when its own storage has it, and nothing is sent twice."""
    server = FakeServer()
    seen: dict[str, str] = {}

    def fault(call: str) -> None:
        seen.setdefault(call, os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"])

    server.fault = fault
    monkeypatch.setattr(mlflow_model, "connect", lambda uri: server)
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_TIMEOUT", raising=False)
    if set_to is not None:
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", set_to)
    (tmp_path / "config.json").write_text("{}")
    with environment(ENVIRONMENT):
        run_id = server.create_run(server.create_experiment("e"), tags={}, run_name="run").info.run_id
        assert mlflow_model.register("http://127.0.0.1:9", run_id, tmp_path, "tiny", 7) == "1"
    assert (seen["log_artifact"], seen["create_model_version"]) == (files, points)
    assert os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT") == set_to
