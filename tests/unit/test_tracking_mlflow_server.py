"""A real MLflow server is refused, killed, hangs, fails, is slow and is gone, while a run goes on at its pace, in a
process that dies, too. And one that wants a password."""

from __future__ import annotations

import base64
import json
import math
import multiprocessing
import os
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from raytune_fsdp.launch.quiet import quiet
from raytune_fsdp.record.copies.mlflow import MlflowTracker, mlflow_installed
from raytune_fsdp.record.copies.mlflow_model import register
from raytune_fsdp.record.copies.mlflow_run import ENVIRONMENT
from raytune_fsdp.record.jsonl import JsonlTracker, read_trajectory
from raytune_fsdp.record.tracker import Composite, RunStart
from tests.mlflow_server import Proxy, Server, until, whole
from tests.unit.fake_mlflow import nodes_on_record, on_record, step

pytestmark = pytest.mark.skipif(not mlflow_installed(), reason="MLflow is not installed")


@dataclass(frozen=True)
class Story:
    """When what happens, in steps, and for how many seconds."""

    steps: int = 2000
    a_second: float = 12.0
    commit_every: int = 50
    refused: tuple[int, float] = (150, 8.0)
    killed: tuple[int, float] = (450, 10.0)
    hangs: tuple[int, float] = (800, 12.0)
    """Longer than a request waits, which is five seconds here."""
    fails: tuple[int, float] = (1100, 6.0)
    slow: tuple[int, float] = (1300, 6.0)
    dies_at: int = 1507
    """Seven steps past a commit. It goes on with another number of ranks."""
    gone_from: int = 1700


def train(directory: Path, uri: str, story: Story, attempt: int, first: int, last: int) -> None:
    """A process that trains: it writes steps at their pace, commits, and at `dies_at` it is gone."""
    quiet()
    mlflow = MlflowTracker(uri, experiment="story", directory=directory)
    tracker = Composite([mlflow], record=JsonlTracker(directory))
    tracker.start(RunStart(name="story", attempt=attempt, resumed_from=first - 1, total_steps=story.steps))
    nodes, began = (("a", 1e9, 2e9, 50.0, None),), time.monotonic()
    with (directory / f"seconds.a{attempt}").open("w") as seconds:
        for number in range(first, last + 1):
            time.sleep(max(0.0, began + (number - first) / story.a_second - time.monotonic()))
            row = replace(step(number, 1 / number, 1 / story.a_second), nodes=nodes if number % 20 == 0 else ())
            before = time.perf_counter()
            tracker.steps([row], world_size=attempt, attempt=attempt)
            if number % story.commit_every == 0 or number == last:
                tracker.event("saved", step=number)
                tracker.state()
                tracker.evaluation(number, {"eval/x/loss": 2 / number})
            print(time.perf_counter() - before, file=seconds, flush=True)
            if number == story.dies_at and attempt == 1:
                os._exit(9)
    before = time.perf_counter()
    tracker.finish("finished")
    (directory / "end").write_text(f"{time.perf_counter() - before}")


def tell(directory: Path, uri: str, story: Story, seconds: float = 120.0) -> str | None:
    """One more start of the finished run: what MLflow has not got after it."""
    tracker = MlflowTracker(uri, experiment="story", directory=directory, finish_seconds=seconds)
    tracker.start(RunStart(name="story", attempt=2, resumed_from=story.steps, total_steps=story.steps, over=True))
    tracker.finish("finished")
    return tracker.unsent


def follow(directory: Path, story: Story) -> None:
    run, server = directory / "run", Server(directory / "server")
    proxy = Proxy(server.port)
    processes = multiprocessing.get_context("spawn")

    def trained(number: int) -> Callable[[], bool]:
        return lambda: len(read_trajectory(run / "metrics.jsonl")) >= number

    def at(number: int, begin: Callable[[], None], seconds: float, end: Callable[[], None]) -> None:
        until(trained(number), 60 + 2 * number / story.a_second, f"step {number} does not come")
        begin()
        time.sleep(seconds)
        end()

    def set_to(name: str, value: object) -> Callable[[], None]:
        return lambda: setattr(proxy, name, value)

    try:
        run.mkdir()
        first = processes.Process(target=train, args=(run, proxy.uri, story, 1, 1, story.steps))
        first.start()
        at(story.refused[0], proxy.close, story.refused[1], proxy.open)
        at(story.killed[0], server.kill, story.killed[1], server.start)
        at(story.hangs[0], lambda: server.send(signal.SIGSTOP), story.hangs[1], lambda: server.send(signal.SIGCONT))
        at(story.fails[0], set_to("fails", True), story.fails[1], set_to("fails", False))
        at(story.slow[0], set_to("seconds", 1.5), story.slow[1], set_to("seconds", 0.0))
        first.join(60 + 2 * story.steps / story.a_second)
        assert first.exitcode == 9
        committed = story.dies_at // story.commit_every * story.commit_every
        assert len(read_trajectory(run / "metrics.jsonl")) == story.dies_at == committed + 7
        second = processes.Process(target=train, args=(run, proxy.uri, story, 2, committed + 1, story.steps))
        second.start()
        at(story.gone_from, server.kill, 0, lambda: None)
        second.join(60 + 2 * story.steps / story.a_second)
        assert second.exitcode == 0
        assert tell(run, proxy.uri, story, seconds=1.0) is not None
        server.start()
        assert tell(run, proxy.uri, story) is None
        check(run, server.uri, story)
        check_pace(run)
    finally:
        server.kill()
        proxy.close()


