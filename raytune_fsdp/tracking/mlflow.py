"""The run in MLflow: params, metrics by step, the config and the plan. The only module that imports mlflow.

A call to a server that is down can block for minutes, so training only puts parcels into a bounded outbox. One daemon
thread imports mlflow (a second or two), opens the run and sends. A server that comes back gets what it missed, as far
as the outbox reaches; `metrics.jsonl` has everything.
"""

from __future__ import annotations

import json
import logging
import os
import posixpath
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from raytune_fsdp.durable import keep_private
from raytune_fsdp.errors import in_one_line
from raytune_fsdp.redaction import redact, redact_text, redact_yaml
from raytune_fsdp.tracking.muted import muted
from raytune_fsdp.tracking.names import values_of
from raytune_fsdp.tracking.outbox import Outbox, Parcel, Point
from raytune_fsdp.tracking.tracker import RunStart, Status
from raytune_fsdp.types import StepMetrics
from raytune_fsdp.untrusted import read_file

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

RUN_ID = "mlflow_run_id"
"""Key of the run's id in `Tracker.state`."""

# MLflow's limits. A batch that exceeds one is refused as a whole.
_MAX_METRICS, _MAX_PARAMS, _MAX_TAGS = 1000, 100, 100
_MAX_PARAM_CHARS, _MAX_TAG_CHARS, _MAX_KEY_CHARS = 6000, 5000, 250
# A step has up to nine metrics, so a hundred steps stay below _MAX_METRICS.
_STEPS_PER_PARCEL = 100
# Pauses double from two seconds; the last one comes before the only try that is left once the run has ended.
_MAX_PAUSE_SECONDS = 60.0
_LAST_PAUSE_SECONDS = 1.0

# The client's own retries would keep `finish` waiting: 7 of them, 246 s in all. Telemetry is not ours to send.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
_NOISY_LOGGERS = (
    "alembic.runtime.migration",
    "alembic.runtime.plugins",
    "mlflow.store.db.utils",
    "urllib3.connectionpool",
)
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
# MLflow's codes for a run that is not there (the second: its id is not one of this server's), and for a batch that no
# other try will help.
_GONE = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
_REFUSED = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")


def mlflow_installed() -> bool:
    return find_spec("mlflow") is not None


