"""Find or create a run on an MLflow server, describe it, and write to it. The only module that imports mlflow.

Every call may block for as long as its timeouts allow, and may raise whatever the libraries raise.
"""

from __future__ import annotations

import json
import logging
import os
import posixpath
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytune_fsdp.base.durable import keep_private, replace_at_once
from raytune_fsdp.base.errors import in_one_line
from raytune_fsdp.config.recorded import shown_uri
from raytune_fsdp.record.lines import step_of, time_of
from raytune_fsdp.record.names import node_values, once_in_gibibytes, step_values, with_perplexity
from raytune_fsdp.record.tracker import UsedData

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

# The client's own retries (7 of them, 246 s in all) would send a request again without asking whether it has arrived.
# The timeout: a server on a busy machine needs more than 5 s for a full request. Whether to send telemetry is the
# user's choice, not ours; and MLflow would print two lines with addresses at the end.
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
NOISY_LOGGERS = (
    "alembic.runtime.migration",
    "alembic.runtime.plugins",
    "mlflow.store.db.utils",
    "urllib3.connectionpool",
)

# MLflow's limits for a request: 1,000 metrics, 100 params, 100 tags, and 1,000 of all together. Its client splits a
# larger one into several requests, with the tags in the first of them: a cursor would be ahead of its points.
MAX_POINTS, _MAX_PARAMS, _MAX_TAGS = 900, 100, 100
_MAX_NAME = 500  # of a dataset

# MLflow's codes for a run that does not exist (the second: the id is not one of this server's), and for a request that
# will not succeed in another try either.
_GONE = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
_REFUSED = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
_START = "raytune_fsdp.start"
_ASKED_FOR = "?"
"""Prefix of a token in the file of the run's id: a run with this token was asked for, but its id is not known."""
ATTEMPT = "raytune_fsdp.attempt"
PARENT = "mlflow.parentRunId"
_NAMES, _TODAYS_NAMES = "raytune_fsdp.names", "2"
"""A run with this tag has each metric under one name, and memory in GiB; older runs keep the names that they have."""
# MLflow shows an experiment either as machine learning, with curves, or as generative AI, without. Its pages chose by
# this tag until 3.17. Since then they choose by a parameter of the address; where the address has none, by the choice
# that the browser has kept; and in a new browser they show generative AI. Hence the address of `MlflowRun.page`.
_KIND = {"mlflow.experimentKind": "custom_model_development"}
_VIEW = "raytune_fsdp"
"""The name of a view of an experiment's curves, kept in a tag of the experiment as those are that people share. Without
it the curves are in the order of the alphabet, and the training's after those of evaluations and speed."""
_FIRST_CURVES = ("train/loss", "train/token_accuracy", "train/lr", "train/grad_norm")


class RefusedError(Exception):
    """The server does not take this, now or later."""


class GoneError(Exception):
    """The server has no such run, or it was deleted there."""


