"""Send a run to MLflow: params, metrics by step, datasets, the config, the plan, and events.

`metrics.jsonl` is the record, and MLflow gets a copy of it (see `following.py`). A tag of the MLflow run says how far
it has been sent, and travels in the same request as the points before it: a server that was away, however long, gets
everything when it is back, from this process or from the next one.

MLflow keeps a point for every (key, time, step, value), and removes none. So the time of a point is the one in its
line: sent twice, it is the same point. And only lines up to the newest checkpoint are sent, as a resume cuts the
others.

The MLflow run has every metric. Below it is a run for each attempt, which has only the figures of its nodes and its
events.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from raytune_fsdp.base.batch import Progress
from raytune_fsdp.base.durable import make_private, take_from_others
from raytune_fsdp.base.errors import RaytuneError, in_one_line
from raytune_fsdp.base.redaction import redact, redact_text, redact_yaml
from raytune_fsdp.base.untrusted import is_count
from raytune_fsdp.config.recorded import shown_uri
from raytune_fsdp.plan.run_dir import EVALUATIONS_FILE, EVENTS_FILE, MLFLOW_ID_FILE
from raytune_fsdp.record.copies.following import ALL, Follower, Position, RecordReader, Sent, kept_id
from raytune_fsdp.record.copies.mlflow_extras import NOTE, SOURCE, AttemptRuns, Tables, description, send_report
from raytune_fsdp.record.copies.mlflow_run import (
    ATTEMPT,
    MAX_POINTS,
    NOISY_LOGGERS,
    PARENT,
    GoneError,
    MlflowRun,
    Point,
    RefusedError,
    connect,
    kept_run,
    mlflow_name,
    node_points_of,
    points_of,
)
from raytune_fsdp.record.jsonl import append_event
from raytune_fsdp.record.names import NOT_SENT_TO_MLFLOW
from raytune_fsdp.record.tracker import Status

logger = logging.getLogger(__name__)

RUN_ID = "mlflow_run_id"
"""Key of the run's id in `Tracker.state`."""
CURSOR = "raytune_fsdp.sent"
"""Tag that holds the cursor."""
_RESUMED_FROM, _COMMIT = "raytune_fsdp.resumed_from", "mlflow.source.git.commit"
FORK_OF, FORK_STEP = "raytune.fork_of", "raytune.fork_step"
"""Tags of a fork: the id of its parent's MLflow run (its name, if it has none), and the step after which it began."""
_MAX_PARAM_CHARS = 6000
_TRIES_BESIDE = 4
"""Tries for each thing that is not a metric. With three, where every fifth request is lost, one run in fifteen lacked
something."""
_MEASURED = "evaluations"

_STATUS: dict[Status, str] = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


def mlflow_installed() -> bool:
    return find_spec("mlflow") is not None


@dataclass(slots=True)
class _Batch:
    """The part of the record that is sent next."""

    points: list[Point] = field(default_factory=list)
    nodes: dict[int, list[Point]] = field(default_factory=dict)
    """The figures of the nodes, by attempt."""
    sent: Sent = field(default_factory=Sent)
    """The cursor after these points."""
    num_lines: int = 0