def check(run: Path, uri: str, story: Story) -> None:
    """Every step, one value each, equal to the record; below it the figures of nodes, by attempt."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("story")
    runs = client.search_runs([experiment.experiment_id])
    (found,) = whole(runs)

    def values_of(run_id: str) -> dict[tuple[str, int], list[float | None]]:
        values: dict[tuple[str, int], list[float | None]] = defaultdict(list)
        for key in client.get_run(run_id).data.metrics:
            for point in client.get_metric_history(run_id, key):
                values[key, point.step].append(None if math.isnan(point.value) else point.value)
        return dict(values)

    values = values_of(found.info.run_id)
    assert values == on_record(run / "metrics.jsonl")
    steps = sorted(number for key, number in values if key == "train/loss")
    assert steps == list(range(1, story.steps + 1)) and found.info.status == "FINISHED"
    below = {each.info.run_name: each for each in runs if each.info.run_id != found.info.run_id}
    assert {name: each.info.status for name, each in below.items()} == {"attempt 1": "KILLED", "attempt 2": "FINISHED"}
    for number in (1, 2):
        nodes = nodes_on_record(run / "metrics.jsonl", number)
        assert nodes and values_of(below[f"attempt {number}"].info.run_id) == nodes
    print(f"\n{len(steps)} of {story.steps} steps, {len(values)} values once each, {found.info.status}")


def check_pace(run: Path) -> None:
    """How long training was kept by its trackers, the record on disk included."""
    seconds = [float(line) for attempt in (1, 2) for line in (run / f"seconds.a{attempt}").read_text().split()]
    median, most, end = statistics.median(seconds), max(seconds), float((run / "end").read_text())
    print(f"{len(seconds)} steps: median {1e3 * median:.3f} ms, most {1e3 * most:.1f} ms; the end {end:.1f} s")
    assert median <= 1e-3 and most <= 50e-3 and end < 35


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_thousand_steps_through_every_fault_a_crash_and_an_end_without_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")  # what a user has set stays
    follow(tmp_path, Story())


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    server = Server(tmp_path / "server")
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()
    server.kill()


def basic(user: str, password: str) -> str:
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_server_that_wants_a_password_gets_it_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, guarded: Proxy
) -> None:
    """By all three ways that there are; without one, a line says so and the run has its record."""
    host = guarded.uri.removeprefix("http://")
    variables = {"MLFLOW_TRACKING_USERNAME": "alice", "MLFLOW_TRACKING_PASSWORD": "hunter2"}
    ways = [
        ("variables", guarded.uri, variables, basic("alice", "hunter2")),
        ("token", guarded.uri, {"MLFLOW_TRACKING_TOKEN": "hunter2"}, "Bearer hunter2"),
        ("address", f"http://alice:hunter2@{host}", {}, basic("alice", "hunter2")),
        ("none", guarded.uri, {}, basic("alice", "hunter2")),
    ]
    for name, uri, environment, guarded.wanted in ways:
        with monkeypatch.context() as here:
            for variable in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"):
                here.delenv(variable, raising=False)
            for variable, value in environment.items():
                here.setenv(variable, value)
            directory = tmp_path / name
            # What a config of a run has, as it is given to trackers.
            params = {"tracking.mlflow.uri": uri}
            mlflow = MlflowTracker(uri, experiment="e", directory=directory, finish_seconds=8 if name == "none" else 60)
            tracker = Composite([mlflow], record=JsonlTracker(directory))
            tracker.start(RunStart(name=name, attempt=1, total_steps=20, params=params, config=json.dumps(params)))
            for number in range(1, 21):
                tracker.steps([step(number)], world_size=1, attempt=1)
            tracker.event("saved", step=20, uri=uri)
            tracker.finish("finished")
            if name == "none":
                assert mlflow.unsent is not None and "401" in mlflow.unsent
            else:
                assert mlflow.unsent is None
            if name == "variables":
                (directory / "export").mkdir()
                (directory / "export" / "config.json").write_text("{}")
                run_id = (directory / "mlflow_run_id").read_text().strip()
                versions = [register(uri, run_id, directory / "export", "tiny", 20) for _ in range(2)]
                assert versions == ["1", "1"]
                assert any(
                    each.startswith("PUT") and each.endswith("export/model/config.json") for each in guarded.asked
                )
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"train/loss" in everything and b"hunter2" not in everything + caplog.text.encode()
