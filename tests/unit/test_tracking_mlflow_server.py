"""A real MLflow server dies, hangs and is gone, while a run goes on at its pace, in a process that dies, too."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from raytune_fsdp.launch.quiet import quiet
from raytune_fsdp.tracking import Composite, RunStart
from raytune_fsdp.tracking.jsonl import JsonlTracker, read_trajectory
from raytune_fsdp.tracking.mlflow import MlflowTracker, mlflow_installed
from tests.mlflow_server import Server, until, whole
from tests.unit.fake_mlflow import on_record, step

pytestmark = pytest.mark.skipif(not mlflow_installed(), reason="MLflow is not installed")


@dataclass(frozen=True)
class Story:
    """When what happens, in steps and seconds."""

    steps: int = 2000
    a_second: float = 5.0
    commit_every: int = 50
    away_from: int = 300
    away_seconds: float = 120.0
    hangs_from: int = 1200
    hangs_seconds: float = 30.0
    dies_at: int = 1507
    """Seven steps past a commit."""
    gone_from: int = 1700


def train(directory: Path, uri: str, story: Story, attempt: int, first: int, last: int) -> None:
    """A process that trains: it writes steps at their pace, commits, and at `dies_at` it is gone."""
    quiet()
    mlflow = MlflowTracker(uri, experiment="story", directory=directory)
    tracker = Composite([mlflow], record=JsonlTracker(directory))
    tracker.start(RunStart(name="story", attempt=attempt, resumed_from=first - 1, total_steps=story.steps))
    slowest, began = 0.0, time.monotonic()
    for number in range(first, last + 1):
        time.sleep(max(0.0, began + (number - first) / story.a_second - time.monotonic()))
        tracker.steps([step(number, 1 / number, 1 / story.a_second)], world_size=1, attempt=attempt)
        if number == story.dies_at and attempt == 1:
            os._exit(9)
        before = time.perf_counter()
        if number % story.commit_every == 0 or number == last:
            mlflow.event("saved", step=number)
            mlflow.state()
            tracker.evaluation(number, {"eval/x/loss": 2 / number})
        slowest = max(slowest, time.perf_counter() - before)
    before = time.perf_counter()
    tracker.finish("finished")
    (directory / "times").write_text(f"{slowest} {time.perf_counter() - before}")


def tell(directory: Path, uri: str, story: Story, seconds: float = 120.0) -> str | None:
    """One more start of the finished run: what MLflow has not got after it."""
    tracker = MlflowTracker(uri, experiment="story", directory=directory, finish_seconds=seconds)
    tracker.start(RunStart(name="story", attempt=2, resumed_from=story.steps, total_steps=story.steps, over=True))
    tracker.finish("finished")
    return tracker.unsent


def follow(directory: Path, story: Story) -> None:
    run, server = directory / "run", Server(directory / "server")
    processes = multiprocessing.get_context("spawn")

    def trained(number: int) -> Callable[[], bool]:
        return lambda: len(read_trajectory(run / "metrics.jsonl")) >= number

    def wait_for_step(number: int) -> None:
        until(trained(number), 60 + 2 * number / story.a_second, f"step {number} does not come")

    try:
        first = processes.Process(target=train, args=(run, server.uri, story, 1, 1, story.steps))
        first.start()
        wait_for_step(story.away_from)
        server.kill()
        time.sleep(story.away_seconds)
        server.start()
        wait_for_step(story.hangs_from)
        server.send(signal.SIGSTOP)
        time.sleep(story.hangs_seconds)
        server.send(signal.SIGCONT)
        first.join(60 + 2 * story.steps / story.a_second)
        assert first.exitcode == 9
        committed = story.dies_at // story.commit_every * story.commit_every
        assert len(read_trajectory(run / "metrics.jsonl")) == story.dies_at == committed + 7
        second = processes.Process(target=train, args=(run, server.uri, story, 2, committed + 1, story.steps))
        second.start()
        wait_for_step(story.gone_from)
        server.kill()
        second.join(60 + 2 * story.steps / story.a_second)
        assert second.exitcode == 0
        slowest, end = map(float, (run / "times").read_text().split())
        print(f"\nslowest call {slowest:.3f} s, end {end:.1f} s; ", end="")
        assert slowest < 0.5 and end < 35
        assert tell(run, server.uri, story, seconds=1.0) is not None
        server.start()
        assert tell(run, server.uri, story) is None
        check(run, server.uri, story)
    finally:
        server.kill()


def check(run: Path, uri: str, story: Story) -> None:
    """Every step, one value each, equal to the record."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("story")
    (found,) = whole(client.search_runs([experiment.experiment_id]))
    values: dict[tuple[str, int], list[float | None]] = defaultdict(list)
    for key in found.data.metrics:
        for point in client.get_metric_history(found.info.run_id, key):
            values[key, point.step].append(None if math.isnan(point.value) else point.value)
    assert dict(values) == on_record(run / "metrics.jsonl")
    steps = sorted(number for key, number in values if key == "train/loss")
    assert steps == list(range(1, story.steps + 1)) and found.info.status == "FINISHED"
    print(f"{len(steps)} of {story.steps} steps, {len(values)} values once each, {found.info.status}")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_thousand_steps_through_an_outage_a_hang_a_crash_and_an_end_without_a_server(tmp_path: Path) -> None:
    follow(tmp_path, Story())
