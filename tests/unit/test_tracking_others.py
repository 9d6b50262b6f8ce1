"""TensorBoard's real files, and Weights & Biases and Ray's gauges in the place of which something notes its calls.

wandb is not a dependency and not installed: `FakeWandb` has the signatures of wandb 0.19 that are called.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.launch.start import run
from raytune_fsdp.record.copies import following
from raytune_fsdp.record.copies.tensorboard import TensorboardTracker
from raytune_fsdp.record.copies.wandb import WandbTracker
from raytune_fsdp.record.jsonl import JsonlTracker, append_evaluation
from raytune_fsdp.record.lines import evaluation_line, step_lines, to_bytes
from raytune_fsdp.record.names import labelled
from raytune_fsdp.record.tracker import Composite, RunStart, Tracker
from raytune_fsdp.run import checks
from raytune_fsdp.run.checks import check_trackers, warn_of_place
from tests.runs import make_config
from tests.unit.fake_mlflow import nodes_on_record, on_record, step

Values = dict[tuple[str, int], list[float | None]]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "MAX_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(following, "LAST_PAUSES_SECONDS", 0.001)


def attempt(directory: Path, tracker: Tracker, number: int, first: int, last: int) -> Composite:
    """Steps, with a commit and then an evaluation after every tenth."""
    both = Composite([tracker], record=JsonlTracker(directory))
    both.start(RunStart(name="demo", attempt=number, resumed_from=first - 1, total_steps=60, params={"lr": number}))
    for each in range(first, last + 1):
        loss = math.nan if each == 7 else 1 / each + number
        both.steps([replace(step(each, loss), nodes=(("a", 3e9, 1e9, None, None),))], world_size=1, attempt=number)
        if each % 10 == 0:
            both.event("saved", step=each)
            both.evaluation(each, {"eval/x/loss": 2.0 / each})
    return both


def hand_over(tracker: following.Follower) -> None:
    """The end of an attempt's process. Here it would send the line that it is at while the next attempt does."""
    tracker.finish("handed_over")
    assert tracker._thread is not None
    tracker._thread.join(20)


def recorded(directory: Path) -> Values:
    metrics = directory / "metrics.jsonl"
    found = on_record(metrics, older=True)
    return found | nodes_on_record(metrics, 1, older=True) | nodes_on_record(metrics, 2, older=True)


def drawn(directory: Path) -> Values:
    """What TensorBoard shows: of several files, what a later one purges is not there."""
    from tensorboardX.proto.event_pb2 import Event

    found: Values = {}
    for file in sorted((directory / "tensorboard").glob("events.*")):
        raw, place = file.read_bytes(), 0
        while place < len(raw):
            size = int.from_bytes(raw[place : place + 8], "little")
            event = Event.FromString(raw[place + 12 : place + 12 + size])
            place += 16 + size
            if event.HasField("session_log"):
                found = {key: values for key, values in found.items() if key[1] < event.step}
            for value in event.summary.value:
                number = None if math.isnan(value.simple_value) else value.simple_value
                found.setdefault((value.tag, event.step), []).append(number)
    return found


def test_tensorboard_has_every_value_once_after_a_crash_past_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboardX")
    first = TensorboardTracker(tmp_path)
    attempt(tmp_path, first, 1, 1, 27)
    until(lambda: first._steps.sent.step == 20)
    hand_over(first)  # the process is gone: nothing of steps 21 to 27 is there
    fail_at_flush(monkeypatch, 2)
    second = TensorboardTracker(tmp_path)
    attempt(tmp_path, second, 2, 21, 60).finish("finished")
    assert second.unsent is None
    assert drawn(tmp_path) == in_32_bits(recorded(tmp_path))