class MlflowTracker:
    """Keeps one MLflow run per run, however often that is resumed. Never raises, and waits no longer than its timeouts.

    `artifact_root` is used when the experiment is created; None where a server decides. `id_file` keeps the run's id
    outside of the checkpoints, for an attempt that crashes before its first one.
    """

    def __init__(
        self,
        uri: str,
        *,
        experiment: str,
        artifact_root: str | None = None,
        id_file: Path | None = None,
        queue_batches: int = 1000,
        state_timeout_seconds: float = 20.0,
        finish_timeout_seconds: float = 30.0,
    ) -> None:
        self._uri = uri
        self._experiment = experiment
        self._artifact_root = artifact_root
        self._id_file = id_file
        self._outbox = Outbox(queue_batches)
        self._patience_seconds = state_timeout_seconds
        self._finish_timeout_seconds = finish_timeout_seconds
        self._thread: threading.Thread | None = None
        self._settled = threading.Event()  # the run is open, or a first attempt at it has failed
        self._run = RunStart(name="", attempt=0)
        self._run_id: str | None = None
        self._client: MlflowClient | None = None
        self._status: Status = "finished"
        self._ended = False
        self._abandoned = False

    def start(self, run: RunStart) -> None:
        # Before the thread imports mlflow, which may read them only then. What the user has set stays.
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._run = run
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def steps(self, metrics: Sequence[StepMetrics], world_size: int, attempt: int) -> None:
        for first in range(0, len(metrics), _STEPS_PER_PARCEL):
            self._outbox.put(Parcel(points=tuple(_points(metrics[first : first + _STEPS_PER_PARCEL]))))

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        now = _now()
        self._outbox.put(Parcel(points=tuple((_name(key), float(value), now, step) for key, value in values.items())))

    def event(self, name: str, /, **fields: object) -> None:
        """Keeps the last event of every name, as a tag."""
        text = json.dumps(redact(fields), default=str)[:_MAX_TAG_CHARS]
        self._outbox.put(Parcel(tags={_name(f"event.{name}"): text}))

    def state(self) -> dict[str, str]:
        """The run's id. Waits for it, but only once: checkpoints must not wait for a dead server again and again."""
        if self._thread is not None and not self._settled.wait(self._patience_seconds):
            self._patience_seconds = 0.0
        run_id = self._run_id or self._run.state.get(RUN_ID)
        return {RUN_ID: run_id} if run_id else {}

    def sync(self) -> None:
        """Does nothing: a commit does not wait for MLflow. What it misses is in `metrics.jsonl`."""

    def finish(self, status: Status) -> None:
        """Sends the rest, and the status, within the deadline. Warns if some could not be sent."""
        if self._thread is None or self._outbox.closed:
            return
        self._status = status
        self._outbox.close()
        self._thread.join(self._finish_timeout_seconds)
        self._abandoned = not self._ended
        if self._outbox.left or self._outbox.dropped or not self._ended:
            logger.warning(
                "MLflow at %s did not take everything: %d batches left at the end, %d dropped; metrics.jsonl has all",
                redact_text(self._uri),
                self._outbox.left,
                self._outbox.dropped,
            )

    # ---- from here on: what the thread does ----

    def _work(self) -> None:
        failures = 0
        with muted(*_NOISY_LOGGERS):
            while not self._ended and not self._abandoned:
                try:
                    self._advance()
                    failures = 0
                except Exception as error:  # foreign code; whatever it raises must not reach training
                    failures += 1
                    self._settled.set()
                    if failures == 1:
                        logger.warning("MLflow at %s: %s", redact_text(self._uri), redact_text(in_one_line(error)))
                    if self._outbox.closed and failures > 1:
                        return
                    self._outbox.wait_closed(min(2.0**failures, _MAX_PAUSE_SECONDS))
                    if self._outbox.closed and failures == 1:
                        time.sleep(_LAST_PAUSE_SECONDS)

    def _advance(self) -> None:
        """Opens the run, or sends what waits, or ends the run."""
        if self._client is None:
            self._client = self._open()
            self._settled.set()
            return
        run_id = self._run_id or ""
        if parcels := self._outbox.take(_MAX_METRICS, _MAX_TAGS):
            self._send(self._client, run_id, parcels)
        else:
            self._client.set_terminated(run_id, _STATUS[self._status])
            self._ended = True

    def _open(self) -> MlflowClient:
        from mlflow.tracking import MlflowClient

        if self._uri.startswith("sqlite:///"):
            file = Path(self._uri.removeprefix("sqlite:///").partition("?")[0])
            file.parent.mkdir(parents=True, exist_ok=True)
            keep_private(file)  # before MLflow makes it; an empty file is an empty database
        client = MlflowClient(self._uri)
        run_id, params = self._resumed(client)
        if run_id is None:
            run_id = str(client.create_run(self._experiment_id(client), run_name=self._run.name).info.run_id)
            # Known from here on: if anything below fails, the next try must not create a second run.
            self._run_id = run_id
            if self._id_file is not None:
                self._id_file.parent.mkdir(parents=True, exist_ok=True)
                self._id_file.write_text(f"{run_id}\n")
        self._run_id = run_id
        self._describe(client, run_id, known=params)
        logger.info("MLflow run %s (%s) at %s", run_id, self._experiment, redact_text(self._uri))
        return client

    def _resumed(self, client: MlflowClient) -> tuple[str | None, Mapping[str, str]]:
        """Id and params of the run to continue: the one of this attempt, of the checkpoint, or of the run directory."""
        from mlflow.exceptions import MlflowException

        run_id = self._run_id or self._run.state.get(RUN_ID)
        if run_id is None and self._id_file is not None and self._id_file.exists():
            run_id = read_file(self._id_file, limit=1024).decode().strip()
        if not run_id:
            return None, {}
        try:
            run = client.get_run(run_id)
        except MlflowException as error:
            if error.error_code not in _GONE:
                raise
            run = None
        if run is None or run.info.lifecycle_stage != "active":
            where = redact_text(self._uri)
            logger.warning("MLflow at %s no longer has run %s; metrics go to a new one from here on", where, run_id)
            return None, {}
        client.update_run(run_id, status="RUNNING")
        return run_id, run.data.params

    def _experiment_id(self, client: MlflowClient) -> str:
        from mlflow.exceptions import MlflowException

        if found := client.get_experiment_by_name(self._experiment):
            return str(found.experiment_id)
        try:
            return str(client.create_experiment(self._experiment, artifact_location=self._artifact_root))
        except MlflowException as error:
            # Another run may have created it since we asked.
            found = client.get_experiment_by_name(self._experiment)
            if error.error_code == "RESOURCE_ALREADY_EXISTS" and found:
                return str(found.experiment_id)
            raise

    def _describe(self, client: MlflowClient, run_id: str, *, known: Mapping[str, str]) -> None:
        """Sends params, tags and artifacts. In MLflow a param never changes: a resumed run keeps its first value."""
        from mlflow.entities import Param, RunTag
        from mlflow.exceptions import MlflowException

        run = self._run
        tags = {"raytune_fsdp.attempt": str(run.attempt), "raytune_fsdp.resumed_from": str(run.resumed_from)}
        params = {_name(key): str(redact(value, key))[:_MAX_PARAM_CHARS] for key, value in run.params.items()}
        new = [Param(key, value) for key, value in params.items() if key not in known]
        try:
            client.log_batch(run_id, tags=[RunTag(*tag) for tag in tags.items()], synchronous=True)
            for first in range(0, len(new), _MAX_PARAMS):
                client.log_batch(run_id, params=new[first : first + _MAX_PARAMS], synchronous=True)
        except MlflowException as error:
            if error.error_code not in _REFUSED:
                raise
            logger.warning("MLflow did not take the params of run %s: %s", run_id, redact_text(in_one_line(error)))
        try:
            client.log_text(run_id, redact_yaml(run.config), "config.yaml")
            client.log_text(run_id, json.dumps(redact(run.plan), indent=2, default=str), "plan.json")
        except Exception as error:  # artifacts may live in another store than metrics, and must not cost those
            logger.warning("MLflow did not take the artifacts of run %s: %s", run_id, redact_text(in_one_line(error)))

    def _send(self, client: MlflowClient, run_id: str, parcels: Sequence[Parcel]) -> None:
        from mlflow.entities import Metric, RunTag
        from mlflow.exceptions import MlflowException

        metrics = [Metric(*point) for parcel in parcels for point in parcel.points]
        tags = [RunTag(*tag) for parcel in parcels for tag in parcel.tags.items()]
        try:
            # Synchronous, or the client would keep a queue of its own, and its failures to itself.
            client.log_batch(run_id, metrics=metrics, tags=tags, synchronous=True)
        except MlflowException as error:
            if error.error_code in _REFUSED:  # it would be refused every time, and hold up what comes after it
                self._outbox.throw_away()
            else:
                self._outbox.give_back()
            raise
        except BaseException:
            self._outbox.give_back()
            raise
        self._outbox.delivered()


def _points(metrics: Sequence[StepMetrics]) -> Iterator[Point]:
    """The metrics of steps. They arrive together, so each gets the time at which it ended from their durations."""
    end = _now() - 1000 * sum(step.step_seconds for step in metrics)
    for step in metrics:
        end += 1000 * step.step_seconds
        for name, value in values_of(step).items():
            yield name, float(value), int(end), step.step


def _name(key: str) -> str:
    """The key in characters and a length that MLflow accepts, and without `//`, `..` or a leading `/`."""
    return posixpath.normpath(re.sub(r"[^\w./: -]", "_", key)).lstrip("/.")[:_MAX_KEY_CHARS] or "_"


def _now() -> int:
    return time.time_ns() // 1_000_000
