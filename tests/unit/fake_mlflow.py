"""An MLflow server in memory, that keeps what the real one keeps, holds its limits, and fails when told to."""

from __future__ import annotations

import itertools
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from raytune_fsdp.tracking.jsonl import read_metrics
from raytune_fsdp.tracking.lines import is_number
from raytune_fsdp.tracking.names import step_values, with_perplexity
from raytune_fsdp.tracking.points import mlflow_name
from raytune_fsdp.types import StepMetrics

Fault = Literal["away", "lost", "half"] | BaseException | None
"""The request does not arrive; its answer is lost; the server dies after the points, before the tags; or an error."""


class FakeServer:
    """Has the methods of `MlflowClient` that are used, and is its own client."""

    def __init__(self) -> None:
        self.runs: dict[str, SimpleNamespace] = {}
        self.points: dict[str, set[tuple[str, int, int, float | None]]] = defaultdict(set)
        self.fault: Callable[[str], Fault] = lambda call: None
        self.calls: list[str] = []
        self.batches: list[list[int]] = []
        self.texts: dict[str, str] = {}
        self._experiments: dict[str, str] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def _request(self, call: str, work: Callable[[], Any], first: Callable[[], None] | None = None) -> Any:
        with self._lock:
            self.calls.append(call)
            fault = self.fault(call)
            if isinstance(fault, BaseException):
                raise fault
            if fault == "half":
                (first or work)()
            elif fault != "away":
                done = work()
                if fault is None:
                    return done
        raise ConnectionError(f"{call}: no answer")

    def get_experiment_by_name(self, name: str) -> Any:
        found = self._experiments.get(name)
        return self._request("get_experiment_by_name", lambda: found and SimpleNamespace(experiment_id=found))

    def create_experiment(self, name: str, artifact_location: str | None = None) -> str:
        def work() -> str:
            self._experiments[name] = str(next(self._numbers))
            return self._experiments[name]

        return str(self._request("create_experiment", work))

    def create_run(self, experiment: str, tags: dict[str, str], run_name: str) -> Any:
        def work() -> Any:
            run_id = f"run{next(self._numbers)}"
            info = SimpleNamespace(
                run_id=run_id, status="RUNNING", start_time=1_000_000, lifecycle_stage="active", run_name=run_name
            )
            self.runs[run_id] = SimpleNamespace(info=info, data=SimpleNamespace(tags=dict(tags), params={}, metrics={}))
            return self._copy(run_id)

        return self._request("create_run", work)

    def search_runs(self, experiments: list[str], text: str) -> list[Any]:
        _, key, _, _, *_ = text.split("`") + ["", ""]
        value = text.split("'")[1]
        return list(
            self._request(
                "search_runs",
                lambda: [
                    self._copy(each)
                    for each, run in self.runs.items()
                    if run.data.tags.get(key) == value and run.info.lifecycle_stage == "active"
                ],
            )
        )

    def get_run(self, run_id: str) -> Any:
        return self._request("get_run", lambda: self._copy(run_id))

    def update_run(self, run_id: str, status: str) -> None:
        self._request("update_run", lambda: setattr(self.runs[run_id].info, "status", status))

    def set_terminated(self, run_id: str, status: str) -> None:
        self._request("set_terminated", lambda: setattr(self.runs[run_id].info, "status", status))

    def log_text(self, run_id: str, text: str, name: str) -> None:
        self._request("log_text", lambda: self.texts.update({name: text}))

    def get_metric_history(self, run_id: str, key: str) -> list[Any]:
        found = [SimpleNamespace(step=step) for name, _, step, _ in self.points[run_id] if name == key]
        return list(self._request("get_metric_history", lambda: found))

    def log_batch(
        self, run_id: str, metrics: Sequence[Any] = (), params: Sequence[Any] = (), tags: Sequence[Any] = (), **_: bool
    ) -> None:
        assert len(metrics) <= 1000 and len(params) <= 100 and len(tags) <= 100
        assert len(metrics) + len(params) + len(tags) <= 1000, "the client would split it"
        data = self.runs[run_id].data
        if self.runs[run_id].info.lifecycle_stage != "active":
            from mlflow.exceptions import MlflowException

            raise MlflowException.invalid_parameter_value("the run must be in the 'active' state")

        def points() -> None:
            for each in metrics:
                value = None if math.isnan(each.value) else float(each.value)
                self.points[run_id].add((each.key, each.timestamp, each.step, value))
                data.metrics[each.key] = each.value
            data.params.update({each.key: each.value for each in params})

        def work() -> None:
            points()
            data.tags.update({each.key: each.value for each in tags})
            self.batches.append(sorted({each.step for each in metrics}))

        self._request("log_batch", work, points)

    def delete(self, run_id: str) -> None:
        self.runs[run_id].info.lifecycle_stage = "deleted"

    def _copy(self, run_id: str) -> Any:
        if run_id not in self.runs:
            from mlflow.exceptions import MlflowException
            from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST

            raise MlflowException(f"no run {run_id}", error_code=RESOURCE_DOES_NOT_EXIST)
        run = self.runs[run_id]
        data = SimpleNamespace(tags=dict(run.data.tags), params=dict(run.data.params), metrics=dict(run.data.metrics))
        return SimpleNamespace(info=SimpleNamespace(**vars(run.info)), data=data)

    def values(self, run_id: str) -> dict[tuple[str, int], list[float | None]]:
        """All values of every key at every step."""
        found: dict[tuple[str, int], list[float | None]] = defaultdict(list)
        for key, _, step, value in self.points[run_id]:
            found[key, step].append(value)
        return found


def step(number: int, loss: float = 2.5, seconds: float = 2.0) -> StepMetrics:
    return StepMetrics(
        step=number, epoch=number / 7, samples="0" * 16, tokens=4096, target_tokens=1000, loss=loss,
        grad_norm=1.25 / number, lr=1e-4, skipped=False, step_seconds=seconds, data_seconds=0.01,
        tokens_per_second=12345.0 + number, mfu=None, memory_bytes=2**30,
    )  # fmt: skip


def on_record(path: Path) -> dict[tuple[str, int], list[float | None]]:
    """What MLflow should have, from the record: one value for each key and step."""
    found: dict[tuple[str, int], list[float | None]] = {}
    for key, number, value in _values(path):
        assert is_number(value)
        found[mlflow_name(key), number] = [None if math.isnan(value) else value]
    return found


def _values(path: Path) -> Iterator[tuple[str, int, float]]:
    for line in read_metrics(path):
        if line["kind"] == "step":
            yield from ((key, line["trajectory"]["step"], value) for key, value in step_values(line).items())
        else:
            yield from ((key, line["step"], value) for key, value in with_perplexity(line["values"]).items())