class MlflowRun:
    """A run that exists in MLflow.

    Its `tags`, `params`, `keys` (of metrics), `inputs` (name and digest) and `status` are as of the last look at it.
    """

    def __init__(self, client: MlflowClient, run: Run) -> None:
        self._client = client
        self.id = str(run.info.run_id)
        self.status = ""
        self.tags: Mapping[str, str] = {}
        self._read(run)

    @property
    def page(self) -> str:
        """Where MLflow's pages show its experiment's curves, the training's first, after the address of the server."""
        how = f"workflowType=machine_learning&compareRunsMode=CHART&viewStateShareKey={_VIEW}"
        return f"#/experiments/{self._experiment}/runs?{how}"

    @property
    def has_older_names(self) -> bool:
        """Whether it was created by a version that sent some numbers twice, and memory in bytes."""
        return _NAMES not in self.tags

    def look(self) -> None:
        """Read it again. Raises GoneError if it is not there."""
        self._read(_get(self._client, self.id))

    def set_running(self) -> None:
        if self.status != "RUNNING":
            self._client.update_run(self.id, status="RUNNING")
            self.status = "RUNNING"

    def end(self, status: str) -> None:
        if self.status != status:
            self._client.set_terminated(self.id, status)
            self.status = status

    def add_params(self, params: Mapping[str, str]) -> None:
        """Add the params that are new. In MLflow a param never changes: a resumed run keeps its first value."""
        new = [(key, value) for key, value in params.items() if key not in self.params]
        for first in range(0, len(new), _MAX_PARAMS):
            self._log(params=new[first : first + _MAX_PARAMS])

    def set_tags(self, tags: Mapping[str, str]) -> None:
        pairs = list(tags.items())
        for first in range(0, len(pairs), _MAX_TAGS):
            self._log(tags=pairs[first : first + _MAX_TAGS])
        self.tags = {**self.tags, **tags}

    def add_text(self, text: str, name: str) -> None:
        self._client.log_text(self.id, text, name)

    def add_file(self, file: Path, directory: str) -> None:
        self._client.log_artifact(self.id, str(file), directory)

    def add_directory(self, directory: Path, name: str) -> str:
        """Copy all files of a directory into the run's artifacts, and return where they are."""
        self._client.log_artifacts(self.id, str(directory), name)
        return f"{self._artifacts}/{name}"

    def add_inputs(self, datasets: Sequence[UsedData]) -> None:
        """Add the datasets that are new."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        new = [
            DatasetInput(
                Dataset(
                    name=used.name[:_MAX_NAME],
                    digest=used.digest,
                    source_type=used.kind,
                    source=json.dumps(used.place, default=str),
                    profile=json.dumps({"rows": used.rows}),
                ),
                [InputTag("mlflow.data.context", used.purpose)],
            )
            for used in datasets
            if (used.name[:_MAX_NAME], used.digest) not in self.inputs
        ]
        if new:
            self._client.log_inputs(self.id, new)

    def attempts(self) -> dict[int, MlflowRun]:
        """Return the runs below this one, by the number of their attempt."""
        found = self._client.search_runs([self._experiment], f"tags.`{PARENT}` = '{self.id}'")
        runs = [MlflowRun(self._client, run) for run in found]
        return {int(run.tags[ATTEMPT]): run for run in runs if run.tags.get(ATTEMPT, "").isdecimal()}

    def add_attempt(self, number: int) -> MlflowRun:
        tags = {PARENT: self.id, ATTEMPT: str(number)}
        made = self._client.create_run(self._experiment, tags=tags, run_name=f"attempt {number}")
        return MlflowRun(self._client, made)

    def add_points(self, points: Sequence[Point], tags: Mapping[str, str]) -> None:
        """Add points, and set tags with the last of them."""
        for first in range(0, max(1, len(points)), MAX_POINTS):
            last = first + MAX_POINTS >= len(points)
            self._log(points[first : first + MAX_POINTS], tags=list(tags.items()) if last else ())

    def steps_of(self, key: str) -> list[int]:
        """Return the steps of all points of a metric."""
        return [point.step for point in self._client.get_metric_history(self.id, key)]

    def _read(self, run: Run) -> None:
        self._experiment = str(run.info.experiment_id)
        self._artifacts = str(run.info.artifact_uri)
        self.status = str(run.info.status)
        self.start_time = int(run.info.start_time)
        self.tags = run.data.tags
        self.params: Mapping[str, str] = run.data.params
        self.keys: Sequence[str] = list(run.data.metrics)
        inputs = run.inputs.dataset_inputs if run.inputs else ()
        self.inputs = {(each.dataset.name, each.dataset.digest) for each in inputs}

    def _log(
        self, points: Sequence[Point] = (), params: Sequence[tuple[str, str]] = (), tags: Sequence[tuple[str, str]] = ()
    ) -> None:
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.exceptions import MlflowException

        try:
            # Synchronous: otherwise the client keeps a queue of its own, and does not report failures.
            self._client.log_batch(
                self.id,
                metrics=[Metric(*each) for each in points],
                params=[Param(*each) for each in params],
                tags=[RunTag(*each) for each in tags],
                synchronous=True,
            )
        except MlflowException as error:
            if error.error_code not in _REFUSED:
                raise
            raise RefusedError(in_one_line(error)) from error


def connect(uri: str) -> MlflowClient:
    """Return a client of a server or a database. The first call imports mlflow, which takes a second or two."""
    from mlflow.tracking import MlflowClient

    if uri.startswith("sqlite:///"):
        file = Path(uri.removeprefix("sqlite:///").partition("?")[0])
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists() or not file.stat().st_size:
            # Have MLflow make its database in a temporary file next to its place, and put it there when it is complete.
            # MLflow makes its tables in forty migrations, which takes seconds. If a rank died in between, MLflow
            # refused the database from then on, for every run that uses it.
            temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}.tmp")
            keep_private(temporary)  # before MLflow makes it; an empty file is an empty database
            try:
                MlflowClient(f"sqlite:///{temporary}").search_experiments(max_results=1)
                if file.exists() and not file.stat().st_size:
                    temporary.replace(file)
                else:
                    with suppress(FileExistsError):  # another run of this storage was quicker
                        os.link(temporary, file)
            finally:
                temporary.unlink(missing_ok=True)
        keep_private(file)
    return MlflowClient(uri)


def get_run(client: MlflowClient, run_id: str) -> MlflowRun:
    """Return the run with an id. Raises GoneError if there is none."""
    return MlflowRun(client, _get(client, run_id))


def kept_run(
    client: MlflowClient,
    uri: str,
    file: Path,
    known: str,
    *,
    experiment: str,
    artifact_root: str | None,
    name: str,
    source: Mapping[str, str],
) -> MlflowRun:
    """Return the run that `known` names, which a file has kept; else, with a warning if it is gone, create one.

    `file` keeps its id. `source`: tags of what has made it.
    """
    asked_for = known.removeprefix(_ASKED_FOR) if known.startswith(_ASKED_FOR) else None
    run = None
    if known and asked_for is None:
        try:
            run = get_run(client, known)
        except GoneError:
            logger.warning(
                "MLflow at %s no longer has run %s; metrics go to a new one from here on, with all there were",
                shown_uri(uri), known,
            )  # fmt: skip
    if run is None:
        # Keep the token before asking: the answer may get lost, or this process crash.
        token = asked_for or uuid.uuid4().hex
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_at_once(file, f"{_ASKED_FOR}{token}\n".encode())
        experiment_id = _experiment_id(client, experiment, artifact_root)
        # Asked for before: a server may have created it, and its answer got lost.
        if asked_for is not None and (there := client.search_runs([experiment_id], f"tags.`{_START}` = '{token}'")):
            run = MlflowRun(client, there[0])
        else:
            tags = {_START: token, _NAMES: _TODAYS_NAMES, **source}
            run = MlflowRun(client, client.create_run(experiment_id, tags=tags, run_name=name))
    replace_at_once(file, f"{run.id}\n".encode())
    return run


def _get(client: MlflowClient, run_id: str) -> Run:
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code not in _GONE:
            raise
        raise GoneError(run_id) from error
    if run.info.lifecycle_stage != "active":
        raise GoneError(run_id)
    return run


def _experiment_id(client: MlflowClient, name: str, artifact_root: str | None) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            tags = {**_KIND, **_view()}
            return str(client.create_experiment(name, artifact_location=artifact_root, tags=tags))
        except MlflowException as error:
            # Another run may have created the experiment since we asked.
            found = client.get_experiment_by_name(name)
            if error.error_code != "RESOURCE_ALREADY_EXISTS" or not found:
                raise
    for key, value in {**_KIND, **_view()}.items():
        if key not in found.tags:  # keep what its owner has chosen
            with suppress(MlflowException):  # we may lack the right, and tags only decide what a page shows first
                client.set_experiment_tag(found.experiment_id, key, value)
    return str(found.experiment_id)


def _view() -> dict[str, str]:
    """Return the tag of an experiment that holds the view: which curves come first, as MLflow's pages write it."""
    sections = [
        {"uuid": f"{_VIEW}-{number}", "name": name, "display": True, "isReordered": True}
        for number, name in enumerate(("train", "Model metrics", "System metrics"))
    ]
    curves = [
        {
            "type": "LINE", "uuid": f"{_VIEW}-{key}", "metricKey": key, "displayName": key.rpartition("/")[2],
            "metricSectionId": sections[0]["uuid"], "isGenerated": True, "deleted": False, "runsCountToCompare": 10,
            "lineSmoothness": 0, "xAxisScaleType": "linear", "scaleType": "linear", "range": {}, "xAxisKey": "step",
            "selectedXAxisMetricKey": "", "yAxisKey": "metric", "yAxisExpressions": [], "ignoreOutliers": False,
            "useGlobalXaxisKey": True, "useGlobalLineSmoothing": True,
        }
        for key in _FIRST_CURVES
    ]  # fmt: skip
    state = {"compareRunCharts": curves, "compareRunSections": sections, "isAccordionReordered": True}
    return {f"mlflow.sharedViewState.{_VIEW}": json.dumps(state)}