def fail_at_flush(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The lines are in the file, and nobody says so."""
    fails = iter([None] * (number - 1) + [OSError("the disk is full")])
    flush = TensorboardTracker._flush

    def flaky(self: TensorboardTracker) -> None:
        flush(self)
        if error := next(fails, None):
            raise error

    monkeypatch.setattr(TensorboardTracker, "_flush", flaky)


def in_32_bits(found: Values) -> Any:
    return {
        key: [None if value is None else pytest.approx(value, rel=1e-6) for value in values]
        for key, values in found.items()
    }


def test_tensorboard_has_an_evaluation_once_that_was_written_apart_from_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboardX")
    write = TensorboardTracker._write

    def slow(self: TensorboardTracker, place: following.Position, line: Mapping[str, Any]) -> None:
        write(self, place, line)
        time.sleep(0.11)  # each line is flushed by itself

    monkeypatch.setattr(TensorboardTracker, "_write", slow)
    fail_at_flush(monkeypatch, 11)  # ten steps, then the evaluation after the tenth
    tracker = TensorboardTracker(tmp_path)
    attempt(tmp_path, tracker, 1, 1, 10).finish("finished")
    assert drawn(tmp_path) == in_32_bits(recorded(tmp_path))


class FakeWandb(SimpleNamespace):
    """Keeps a history as W&B does: a step less than the last one is dropped, an equal one is added to, and what comes
    without a step ends the row. A run that is resumed begins a new row."""

    def __init__(self) -> None:
        super().__init__(Settings=lambda **settings: settings)
        self.history: dict[int, dict[str, float]] = {}
        self.inits: list[dict[str, Any]] = []
        self.codes: list[int | None] = []
        self.axes: dict[str, str | None] = {}
        self.step = 0
        """Of the row that is open; a step before it is dropped."""
        self.gate = threading.Event()
        self.gate.set()

    def init(self, **given: Any) -> FakeWandb:
        self.gate.wait(30)
        self.inits.append(given)
        self.step = max(self.history, default=-1) + 1
        return self

    def define_metric(self, name: str, step_metric: str | None = None, hidden: bool | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        at = self.step if step is None else step
        if at >= self.step:
            self.history.setdefault(at, {}).update(data)
            self.step = at + (step is None)

    def finish(self, exit_code: int | None = None, quiet: bool | None = None) -> None:
        self.codes.append(exit_code)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWandb]:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    yield fake
    fake.gate.set()


def test_wandb_has_one_run_with_every_value(tmp_path: Path, wandb: FakeWandb) -> None:
    first = WandbTracker(tmp_path, project="p", entity="team")
    attempt(tmp_path, first, 1, 1, 27)
    until(lambda: first._steps.sent == following.Position(20, 2))
    hand_over(first)
    second = WandbTracker(tmp_path, project="p", entity="team")
    attempt(tmp_path, second, 2, 21, 60).finish("finished")
    found: Values = {
        (key, number): [None if math.isnan(value) else value]
        for number, values in wandb.history.items()
        for key, value in values.items()
    }
    assert found == recorded(tmp_path) and wandb.codes == [0]
    one, two = wandb.inits
    assert one["id"] == two["id"] == (tmp_path / "wandb_run_id").read_text().strip() and two["resume"] == "allow"
    assert (one["project"], one["entity"], one["name"], two["config"]) == ("p", "team", "demo", {"lr": 2})


def test_wandb_has_the_evaluations_of_the_step_at_which_a_run_is_resumed(tmp_path: Path, wandb: FakeWandb) -> None:
    """W&B is at the next step then. An attempt may make up for an evaluation, and the command may send the last one."""
    first = WandbTracker(tmp_path, project="p")
    both = Composite([first], record=JsonlTracker(tmp_path))
    both.start(RunStart(name="demo", attempt=1, total_steps=21))
    for each in (19, 20):
        both.steps([step(each, 1.0)], world_size=1, attempt=1)
    both.evaluation(20, {"eval/x/loss": 0.5})
    both.event("saved", step=20)
    until(lambda: first._steps.sent == following.Position(20, 2))
    hand_over(first)
    second = WandbTracker(tmp_path, project="p")
    second.start(RunStart(name="demo", attempt=2, resumed_from=20, total_steps=21))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(to_bytes(evaluation_line(20, {"eval/y/loss": 0.25}, 2)))
        file.write(b"".join(map(to_bytes, step_lines([step(21, 2.0)], 1, 2))))
    second.event("saved", step=21)
    until(lambda: second._steps.sent.step == 21)
    second._failed()  # and what was given is not given again
    hand_over(second)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(to_bytes(evaluation_line(21, {"eval/x/loss": 0.125}, 2)))
    third = WandbTracker(tmp_path, project="p")
    third.start(RunStart(name="demo", attempt=3, total_steps=21, over=True, committed=21))
    third.finish("finished")
    assert third.unsent is None
    assert wandb.axes == {"evaluated_step": None}, "earlier evaluations would not be in curves over it"
    said = {
        number: {name: value for name, value in row.items() if name.startswith("eval")}
        for number, row in wandb.history.items()
    }
    assert said == {
        19: {}, 20: {"eval/x/loss": 0.5, "eval/x/perplexity": math.exp(0.5)},
        21: {"eval/y/loss": 0.25, "eval/y/perplexity": math.exp(0.25), "evaluated_step": 20},
        22: {"eval/x/loss": 0.125, "eval/x/perplexity": math.exp(0.125), "evaluated_step": 21},
    }  # fmt: skip


@pytest.mark.parametrize("receiver", ["tensorboard", "wandb"])
def test_what_is_measured_beside_training_follows(tmp_path: Path, wandb: FakeWandb, receiver: str) -> None:
    """Also what comes after the ranks have ended: the command sends it then, and nothing twice."""
    if receiver == "tensorboard":
        pytest.importorskip("tensorboardX")

    def tracker() -> TensorboardTracker | WandbTracker:
        return TensorboardTracker(tmp_path) if receiver == "tensorboard" else WandbTracker(tmp_path, project="p")

    def measured(step: int) -> None:
        append_evaluation(tmp_path / "evaluations.jsonl", step, {"eval/late/loss": 1.0 / step}, attempt=1)

    def by_command() -> None:
        last = tracker()
        last.start(RunStart(name="demo", attempt=3, total_steps=60, over=True, committed=60))
        last.finish("finished")
        assert last.unsent is None

    measured(10)
    first = tracker()
    attempt(tmp_path, first, 1, 1, 27)
    until(lambda: first._steps.sent == following.Position(20, 2) and first._measured.sent.step == 10)
    hand_over(first)
    measured(20)
    attempt(tmp_path, second := tracker(), 2, 21, 50)
    # Between a step and its evaluation, W&B would get that one in the next row, as where a run is resumed there.
    until(lambda: second._steps.sent == following.Position(50, 2))
    hand_over(second)
    attempt(tmp_path, tracker(), 3, 51, 60).finish("finished")
    measured(40)
    measured(60)
    by_command()
    by_command()
    steps = recorded(tmp_path)
    if receiver == "tensorboard":
        found = drawn(tmp_path)
        late = {step: values for (key, step), values in found.items() if key == "eval/late/loss"}
        assert late == {step: [pytest.approx(1.0 / step)] for step in (10, 20, 40, 60)}
        before = sorted((tmp_path / "tensorboard").iterdir())
        by_command()
        assert sorted((tmp_path / "tensorboard").iterdir()) == before, "nothing to send, nothing opened"
    else:
        rows = [row for row in wandb.history.values() if "eval/late/loss" in row]
        assert [(row["evaluated_step"], row["eval/late/loss"]) for row in rows] == [
            (step, 1.0 / step) for step in (10, 20, 40, 60)
        ]
        assert wandb.axes == {"evaluated_step": None, "eval/*": "evaluated_step"}
        kept = {(key, number) for number, values in wandb.history.items() for key in values}
        assert steps.keys() <= kept, "no step was dropped for it"


def test_a_library_that_hangs_keeps_nobody_waiting(tmp_path: Path, wandb: FakeWandb) -> None:
    wandb.gate.clear()
    tracker = WandbTracker(tmp_path, project="p", finish_seconds=0.3)
    before = time.monotonic()
    both = attempt(tmp_path, tracker, 1, 1, 60)
    both.finish("finished")
    assert time.monotonic() - before < 5 and wandb.inits == []
    assert tracker.unsent == "Weights & Biases has 0 of 60 steps of this run; the same command sends the rest"


def test_a_library_that_is_missing_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(**tracking: Any) -> Any:
        return make_config(tmp_path, tracking=tracking)

    with pytest.raises(ConfigError, match="tracking.wandb.enabled=true, but wandb is not installed: pip install wandb"):
        run(chosen(wandb={"enabled": True}))
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install tensorboardX"):
        check_trackers(chosen(tensorboard={"enabled": True}))
    with pytest.raises(ConfigError, match="this run is without Ray"):
        run(chosen(prometheus={"enabled": True}))
    with pytest.raises(ValidationError, match="registers the export at the end: set export.at_end=true"):
        chosen(mlflow={"register": "tiny"})
    with pytest.raises(ValidationError, match="needs MLflow: set enabled=true"):
        chosen(mlflow={"enabled": False, "register": "tiny"})
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("train/loss", ("train_loss", "")),
        ("train/my code/loss", ("train_loss", "my code")),
        ("train/rewards/margins", ("train_rewards_margins", "")),
        ("train/my code/logps/chosen", ("train_logps_chosen", "my code")),
        ("train/kl", ("train_kl", "")),
        ("eval/a/b/perplexity", ("eval_perplexity", "a/b")),
        ("perf/step_seconds/slowest", ("perf_step_seconds_slowest", "")),
        ("train/expert_load/mean", ("train_expert_load_mean", "")),
        ("system/node-1.x/host_rss", ("system_host_rss", "node-1.x")),
    ],
)
def test_names_for_prometheus(key: str, found: tuple[str, str]) -> None:
    assert labelled(key) == found


def test_rays_gauges_have_the_newest_step(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from raytune_fsdp.launch.ray.prometheus import PrometheusTracker

    now: dict[tuple[str, str], float] = {}

    class Gauge:
        def __init__(self, name: str, description: str = "", tag_keys: tuple[str, ...] | None = None) -> None:
            assert tag_keys == ("run", "of") and (name, "") not in now, "one gauge of a name"
            self.name = name

        def set(self, value: float | None, tags: Mapping[str, str] | None = None) -> None:
            assert tags is not None and tags["run"] == "demo"
            now[self.name, tags["of"]] = value or 0.0

    tracker = PrometheusTracker("demo", Gauge)
    datasets = (("code", 3.0, 0.5, 10), ("chat", 1.0, 0.25, 20))
    for number in (1, 2):
        newest = replace(step(number, loss=number), datasets=datasets)
        tracker.steps([step(9), newest], world_size=1, attempt=1)
    tracker.evaluation(2, {"eval/x/loss": 1.5})
    assert now["raytune_fsdp_train_loss", ""] == 2 and now["raytune_fsdp_train_step", ""] == 2
    assert (now["raytune_fsdp_train_loss", "code"], now["raytune_fsdp_train_accuracy", "chat"]) == (3.0, 0.25)
    assert now["raytune_fsdp_eval_perplexity", "x"] == math.exp(1.5)


def until(condition: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_server_that_only_the_shell_names_is_not_used_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def said(**mlflow: Any) -> str:
        caplog.clear()
        config = make_config(tmp_path)
        chosen = {**config.tracking.mlflow.model_dump(), "enabled": True, **mlflow}
        warn_of_place(config.model_validate(config.model_dump() | {"tracking": {"mlflow": chosen}}))
        return caplog.text

    monkeypatch.setattr(checks, "mlflow_installed", lambda: True)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert "MLFLOW" not in said()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://alice:hunter2@team:5000")
    text = said()
    assert "MLFLOW_TRACKING_URI=https://team:5000 is set, and not used" in text and "set tracking.mlflow.uri" in text
    assert "hunter2" not in text and "alice" not in text
    assert "MLFLOW" not in said(uri="https://other:5000") + said(enabled=False)
