"""MLflow there, away, slow and back again: it gets every line of the record once, and training does not notice."""

from __future__ import annotations

import json
import logging
import math
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from raytune_fsdp.base.measured import ParameterCount
from raytune_fsdp.plan.run_dir import mlflow_database
from raytune_fsdp.record.copies import following, mlflow_extras
from raytune_fsdp.record.copies import mlflow as tracking_mlflow
from raytune_fsdp.record.copies.mlflow import CURSOR, RUN_ID, MlflowTracker, mlflow_installed
from raytune_fsdp.record.copies.mlflow_model import register
from raytune_fsdp.record.copies.mlflow_run import ENVIRONMENT, connect
from raytune_fsdp.record.goodput import read_goodput
from raytune_fsdp.record.jsonl import JsonlTracker, append_evaluation, append_event, read_events, read_trajectory
from raytune_fsdp.record.lineage import ForkedFrom
from raytune_fsdp.record.tracker import Composite, RunStart, UsedData
from tests.mlflow_server import whole
from tests.models import add_tokenizer, save_checkpoint
from tests.unit.fake_mlflow import FakeServer, Fault, nodes_on_record, on_record, step

pytestmark = [
    pytest.mark.skipif(not mlflow_installed(), reason="MLflow is not installed"),
]

DEAD = "http://user:hunter2@127.0.0.1:9"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing may land in the current directory, and no test waits for the pauses of a real outage."""
    current = tmp_path / "current"
    current.mkdir()
    monkeypatch.chdir(current)
    monkeypatch.setattr(following, "MAX_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(following, "LAST_PAUSES_SECONDS", 0.001)
    for name, value in ENVIRONMENT.items():  # as finetune() and every rank do
        monkeypatch.setenv(name, value)
    yield
    assert list(current.iterdir()) == []


def start_of(attempt: int, resumed_from: int, **changes: Any) -> RunStart:
    return RunStart(name="demo", attempt=attempt, resumed_from=resumed_from, **{"total_steps": 300, **changes})


class Attempt:
    """An attempt at a run, as training sees its trackers."""

    def __init__(self, directory: Path, start: RunStart, uri: str = "fake", finish_seconds: float = 60.0) -> None:
        self.mlflow = MlflowTracker(uri, experiment="e", directory=directory, finish_seconds=finish_seconds)
        self.record = JsonlTracker(directory)
        self.both = Composite([self.mlflow], record=self.record)
        self.attempt = start.attempt
        self.both.start(start)

    def train(self, first: int, last: int, *, every: int = 10, evaluate: bool = True) -> Attempt:
        """Steps, with an evaluation and a commit after every so many."""
        for number in range(first, last + 1):
            row = step(number, 1 / number + self.attempt)
            if number % 7 == 0:
                row = replace(row, nodes=(("a", 3e9 + number, 1e9, None, None), ("b", 2e9, 1e9, 50.0, None)))
            self.both.steps([row], world_size=1, attempt=self.attempt)
            if number % every == 0:
                self.both.event("saved", step=number)
                if evaluate:
                    self.both.evaluation(number, {"eval/my chat (v2)/loss": 100.0 / number})
        return self

    def finish(self, status: Any = "finished") -> MlflowTracker:
        self.both.finish(status)
        return self.mlflow

    def crash(self) -> None:
        """The end of a process, as far as that can be had in one: its thread says no more."""
        self.mlflow._abandoned = True
        thread = self.mlflow._thread
        assert thread is not None
        with self.mlflow._changed:
            self.mlflow._happened = True
            self.mlflow._changed.notify_all()
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    fake = FakeServer()
    monkeypatch.setattr(tracking_mlflow, "connect", lambda uri: fake)
    return fake


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty one. MLflow makes its tables in more than fifty steps."""
    place = tmp_path_factory.mktemp("database")
    connect(mlflow_database(place)[0])
    return place / "mlflow.db"