class MlflowTracker(Follower):
    """Keeps one MLflow run per run, however often the run is resumed.

    `directory` is the run's, with its record. `artifact_root` is used when the experiment is created; None where a
    server decides. `parent`: the id of the MLflow run below which pages show it.
    """

    receiver = "MLflow"
    noisy = NOISY_LOGGERS

    def __init__(
        self,
        uri: str,
        *,
        experiment: str,
        directory: Path,
        parent: str | None = None,
        artifact_root: str | None = None,
        finish_seconds: float = 30.0,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(directory, finish_seconds=finish_seconds, progress=progress)
        self._uri = uri
        self._experiment = experiment
        self._parent = {} if parent is None else {PARENT: parent}
        self._artifact_root = artifact_root
        # Used by the thread alone.
        self._run: MlflowRun | None = None
        self._run_id: str | None = None
        self._first = self._sent = Sent()
        self._evaluations, self._measured = RecordReader(directory / EVALUATIONS_FILE), Position()
        self._asked = False
        """Whether `_sent` comes from MLflow."""
        self._unsure = False
        """Whether the last request may have arrived, although it failed."""
        self._known: dict[str, bytearray] | None = None
        self._room = MAX_POINTS
        """How many points a request may have: fewer after one that failed, as it may have been too large."""
        self._hopeless: set[Position] = set()
        self._attempts = AttemptRuns()
        self._tables = Tables(directory)
        self._others: deque[tuple[str, Callable[[MlflowRun], None]]] = deque()
        """What is to be sent besides metrics, with its name. Its failures must not cost metrics: artifacts may live in
        another store."""
        self._tries = 0
        self._given_up: set[str] = set()
        self._last_things = False
        """Whether what can be sent only at the end of a run has been added to `_others`."""

    def state(self) -> dict[str, str]:
        """Return the run's id, if it is known by now; the run's directory has it, too."""
        run_id = self._run_id or self._start.state.get(RUN_ID)
        return {RUN_ID: run_id} if run_id else {}

    def _say_unsent(self, unsent: str) -> None:
        super()._say_unsent(unsent)
        place, attempt = self._directory / EVENTS_FILE, self._start.attempt
        with suppress(RaytuneError):  # the run has ended, and this must not change how
            append_event(place, NOT_SENT_TO_MLFLOW, attempt=attempt, fields={"because": unsent})

    def _unsent_steps(self) -> str:
        return super()._unsent_steps() if self._asked else "has not answered"

    @property
    def place(self) -> str:
        return f"MLflow at {shown_uri(self._uri)}"

    def _sent_steps(self) -> int:
        return self._sent.place.step

    # ---- from here on: what the thread does ----

    def _failed(self) -> None:
        self._unsure = True
        self._attempts.forget()

    def _is_a_try(self, error: Exception) -> bool:
        return not isinstance(error, RefusedError)

    def _advance(self) -> None:
        """Open the run, send what comes next, end the run, or wait until there is something to do."""
        if self._run is None:
            self._run = self._open()
            return
        if self._unsure:
            try:
                self._run.look()
            except GoneError:
                self._run = None
                return
            self._go_to(self._cursor(self._run, otherwise=self._first))
        with self._changed:
            committed, closed = self._committed, self._closed
            self._tables.stale, self._happened = self._tables.stale or self._happened, False
        began = time.monotonic()
        batch = self._next(self._run, committed)
        if batch.sent != self._sent:
            self._send(self._run, batch)
            # Pause for as long as sending took: training gets Python's lock for half of the time at least.
            self._pause(time.monotonic() - began)
        elif self._others:
            self._send_beside(self._run)
        elif self._more_measured():
            self._others.append((_MEASURED, self._send_measured))
        elif closed and not self._last_things:
            self._queue_last_things(self._run)
        elif closed:
            self._run.end(_STATUS[self._status])
            self._ended = True
        elif (due := self._tables.due()) is not None and due <= 0:
            self._others.append(("events", self._send_tables))
        else:
            self._wait(committed, due)

    def _open(self) -> MlflowRun:
        """Return the MLflow run named by the run's directory or by the checkpoint; else create one."""
        client = connect(self._uri)
        if self._artifact_root is not None:
            make_private(Path(self._artifact_root))
            take_from_others(Path(self._artifact_root))
        file = self._directory / MLFLOW_ID_FILE
        run = kept_run(
            client, self._uri, file, kept_id(file) or self._start.state.get(RUN_ID, ""), experiment=self._experiment,
            artifact_root=self._artifact_root, name=self._start.name, source={**SOURCE, **self._parent},
        )  # fmt: skip
        self._run_id, self.page = run.id, run.page
        if not self._start.over:
            run.set_running()
        self._describe(run)
        self._go_to(self._cursor(run, otherwise=None))
        self._first = self._sent
        logger.info("MLflow run %s (%s) at %s", run.id, self._experiment, shown_uri(self._uri))
        return run

    def _describe(self, run: MlflowRun) -> None:
        """Send the params, and queue what else describes the run, unless MLflow has it."""
        start = self._start
        self._others.clear()
        self._last_things, self._measured = False, Position()
        self._tables.stale = not start.over or self._tables.differ_from(run)
        if start.over and ATTEMPT in run.tags:
            return
        params = {key: str(redact(value, key)) for key, value in start.params.items()}
        if start.parameters is not None:
            params["parameters.total"] = str(start.parameters.total)
            params["parameters.trainable"] = str(start.parameters.trainable)
        try:
            run.add_params({mlflow_name(key): value[:_MAX_PARAM_CHARS] for key, value in params.items()})
        except RefusedError as error:
            logger.warning("MLflow did not take the params of run %s: %s", run.id, redact_text(str(error)))
        config, plan = redact_yaml(start.config), json.dumps(redact(start.plan), indent=2, default=str)
        tags = {ATTEMPT: str(start.attempt), _RESUMED_FROM: str(start.resumed_from)}
        if start.commit is not None:
            tags[_COMMIT] = start.commit
        if (parent := start.forked_from) is not None:
            tags |= {FORK_OF: parent.mlflow_run_id or parent.run, FORK_STEP: str(parent.step)}
        self._others += [
            ("datasets", lambda run: run.add_inputs(start.datasets)),
            ("config", lambda run: run.add_text(config, "config.yaml")),
            ("plan", lambda run: run.add_text(plan, "plan.json")),
        ]
        if not start.over:
            events = self._tables.events
            self._others.append(("attempt", lambda run: self._attempts.begin(run, start.attempt, tags, events())))
        # The tags go last: they show that all before them has arrived.
        said = {**tags, **self._parent, **({} if NOTE in run.tags else {NOTE: description(start)})}
        self._others.append(("tags", lambda run: run.set_tags(said)))

    def _queue_last_things(self, run: MlflowRun) -> None:
        self._last_things = True
        attempt, status, events = self._start.attempt, _STATUS[self._status], self._tables.events
        if run.status != status:
            self._others.append(("attempt", lambda run: self._attempts.end(run, attempt, status, events())))
        if self._start.over:  # the command has made it, after the ranks have ended
            self._others.append(("report", lambda run: send_report(run, self._directory)))
        if self._tables.stale or self._tables.differ_from(run):
            self._others.append(("events", self._send_tables))

    def _send_beside(self, run: MlflowRun) -> None:
        what, send = self._others[0]
        if what not in self._given_up:
            try:
                send(run)
            except Exception as error:
                self._tries += 1
                if self._tries < _TRIES_BESIDE:
                    raise  # before the next try the server is asked for the run: while it is away, no try counts
                self._given_up.add(what)
                problem = redact_text(in_one_line(error))
                logger.warning("MLflow did not take the %s of run %s: %s", what, run.id, problem)
        self._tries = 0
        self._others.popleft()

    def _send_tables(self, run: MlflowRun) -> None:
        self._tables.send(run, self._attempts, self._start.attempt)

    def _cursor(self, run: MlflowRun, *, otherwise: Sent | None) -> Sent:
        """Return how far the record is in MLflow, as the run's tag there says; `otherwise` if it says nothing."""
        with self._changed:
            committed = max(self._committed, 0)
        sent = Sent.from_text(run.tags.get(CURSOR)) or otherwise
        if sent is None:
            # Nothing has been sent, or it was sent by a version without cursors, which dropped points while a server
            # was away for long. Its points have other times than the lines, so what is there is not sent again.
            self._known = self._history(run)
            return Sent(highest=max(map(len, self._known.values()), default=0) - 1)
        if sent.place.step > committed:
            # The newest checkpoint was damaged, and its steps are trained again. MLflow keeps the points it has of
            # them; only what it lacks is sent.
            return Sent(Position(committed), max(sent.highest, sent.place.step))
        return sent

    def _history(self, run: MlflowRun) -> dict[str, bytearray]:
        """Return the steps that MLflow has, by key, with a byte for each step."""
        found: dict[str, bytearray] = {}
        limit = self._start.total_steps or ALL
        for key in run.keys:
            began = time.monotonic()
            steps = [step for step in run.steps_of(key) if 0 <= step <= limit]
            found[key] = bytearray(max(steps, default=-1) + 1)
            for step in steps:
                found[key][step] = 1
            self._pause(time.monotonic() - began)  # as after sending
        return found

    def _go_to(self, sent: Sent) -> None:
        self._sent, self._unsure, self._asked = sent, False, True
        self._reader.seek(sent.place)

    def _next(self, run: MlflowRun, last_step: int) -> _Batch:
        batch = _Batch()
        place, highest, most = self._sent.place, self._sent.highest, 0
        for place, line in self._reader.lines(last_step):
            batch.num_lines += 1
            if place in self._hopeless:
                continue
            found = list(points_of(line, run.start_time, older=run.has_older_names))
            batch.points += [point for point in found if point[3] > highest or not self._has(run, point)]
            figures = list(node_points_of(line, run.start_time, older=run.has_older_names))
            if figures and is_count(attempt := line.get("attempt")):
                batch.nodes.setdefault(attempt, []).extend(figures)
            most = max(most, len(found))
            if len(batch.points) + most > self._room:  # the next line may have as many points
                break
        batch.sent = Sent(place, highest)
        return batch

    def _more_measured(self) -> bool:
        """Return whether other processes have measured more evaluations.

        Each process that sends the run sends all of them: MLflow keeps a point once.
        """
        self._evaluations.seek(self._measured)
        return _MEASURED not in self._given_up and next(self._evaluations.lines(ALL), None) is not None

    def _send_measured(self, run: MlflowRun) -> None:
        self._evaluations.seek(self._measured)
        found = list(self._evaluations.lines(ALL))
        older = run.has_older_names
        points = [point for _, line in found for point in points_of(line, run.start_time, older=older)]
        if self._measured == Position():
            # A run that began again has measured its steps again, at another time: MLflow keeps what it has of them.
            there = {key: set(run.steps_of(key)) for key in {point[0] for point in points} & set(run.keys)}
            points = [point for point in points if point[3] not in there.get(point[0], ())]
        run.add_points(points, {})
        self._measured = found[-1][0]

    def _has(self, run: MlflowRun, point: Point) -> bool:
        """Return whether MLflow has a value of this key for this step."""
        if self._known is None:
            self._known = self._history(run)
        key, _, _, step = point
        steps = self._known.get(key, b"")
        return step < len(steps) and steps[step] == 1

    def _send(self, run: MlflowRun, batch: _Batch) -> None:
        sent = batch.sent
        try:
            # Both before the cursor, which MLflow's database gets after the points: if the server dies in between,
            # they are sent once more, and it recognises them by their time and value.
            self._attempts.add_points(run, batch.nodes)
            run.add_points(batch.points, {CURSOR: sent.to_text()})
        except Exception as error:
            self._room = max(1, self._room // 4)
            # A line that is refused every time would hold up all lines after it.
            if isinstance(error, RefusedError) and batch.num_lines == 1:
                self._hopeless.add(sent.place)
                logger.warning("MLflow does not take a line of step %d, so it is left out there", sent.place.step)
            raise
        self._sent = sent
        self._room = min(2 * self._room, MAX_POINTS)
        if sent.place.step > sent.highest:
            self._known = None
