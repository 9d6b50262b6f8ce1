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

from raytune_fsdp.base.measured import StepMetrics
from raytune_fsdp.record.copies.mlflow_run import mlflow_name
from raytune_fsdp.record.jsonl import read_metrics
from raytune_fsdp.record.lines import is_number
from raytune_fsdp.record.names import node_values, once_in_gibibytes, step_values, with_perplexity

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
        self.texts: dict[tuple[str, str], str] = {}
        self.experiments: dict[str, SimpleNamespace] = {}
        self.versions: dict[str, list[Any]] = {}
        self.files: dict[tuple[str, str], bytes] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()

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
        return self._request("get_experiment_by_name", lambda: self.experiments.get(name))

    def create_experiment(self, name: str, artifact_location: str | None = None, tags: Any = None) -> str:
        def work() -> str:
            number = str(next(self._numbers))
            self.experiments[name] = SimpleNamespace(experiment_id=number, tags=dict(tags or {}))
            return number

        return str(self._request("create_experiment", work))

    def set_experiment_tag(self, experiment_id: str, key: str, value: str) -> None:
        (found,) = (each for each in self.experiments.values() if each.experiment_id == experiment_id)
        self._request("set_experiment_tag", lambda: found.tags.update({key: value}))

    def create_run(self, experiment: str, tags: dict[str, str], run_name: str) -> Any:
        def work() -> Any:
            run_id = f"run{next(self._numbers)}"
            info = SimpleNamespace(
                run_id=run_id, status="RUNNING", start_time=1_000_000, lifecycle_stage="active", run_name=run_name,
                experiment_id=experiment, artifact_uri=f"fake:/{run_id}",
            )  # fmt: skip
            self.runs[run_id] = SimpleNamespace(
                info=info,
                data=SimpleNamespace(tags=dict(tags), params={}, metrics={}),
                inputs=SimpleNamespace(dataset_inputs=[]),
            )
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
        self._request("log_text", lambda: self.texts.update({(run_id, name): text}))

    def log_artifact(self, run_id: str, file: str, directory: str) -> None:
        name = f"{directory}/{Path(file).name}"
        self._request("log_artifact", lambda: self.files.update({(run_id, name): Path(file).read_bytes()}))

    def log_inputs(self, run_id: str, datasets: list[Any]) -> None:
        self._request("log_inputs", lambda: self.runs[run_id].inputs.dataset_inputs.extend(datasets))

    def log_artifacts(self, run_id: str, directory: str, name: str) -> None:
        for file in Path(directory).rglob("*"):
            if file.is_file():
                self.log_artifact(run_id, str(file), str(Path(name, file.relative_to(directory).parent)))

    def search_model_versions(self, text: str) -> list[Any]:
        name = text.split("'")[1]
        return list(self._request("search_model_versions", lambda: list(self.versions.get(name, []))))

    def create_registered_model(self, name: str) -> None:
        if name in self.versions:
            from mlflow.exceptions import MlflowException
            from mlflow.protos.databricks_pb2 import RESOURCE_ALREADY_EXISTS

            raise MlflowException(name, error_code=RESOURCE_ALREADY_EXISTS)
        self._request("create_registered_model", lambda: self.versions.update({name: []}))

    def create_model_version(self, name: str, source: str, run_id: str, tags: Any, await_creation_for: int) -> Any:
        there = self.versions[name]
        version = SimpleNamespace(version=str(len(there) + 1), run_id=run_id, tags=tags, source=source)
        self._request("create_model_version", lambda: there.append(version))
        return version

    def get_metric_history(self, run_id: str, key: str) -> list[Any]:
        with self._lock:
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
            if run_id in self.whole():
                self.batches.append(sorted({each.step for each in metrics}))

        self._request("log_batch", work, points)

    def whole(self) -> list[str]:
        """The runs that are not below another one."""
        return [run_id for run_id, run in self.runs.items() if "mlflow.parentRunId" not in run.data.tags]

    def delete(self, run_id: str) -> None:
        self.runs[run_id].info.lifecycle_stage = "deleted"

    def _copy(self, run_id: str) -> Any:
        if run_id not in self.runs:
            from mlflow.exceptions import MlflowException
            from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST

            raise MlflowException(f"no run {run_id}", error_code=RESOURCE_DOES_NOT_EXIST)
        run = self.runs[run_id]
        data = SimpleNamespace(tags=dict(run.data.tags), params=dict(run.data.params), metrics=dict(run.data.metrics))
        inputs = SimpleNamespace(dataset_inputs=list(run.inputs.dataset_inputs))
        return SimpleNamespace(info=SimpleNamespace(**vars(run.info)), data=data, inputs=inputs)

    def of_attempts(self, run_id: str) -> dict[str, SimpleNamespace]:
        """The runs below a run, by the number of their attempt."""
        below = [run for run in self.runs.values() if run.data.tags.get("mlflow.parentRunId") == run_id]
        found = {run.data.tags["raytune_fsdp.attempt"]: run for run in below}
        assert len(found) == len(below), "one for each attempt"
        return found

    def values(self, run_id: str) -> dict[tuple[str, int], list[float | None]]:
        """All values of every key at every step."""
        found: dict[tuple[str, int], list[float | None]] = defaultdict(list)
        with self._lock:
            for key, _, step, value in self.points[run_id]:
                found[key, step].append(value)
        return found


def step(number: int, loss: float = 2.5, seconds: float = 2.0) -> StepMetrics:
    return StepMetrics(
        step=number, epoch=number / 7, samples="0" * 16, tokens=4096, target_tokens=1000, loss=loss,
        grad_norm=1.25 / number, lr=1e-4, skipped=False, step_seconds=seconds, data_seconds=0.01,
        tokens_per_second=12345.0 + number, mfu=None, memory_bytes=2**30,
    )  # fmt: skip


def on_record(path: Path, *, older: bool = False) -> dict[tuple[str, int], list[float | None]]:
    """What MLflow should have, from the record: one value for each key and step."""
    found: dict[tuple[str, int], list[float | None]] = {}
    for key, number, value in _values(path, older=older):
        assert is_number(value)
        found[mlflow_name(key), number] = [None if math.isnan(value) else value]
    return found


def nodes_on_record(path: Path, attempt: int, *, older: bool = False) -> dict[tuple[str, int], list[float | None]]:
    """What the run of an attempt should have; `older`: under the names of older runs and of other trackers."""
    return {
        (mlflow_name(key), line["trajectory"]["step"]): [value]
        for line in read_metrics(path)
        if line["kind"] == "step" and line["attempt"] == attempt
        for key, value in (node_values(line) if older else once_in_gibibytes(node_values(line))).items()
    }


def _values(path: Path, *, older: bool) -> Iterator[tuple[str, int, float]]:
    for line in read_metrics(path):
        if line["kind"] == "step":
            values = step_values(line) if older else once_in_gibibytes(step_values(line))
            yield from ((key, line["trajectory"]["step"], value) for key, value in values.items())
        else:
            yield from ((key, line["step"], value) for key, value in with_perplexity(line["values"]).items())