def wait_for(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def the_run(server: FakeServer) -> str:
    (run_id,) = server.whole()
    return run_id


def test_one_run_through_resumes_on_sqlite(
    tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    uri, artifacts = mlflow_database(tmp_path / "the storage")
    shutil.copytree(database.parent, tmp_path / "the storage")
    place = tmp_path / "the storage" / "run"
    params = {f"section.key{i}": i for i in range(150)} | {"long": "x" * 9000, "hub.token": "my-own", "odd (key)": None}
    given = {"params": params, "plan": {"steps": 300, "uri": DEAD}, "config": "run: {name: demo}\n", "commit": "c0ffee"}
    data = UsedData(name="x", digest="0" * 32, kind="local", place={"uri": "/x"}, rows=7, purpose="training")
    more = UsedData(name="y", digest="1" * 32, kind="s3", place={"uri": "s3://y"}, rows=1, purpose="evaluation")
    count = ParameterCount(total=100, trainable=40)

    def attempt(start: RunStart) -> Composite:
        mlflow = MlflowTracker(uri, experiment="e", directory=place, artifact_root=artifacts, finish_seconds=120)
        tracker = Composite([mlflow], record=JsonlTracker(place))
        tracker.start(start)
        return tracker

    first = attempt(start_of(1, 0, parameters=count, datasets=(data,), **given))
    with caplog.at_level(logging.INFO):
        first.steps([step(i, loss=1 / i) for i in range(1, 300)] + [step(300, math.nan)], world_size=2, attempt=1)
        first.evaluation(300, {"eval/my chat (v2)/loss": 1.5})
        first.event("saved", step=300, api_key="my-own")
        for answer in ("is cut", "a word"):
            first.event("answered", step=300, prompt=[{"role": "user", "content": "?"}], answer=answer)
        first.finish("interrupted")
    assert [r.name for r in caplog.records if r.name.startswith(("alembic", "mlflow.store"))] == []
    state = first.state()

    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    found = client.get_run(state[RUN_ID])
    assert found.info.status == "KILLED" and found.info.run_name == "demo"
    assert len(found.data.params) == 155 and len(found.data.params["long"]) == 6000
    assert found.data.params["parameters.total"] == "100" and found.data.params["parameters.trainable"] == "40"
    assert found.data.params["hub.token"] == "<redacted>" and found.data.params["odd _key_"] == "None"
    assert "my-own" not in str(found.data.tags) and found.data.tags["raytune_fsdp.attempt"] == "1"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)  # MLflow's own reader of tables takes it from there
    table = client.load_table(found.info.experiment_id, "events.json", run_ids=[state[RUN_ID]])
    assert table["event"].tolist() == ["saved", "answered", "answered", "attempt_ended"] and "my-own" not in str(table)
    answers = client.load_table(found.info.experiment_id, "answers.json", run_ids=[state[RUN_ID]])
    assert answers.to_dict("records") == [
        {"step": 300, "prompt": '[{"role": "user", "content": "?"}]', "answer": "a word"}
    ], "a step that was trained again has its last answer"
    assert found.data.tags["mlflow.source.git.commit"] == "c0ffee"
    assert client.get_experiment(found.info.experiment_id).tags["mlflow.experimentKind"] == "custom_model_development"
    history = sorted(client.get_metric_history(state[RUN_ID], "train/loss"), key=lambda metric: metric.step)
    assert [m.value for m in history[:-1]] == [1 / i for i in range(1, 300)] and math.isnan(history[-1].value)
    assert history[1].timestamp - history[0].timestamp == 2000
    assert found.data.metrics["eval/my chat _v2_/loss"] == 1.5 and found.data.metrics["perf/memory_gib"] == 1.0
    assert found.data.metrics["eval/my chat _v2_/perplexity"] == math.exp(1.5)
    assert not {"train/accuracy", "perf/memory_bytes", "perf/step_seconds_min"} & found.data.metrics.keys(), "once"
    assert found.data.tags["mlflow.source.name"].startswith("raytune-fsdp ")
    note = found.data.tags["mlflow.note.content"]
    assert "100 parameters, 40 of them trained" in note and "training: `x` (7 rows)" in note and "300 steps" in note
    names = {"train/grad_norm", "train/lr", "train/epoch", "perf/tokens_per_second", "perf/step_seconds"}
    assert names | {"perf/data_seconds"} <= found.data.metrics.keys() and "perf/mfu" not in found.data.metrics
    assert {file.path for file in client.list_artifacts(state[RUN_ID])} == {
        "answers.json", "config.yaml", "events.json", "plan.json"
    }  # fmt: skip
    plan = next((tmp_path / "the storage/mlartifacts").rglob("plan.json")).read_text()
    assert "hunter2" not in plan and '"steps": 300' in plan

    changed = {"section.key0": "changed", "added": 1}
    second = attempt(start_of(2, 300, total_steps=301, params=changed, datasets=(data, more)))
    second.steps([step(301, 0.25)], world_size=4, attempt=2)
    second.finish("finished")
    assert second.state() == state
    again = client.get_run(state[RUN_ID])
    assert again.info.status == "FINISHED" and again.data.metrics["train/loss"] == 0.25
    assert again.data.params["added"] == "1" and again.data.params["section.key0"] == "0"
    used = {each.dataset.name: (each.dataset.digest, each.tags[0].value) for each in again.inputs.dataset_inputs}
    assert used == {"x": ("0" * 32, "training"), "y": ("1" * 32, "evaluation")}
    below = client.search_runs([found.info.experiment_id], f"tags.`mlflow.parentRunId` = '{state[RUN_ID]}'")
    assert {run.info.run_name: run.info.status for run in below} == {"attempt 1": "KILLED", "attempt 2": "FINISHED"}

    (place / "export").mkdir()
    (place / "export" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    versions = [register(uri, state[RUN_ID], place / "export", "tiny", step) for step in (300, 300, 301)]
    assert versions == ["1", "1", "2"], "once for each export"
    assert client.get_model_version_download_uri("tiny", "1") == str(place / "mlflow_model")

    caplog.clear()
    client.delete_run(state[RUN_ID])
    third = attempt(start_of(3, 301, total_steps=301, over=True))
    third.finish("finished")
    new = third.state()
    assert new.keys() == {RUN_ID} and new != state and client.get_run(new[RUN_ID]).info.status == "FINISHED"
    assert len(client.get_metric_history(new[RUN_ID], "train/loss")) == 301, "a new run gets everything"
    assert sum("metrics go to a new one" in r.message for r in caplog.records) == 1


class Flaky:
    """A client of a real store, some of whose calls fail: the request or the answer is lost, or half is done."""

    def __init__(self, client: Any, fault: Callable[[str], Fault]) -> None:
        self._client = client
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)

        def flaky(*args: Any, **kwargs: Any) -> Any:
            fault = self._fault(name)
            if fault == "half" and name == "log_batch":
                call(*args, **{**kwargs, "tags": []})
            elif fault != "away":
                done = call(*args, **kwargs)
                if fault is None:
                    return done
            raise ConnectionError(f"{name}: no answer")

        return flaky


def story(directory: Path, say: Callable[[Fault], None]) -> None:
    """An outage, hangs, a crash past a commit, a resume, and a server that is gone at the end. Then one more start."""
    first = Attempt(directory, start_of(1, 0)).train(1, 40)
    say("away")
    first.train(41, 90)
    say(None)
    first.train(91, 137)
    first.crash()
    second = Attempt(directory, start_of(2, 130), finish_seconds=0.3).train(131, 200)
    say("away")
    second.train(201, 300)
    unsent = second.finish().unsent
    assert unsent is not None and "the same command sends the rest" in unsent
    say(None)
    third = MlflowTracker("fake", experiment="e", directory=directory, finish_seconds=60.0)
    third.start(start_of(2, 300, over=True))
    third.finish("finished")
    assert third.unsent is None


def patiently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of nodes are given up when three tries in a row have failed, which one in a hundred do by chance here."""
    monkeypatch.setattr(mlflow_extras, "_MOST_FAILURES", 100)


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_everything_arrives_exactly_once_through_outages_and_a_crash(
    tmp_path: Path, server: FakeServer, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the outages every fifth request goes wrong in one way or another."""
    patiently(monkeypatch)
    draw = random.Random(seed)
    outage: list[Fault] = [None]
    server.fault = lambda call: outage[0] or draw.choice(["away", "lost", "half", *[None] * 12])
    story(tmp_path / "run", lambda fault: outage.__setitem__(0, fault))
    run_id = the_run(server)
    assert server.values(run_id) == on_record(tmp_path / "run" / "metrics.jsonl")
    assert len({number for key, number in server.values(run_id) if key == "train/loss"}) == 300
    assert server.runs[run_id].info.status == "FINISHED"
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert events[-1]["event"] == "not_sent_to_mlflow"
    table = json.loads(server.texts[run_id, "events.json"])
    assert [row[2] for row in table["data"]] == [event["event"] for event in events]
    below = server.of_attempts(run_id)
    assert {attempt: run.info.status for attempt, run in below.items()} == {"1": "KILLED", "2": "FINISHED"}
    for attempt, run in below.items():
        wanted = nodes_on_record(tmp_path / "run" / "metrics.jsonl", int(attempt))
        assert wanted and server.values(run.info.run_id) == wanted, "the figures of its nodes, and nothing else"


def test_the_same_on_a_real_store(tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    patiently(monkeypatch)
    shutil.copy(database, tmp_path)
    uri, _ = mlflow_database(tmp_path)
    client = MlflowClient(uri)
    client.create_experiment("e", artifact_location=str(tmp_path / "artifacts"))
    draw = random.Random(0)
    outage: list[Fault] = [None]
    created: list[Fault] = ["lost"]  # the first time: then the run must be found by its tag

    def fault(call: str) -> Fault:
        if call == "create_run" and created:
            return created.pop()
        return outage[0] or draw.choice(["away", "lost", "half", *[None] * 12])

    flaky = Flaky(client, fault)
    monkeypatch.setattr(tracking_mlflow, "connect", lambda uri: flaky)
    story(tmp_path / "run", lambda fault: outage.__setitem__(0, fault))
    experiment = client.get_experiment_by_name("e")
    (run,) = whole(client.search_runs([experiment.experiment_id]))
    found: dict[tuple[str, int], list[float | None]] = {}
    for key in run.data.metrics:
        for point in client.get_metric_history(run.info.run_id, key):
            found.setdefault((key, point.step), []).append(None if math.isnan(point.value) else point.value)
    assert found == on_record(tmp_path / "run" / "metrics.jsonl")
    assert run.info.status == "FINISHED"
    for attempt in client.search_runs([experiment.experiment_id], f"tags.`mlflow.parentRunId` = '{run.info.run_id}'"):
        wanted = nodes_on_record(tmp_path / "run" / "metrics.jsonl", int(attempt.data.tags["raytune_fsdp.attempt"]))
        points = {key: client.get_metric_history(attempt.info.run_id, key) for key in attempt.data.metrics}
        assert wanted == {(key, each.step): [each.value] for key, found in points.items() for each in found}


def test_only_committed_lines_are_sent(tmp_path: Path, server: FakeServer) -> None:
    """A resume cuts the others, and MLflow takes nothing back. The rest comes when the run is complete."""
    attempt = Attempt(tmp_path, start_of(1, 0))
    attempt.both.evaluation(0, {"eval/x/loss": 9.0})
    attempt.train(1, 17, evaluate=False)
    wait_for(lambda: server.whole() and ("train/loss", 10) in server.values(the_run(server)))
    time.sleep(0.05)
    run_id = the_run(server)
    assert max(number for _, number in server.values(run_id)) == 10
    assert attempt.finish("failed").unsent is None
    assert max(number for _, number in server.values(run_id)) == 10 and server.runs[run_id].info.status == "FAILED"
    Attempt(tmp_path, start_of(2, 10, total_steps=17)).train(11, 17).finish()
    assert server.values(run_id) == on_record(tmp_path / "metrics.jsonl")
    assert server.runs[run_id].info.status == "FINISHED"


def test_a_complete_run_that_has_everything_is_left_alone(tmp_path: Path, server: FakeServer) -> None:
    Attempt(tmp_path, start_of(1, 0, total_steps=20)).train(1, 20).finish()
    server.calls.clear()
    again = MlflowTracker("fake", experiment="e", directory=tmp_path)
    again.start(start_of(1, 20, total_steps=20, over=True))
    again.finish("finished")
    assert again.unsent is None and server.calls == ["get_run"]


def test_a_run_that_goes_back_behind_what_was_sent_sends_nothing_twice(tmp_path: Path, server: FakeServer) -> None:
    """The newest checkpoint is damaged: its steps are trained again, now with evaluations that were not made before."""
    Attempt(tmp_path, start_of(1, 0)).train(1, 40, evaluate=False).finish("failed")
    assert json.loads(server.runs[the_run(server)].data.tags[CURSOR])["step"] == 40
    second = Attempt(tmp_path, start_of(2, 20)).train(21, 35)
    wait_for(lambda: ("eval/my chat _v2_/loss", 30) in server.values(the_run(server)))
    second.crash()  # and once more before it is where it was
    third = Attempt(tmp_path, start_of(3, 30, total_steps=60)).train(31, 60)
    third.finish()
    found, wanted = server.values(the_run(server)), on_record(tmp_path / "metrics.jsonl")
    assert found.keys() == wanted.keys() and {len(values) for values in found.values()} == {1}
    again = {key for key in found if found[key] != wanted[key]}
    assert {number for _, number in again} == set(range(21, 41)), "MLflow keeps what it had of these"


def test_a_run_of_an_older_version_goes_on_without_a_point_twice(tmp_path: Path, server: FakeServer) -> None:
    """It has no cursor, its points have other times, and what a long outage dropped is missing."""
    attempt = Attempt(tmp_path, start_of(1, 0)).train(1, 40)
    attempt.finish("failed")
    run_id = the_run(server)
    tags = server.runs[run_id].data.tags
    del tags[CURSOR], tags["raytune_fsdp.names"]
    server.points[run_id] = {
        (key, 1_000_007, number, value)
        for (key, number), (value,) in on_record(tmp_path / "metrics.jsonl", older=True).items()
        if not 12 <= number <= 25 and not key.endswith("perplexity")
    }
    server.runs[run_id].data.metrics = {key: value for key, _, _, value in server.points[run_id]}
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    older = [json.dumps({k: v for k, v in json.loads(line).items() if k != "time"}).encode() + b"\n" for line in lines]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(older))
    Attempt(tmp_path, start_of(2, 40, total_steps=60)).train(41, 60).finish()
    assert server.values(run_id) == on_record(tmp_path / "metrics.jsonl", older=True), "under the names that it has"
    assert "perf/memory_bytes" in {key for key, _ in server.values(run_id)}
    filled = {time for key, time, number, _ in server.points[run_id] if 12 <= number <= 25}
    assert filled == {1_000_000}, "lines without a time get that of the run's start, the same whenever they are sent"


def test_an_outage_may_take_as_long_as_it_likes(
    tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More failures in a row than a float has powers of two: the pauses stay bounded, and the thread alive."""
    monkeypatch.setattr(following, "MAX_PAUSE_SECONDS", 1e-5)
    failures = iter(range(1100))
    server.fault = lambda call: None if next(failures, None) is None else "away"
    attempt = Attempt(tmp_path, start_of(1, 0, total_steps=20)).train(1, 20)
    wait_for(lambda: server.runs, 60)
    assert attempt.finish().unsent is None
    assert server.values(the_run(server)) == on_record(tmp_path / "metrics.jsonl")


def test_requests_keep_to_the_limits_whatever_there_is_to_send(tmp_path: Path, server: FakeServer) -> None:
    server.fault = lambda call: "away"
    attempt = Attempt(tmp_path, start_of(1, 0, total_steps=1000, params={f"p{i}": i for i in range(250)}))
    attempt.train(1, 1000, every=500)
    attempt.both.evaluation(1000, {f"eval/{i}/loss": 1.0 for i in range(1200)})
    for number in range(150):
        attempt.both.event(f"kind{number}", step=number)
    server.fault = lambda call: None
    assert attempt.finish().unsent is None  # the server has asserted the limits
    assert server.values(the_run(server)) == on_record(tmp_path / "metrics.jsonl")
    assert len(server.runs[the_run(server)].data.params) == 250
    table = json.loads(server.texts[the_run(server), "events.json"])
    assert sum(row[2].startswith("kind") for row in table["data"]) == 150
    assert len(server.batches) < 25, "one request for about a hundred steps"


def test_a_server_that_creates_a_run_and_does_not_say_so_has_one_run(tmp_path: Path, server: FakeServer) -> None:
    faults: list[Fault] = ["lost"]
    server.fault = lambda call: (faults.pop() if faults else None) if call == "create_run" else outage[0]
    outage: list[Fault] = [None]
    first = Attempt(tmp_path, start_of(1, 0, total_steps=10))
    wait_for(lambda: not faults)
    outage[0] = "away"
    first.crash()  # before it has asked again
    outage[0] = None
    assert Attempt(tmp_path, start_of(2, 0, total_steps=10)).train(1, 10).finish().unsent is None
    assert server.values(the_run(server)) == on_record(tmp_path / "metrics.jsonl")


def test_a_run_that_is_deleted_meanwhile_is_sent_anew(tmp_path: Path, server: FakeServer) -> None:
    attempt = Attempt(tmp_path, start_of(1, 0, total_steps=30)).train(1, 10)
    wait_for(lambda: server.whole() and ("train/loss", 10) in server.values(the_run(server)))
    deleted = the_run(server)
    server.delete(deleted)
    assert attempt.train(11, 30).finish().unsent is None
    (new,) = set(server.whole()) - {deleted}
    assert server.values(new) == on_record(tmp_path / "metrics.jsonl")
    assert (tmp_path / "mlflow_run_id").read_text().strip() == new


def test_a_line_that_the_server_refuses_holds_up_no_other(
    tmp_path: Path, server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    from mlflow.exceptions import MlflowException

    refuse = server.log_batch

    def log_batch(run_id: str, metrics: Any = (), **rest: Any) -> None:
        if any(metric.step == 13 for metric in metrics):
            raise MlflowException.invalid_parameter_value("unlucky")
        refuse(run_id, metrics, **rest)

    server.log_batch = log_batch  # type: ignore[method-assign]
    assert Attempt(tmp_path, start_of(1, 0, total_steps=30)).train(1, 30, every=30).finish().unsent is None
    found, wanted = server.values(the_run(server)), on_record(tmp_path / "metrics.jsonl")
    assert wanted.keys() - found.keys() == {key for key in wanted if key[1] == 13}
    assert caplog.text.count("does not take a line of step 13") == 1


@pytest.mark.parametrize("tags", [{}, {"mlflow.experimentKind": "genai_development"}])
def test_an_experiment_keeps_what_it_says_it_is_for(tmp_path: Path, server: FakeServer, tags: dict[str, str]) -> None:
    server.create_experiment("e", tags=tags)
    Attempt(tmp_path, start_of(1, 0, total_steps=10)).train(1, 10).finish()
    found = server.experiments["e"].tags
    assert (
        found["mlflow.experimentKind"]
        == {"mlflow.experimentKind": "custom_model_development", **tags}["mlflow.experimentKind"]
    )
    first = json.loads(found["mlflow.sharedViewState.raytune_fsdp"])["compareRunCharts"][0]
    assert first["metricKey"] == "train/loss" and len(found["mlflow.sharedViewState.raytune_fsdp"]) < 5000


def test_what_is_refused_beside_them_holds_up_no_metrics(
    tmp_path: Path, server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A store of artifacts without credentials, and a server that has no runs below runs."""
    server.fault = lambda call: PermissionError("no") if call in ("log_text", "log_inputs", "search_runs") else None
    data = UsedData(name="x", digest="0", kind="local", place={}, rows=7, purpose="training")
    attempt = Attempt(tmp_path, start_of(1, 0, total_steps=300, datasets=(data,))).train(1, 300)
    assert attempt.finish().unsent is None
    run = server.runs[the_run(server)]
    assert server.values(the_run(server)) == on_record(tmp_path / "metrics.jsonl") and run.info.status == "FINISHED"
    for what in ("the datasets", "the config", "the plan", "the attempt", "the events", "figures of nodes"):
        assert caplog.text.count(f"MLflow did not take {what}") == 1, what


def test_tables_are_sent_now_and_then_and_whole_at_the_end(tmp_path: Path, server: FakeServer) -> None:
    """Sixty events in a row are not sixty tables."""
    attempt = Attempt(tmp_path, start_of(1, 0, total_steps=60))
    attempt.train(1, 60, every=1, evaluate=False).finish()
    sent = [call for call in server.calls if call == "log_text"]
    assert len(sent) <= 2 + 4, "the config, the plan, and two tables twice at most"
    rows = json.loads(server.texts[the_run(server), "events.json"])["data"]
    assert [row[3] for row in rows] == [*range(1, 61), None], "a commit of each step, and the end of the attempt"


def test_where_the_time_went_is_sent_after_a_failure_and_at_the_end(tmp_path: Path, server: FakeServer) -> None:
    """As metrics of the run, each once, whatever is lost; of the first attempt's first step there is nothing to say."""
    phases = {"workers": 1.0, "model": 2.0, "step": 0.5}

    def begin(number: int, resumed_from: int) -> Attempt:
        # Before the thread begins: the tables that it sends first have them, and the next come half a minute later.
        started = {"world_size": 1, "resumed_from": resumed_from}
        append_event(tmp_path / "events.jsonl", "attempt_started", attempt=number, fields=started)
        append_event(tmp_path / "events.jsonl", "first_step", attempt=number, fields={"seconds": 3.5, "phases": phases})
        return Attempt(tmp_path, start_of(number, resumed_from, total_steps=40))

    first = begin(1, 0).train(1, 20, evaluate=False)
    wait_for(lambda: ("train/loss", 20) in server.values(the_run(server)) if server.runs else False, 60)
    first.crash()
    names_of = {key for key, _ in server.values(the_run(server)) if key.startswith("goodput/")}
    assert not names_of
    append_event(tmp_path / "events.jsonl", "attempt_failed", attempt=1, fields={"cause": "x", "reached": 26})
    second = begin(2, 20).train(21, 30, evaluate=False)
    # Its step is the newest in the record when the thread reads it: anywhere on the way to 30.
    wait_for(lambda: any(key == "goodput/productive_share" for key, _ in server.values(the_run(server))), 60)
    second.train(31, 40, evaluate=False).finish()
    found = {key: value for key, value in server.values(the_run(server)).items() if key[0].startswith("goodput/")}
    after_failure, at_end = sorted({step for _, step in found})
    assert 20 <= after_failure <= 30 and at_end == 40 and all(len(each) == 1 for each in found.values())
    expected = read_goodput(tmp_path)
    assert expected is not None and expected.steps_again == 5
    assert {key: value for (key, step), (value,) in found.items() if step == 40} == expected.metrics()
    late = Attempt(tmp_path, start_of(2, 20, total_steps=40, over=True, committed=40))
    assert late.mlflow.finish("finished") is None and late.mlflow.unsent is None
    assert sum(len(each) for (key, _), each in server.values(the_run(server)).items() if "goodput" in key) == len(found)


def test_digests_are_a_table_and_the_newest_is_a_tag(tmp_path: Path, server: FakeServer) -> None:
    """Of a step that was trained again, the last one."""
    attempt = Attempt(tmp_path, start_of(1, 0, total_steps=60)).train(1, 20, evaluate=False)
    for step_, digit in ((10, "x"), (5, "a"), (10, "b")):
        attempt.both.event("digested", step=step_, digest=digit * 64, everything="e" * 64)
    attempt.both.event("saved", step=10, digest="b" * 64, everything="e" * 64)
    attempt.finish()
    found = json.loads(server.texts[the_run(server), "digests.json"])
    assert found["columns"] == ["step", "of", "weights", "everything"]
    assert [(*row[:2], row[2][0]) for row in found["data"]] == [
        (5, "step", "a"), (10, "step", "b"), (10, "checkpoint", "b")
    ]  # fmt: skip
    tags = server.runs[the_run(server)].data.tags
    assert tags["raytune_fsdp.digest"] == f"{'b' * 64} after step 10"
    listed = [each["path"] for each in json.loads(tags["mlflow.loggedArtifacts"])]
    assert listed == ["events.json", "digests.json"], "those that there are"


def test_a_server_that_needs_long_for_a_request_gets_smaller_ones(tmp_path: Path, server: FakeServer) -> None:
    """Otherwise a slow server and a short timeout would never come to an end."""
    takes = server.log_batch

    def log_batch(run_id: str, metrics: Any = (), **rest: Any) -> None:
        if len(metrics) > 40:
            raise TimeoutError("read timed out")
        takes(run_id, metrics, **rest)

    server.log_batch = log_batch  # type: ignore[method-assign]
    assert Attempt(tmp_path, start_of(1, 0)).train(1, 300, every=300).finish().unsent is None
    assert server.values(the_run(server)) == on_record(tmp_path / "metrics.jsonl")


def test_a_server_that_is_away_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    attempt = Attempt(tmp_path / "run", start_of(1, 0, state={RUN_ID: "of-the-checkpoint"}), DEAD, finish_seconds=0.5)
    seconds = []
    for number in range(1, 81):
        before = time.perf_counter()
        attempt.mlflow.steps([step(number)], world_size=1, attempt=1)
        attempt.mlflow.event("saved", step=number)
        assert attempt.mlflow.state() == {RUN_ID: "of-the-checkpoint"}
        seconds.append(time.perf_counter() - before)
        attempt.record.steps([step(number)], world_size=1, attempt=1)
    # Not every one: the other thread may be sent to sleep while it holds Python's lock.
    assert sorted(seconds)[-8] < 0.05 and median(seconds) < 0.005
    before = time.perf_counter()
    unsent = attempt.finish("interrupted").unsent
    assert time.perf_counter() - before < 1
    thread = attempt.mlflow._thread
    assert thread is not None
    thread.join(5)
    assert not thread.is_alive(), "the ranks do not wait for a server that fails again and again"
    assert len(read_trajectory(tmp_path / "run/metrics.jsonl")) == 80
    assert unsent is not None and "has not answered" in unsent and "hunter2" not in caplog.text + unsent


def test_a_server_that_never_answers_costs_no_more_than_the_deadline(tmp_path: Path) -> None:
    shown: list[tuple[str, int, int]] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        uri = f"http://127.0.0.1:{listening.getsockname()[1]}"
        tracker = MlflowTracker(
            uri, experiment="e", directory=tmp_path, finish_seconds=1.2, progress=lambda *how: shown.append(how)
        )
        before = time.perf_counter()
        tracker.start(start_of(1, 0, total_steps=7))
        tracker.state()
        assert time.perf_counter() - before < 0.5
        before = time.perf_counter()
        tracker.finish("finished")
        assert time.perf_counter() - before < 5
        assert shown[0] == ("steps sent to MLflow", 0, 7) and tracker.unsent is not None


def test_mlflow_is_not_imported_before_it_is_used() -> None:
    code = "import sys, raytune_fsdp.record.copies.mlflow, raytune_fsdp.record.console\n"
    code += "import raytune_fsdp.record.report.curves\n"
    code += "assert not {'mlflow', 'torch', 'ray', 'matplotlib'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_whoever_dies_while_the_database_is_made_leaves_none(tmp_path: Path) -> None:
    """MLflow refuses a database in which some of its migrations are missing, and would do so for every later run."""
    uri, _ = mlflow_database(tmp_path)
    code = f"from raytune_fsdp.record.copies.mlflow_run import connect; connect({uri!r})"
    maker = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while not any(file.stat().st_size > 50_000 for file in tmp_path.glob(".mlflow.db.*.tmp")):
        assert maker.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    maker.kill()
    maker.wait()
    assert not (tmp_path / "mlflow.db").exists()
    for _ in range(2):  # made, and found
        assert [each.name for each in connect(uri).search_experiments()] == ["Default"]
    assert (tmp_path / "mlflow.db").stat().st_mode & 0o007 == 0


def test_what_is_measured_anew_is_there_once(tmp_path: Path, server: FakeServer) -> None:
    """All checkpoints were lost, so the run began anew, and with it what is measured beside it."""
    record = tmp_path / "evaluations.jsonl"
    append_evaluation(record, 10, {"eval/late/loss": 0.5}, attempt=1)
    first = Attempt(tmp_path, start_of(1, 0)).train(1, 30)
    wait_for(lambda: server.whole() and ("eval/late/loss", 10) in server.values(the_run(server)))
    first.finish("handed_over")
    record.unlink()
    time.sleep(0.01)  # another time, which MLflow would keep as another point
    for number in (10, 20):
        append_evaluation(record, number, {"eval/late/loss": 5.0 / number}, attempt=2)
    assert Attempt(tmp_path, start_of(2, 30)).train(31, 300).finish().unsent is None
    assert server.values(the_run(server)) == on_record(tmp_path / "metrics.jsonl") | on_record(record)


def test_what_is_measured_beside_training_is_there_once(tmp_path: Path, server: FakeServer) -> None:
    """Whenever it comes: while the ranks train, between two attempts, or after the last one."""
    record = tmp_path / "evaluations.jsonl"

    def measured(step: int) -> None:
        append_evaluation(record, step, {"eval/late/loss": 1.0 / step}, attempt=1)

    first = Attempt(tmp_path, start_of(1, 0)).train(1, 20)
    measured(10)
    first.train(21, 30)
    wait_for(lambda: server.whole() and ("eval/late/loss", 10) in server.values(the_run(server)))
    first.finish("handed_over")
    measured(20)
    assert Attempt(tmp_path, start_of(2, 30)).train(31, 300).finish().unsent is None
    measured(300)
    last = MlflowTracker("fake", experiment="e", directory=tmp_path)
    last.start(start_of(2, 0, over=True, committed=300))
    last.finish("finished")
    assert last.unsent is None
    assert server.values(the_run(server)) == on_record(tmp_path / "metrics.jsonl") | on_record(record)
    assert {step for key, step in server.values(the_run(server)) if key == "eval/late/loss"} == {10, 20, 300}


@pytest.mark.parametrize("adapters", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_registered_model_is_one_that_mlflow_loads(
    tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch, adapters: bool
) -> None:
    """Whole or as adapters, from a database, without a second copy of its weights."""
    peft = pytest.importorskip("peft") if adapters else None
    export = tmp_path / "run" / "export"
    base = save_checkpoint(tmp_path / "base" if adapters else export, "llama", tokenizer=True, vocab_size=1024)
    network: Any = AutoModelForCausalLM.from_pretrained(base)
    if peft is not None:
        network = peft.get_peft_model(network, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
        network.save_pretrained(export)
        add_tokenizer(export)
    uri, _ = mlflow_database(tmp_path)
    shutil.copy(database, tmp_path)
    client = connect(uri)
    run = client.create_run(client.create_experiment("e", artifact_location=str(tmp_path / "artifacts")))
    assert register(uri, run.info.run_id, export, "tiny", 7) == "1"
    assert not list((tmp_path / "run" / "mlflow_model").rglob("*.safetensors"))
    for variable in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
        monkeypatch.setenv(variable, uri)
    import mlflow.transformers

    found = mlflow.transformers.load_model("models:/tiny/1", return_type="components")
    text = found["tokenizer"]("What is it?", return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(found["model"](**text).logits, network.eval()(**text).logits)


def test_a_fork_names_its_parent_and_has_its_own_steps(tmp_path: Path, server: FakeServer) -> None:
    """Through an attempt that ends before its first commit."""
    parent = ForkedFrom(run="base", path="/runs/base", mlflow_run_id="c0ffee", step=10, digest="0" * 64)
    start = {"begins_after": 10, "committed": 0, "forked_from": parent}
    Attempt(tmp_path / "run", start_of(1, 10, **start)).train(11, 15).finish("failed")
    Attempt(tmp_path / "run", start_of(2, 10, **start)).train(11, 30).finish()
    run_id = the_run(server)
    tags = server.runs[run_id].data.tags
    assert (tags["raytune.fork_of"], tags["raytune.fork_step"]) == ("c0ffee", "10")
    assert server.values(run_id) == on_record(tmp_path / "run" / "metrics.jsonl")
    assert {step for _, step in server.values(run_id)} == set(range(11, 31))