# Lines of the record in the form that MLflow takes.

_MAX_KEY_CHARS = 250

Point = tuple[str, float, int, int]
"""A metric's name, value, time in milliseconds since 1970, and step."""


def points_of(line: Mapping[str, Any], otherwise: int, *, older: bool = True) -> Iterator[Point]:
    """Yield the points of a line. Lines of older versions have no time: their points get `otherwise`.

    `older`: under all the names that there have been, and memory in bytes.
    """
    values = step_values(line) if line["kind"] == "step" else with_perplexity(line["values"])
    return _points(line, values if older else once_in_gibibytes(values), otherwise)


def node_points_of(line: Mapping[str, Any], otherwise: int, *, older: bool = True) -> Iterator[Point]:
    """Yield the points of a line that are about the nodes."""
    values = node_values(line)
    return _points(line, values if older else once_in_gibibytes(values), otherwise)


def _points(line: Mapping[str, Any], values: Mapping[str, float], otherwise: int) -> Iterator[Point]:
    step, at = step_of(line), time_of(line)
    for name, value in {mlflow_name(name): float(value) for name, value in values.items()}.items():
        yield name, value, otherwise if at is None else at, step


@lru_cache(1000)
def mlflow_name(key: str) -> str:
    """Return the key in characters and a length that MLflow accepts, without `//`, `..` or a leading `/`."""
    return posixpath.normpath(re.sub(r"[^\w./: -]", "_", key)).lstrip("/.")[:_MAX_KEY_CHARS] or "_"
