"""The run in MLflow: params, metrics by step, the config and the plan.

`metrics.jsonl` is the record, and MLflow gets a copy of it. A call to a server that is down can block for minutes, so
training only says how far its record is committed; one daemon thread opens the run and sends what is missing, in order.
How far it is stands in a tag of the MLflow run, which is in the same request as the points before it: a server that was
away gets everything when it is back, however long that was, from this process or from the next one.

MLflow keeps a point for every (key, time, step, value), and takes none back. So the time of a point is the one in its
line, which makes a point that is sent twice the same point; and only lines up to the newest checkpoint are sent, as a
resume cuts the others.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from raytune_fsdp.config.recorded import shown_uri
from raytune_fsdp.durable import replace_at_once
from raytune_fsdp.errors import RaytuneError, in_one_line
from raytune_fsdp.redaction import redact, redact_text, redact_yaml
from raytune_fsdp.rundir import EVENTS_FILE, METRICS_FILE, MLFLOW_ID_FILE
from raytune_fsdp.tracking.cursor import Position, RecordReader, Sent
from raytune_fsdp.tracking.jsonl import append_event, read_events
from raytune_fsdp.tracking.mlflow_run import (
    MAX_POINTS,
    NOISY_LOGGERS,
    GoneError,
    MlflowRun,
    RefusedError,
    connect,
    create_run,
    find_run,
)
from raytune_fsdp.tracking.muted import muted
from raytune_fsdp.tracking.names import NOT_SENT_TO_MLFLOW, SAVED
from raytune_fsdp.tracking.points import Point, event_tag, mlflow_name, points_of
from raytune_fsdp.tracking.tracker import RunStart, Status
from raytune_fsdp.types import Progress, StepMetrics
from raytune_fsdp.untrusted import read_file

logger = logging.getLogger(__name__)

RUN_ID = "mlflow_run_id"
"""Key of the run's id in `Tracker.state`."""
CURSOR = "raytune_fsdp.sent"
"""Tag with the cursor."""
_ASKED_FOR = "?"
"""Before a token, in the file of the run's id: a run with it was asked for."""
_ATTEMPT, _RESUMED_FROM = "raytune_fsdp.attempt", "raytune_fsdp.resumed_from"
_MAX_PARAM_CHARS = 6000
_MAX_PAUSE_SECONDS = 60.0  # pauses after failures double from two seconds up to this
_LAST_PAUSES_SECONDS, _LAST_TRIES = 1.0, 5  # after the end of a run
_ALL = 2**62  # a step that no run reaches

_STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


def mlflow_installed() -> bool:
    return find_spec("mlflow") is not None


class MlflowTracker:
    """Keeps one MLflow run per run, however often that is resumed. Never raises, and waits only in `finish`.

    `directory` is that of the run, with its record. `artifact_root` is used when the experiment is created; None where
    a server decides. `finish` waits `finish_seconds` at most, and tells `progress` how far it is.
    """

    def __init__(
        self,
        uri: str,
        *,
        experiment: str,
        directory: Path,
        artifact_root: str | None = None,
        finish_seconds: float = 30.0,
        progress: Progress | None = None,
    ) -> None:
        self._uri = uri
        self._experiment = experiment
        self._directory = directory
        self._artifact_root = artifact_root
        self._finish_seconds = finish_seconds
        self._progress = progress
        self._start = RunStart(name="", attempt=0)
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        # What training says to the thread, guarded by `_changed`.
        self._committed = -1
        self._tags: dict[str, str] = {}
        self._status: Status = "finished"
        self._closed = False
        self._abandoned = False
        # The thread's own.
        self._run: MlflowRun | None = None
        self._run_id: str | None = None
        self._reader = RecordReader(directory / METRICS_FILE)
        self._first = self._sent = Sent()
        self._asked = False
        """Whether `_sent` is what MLflow says."""
        self._unsure = False
        """Whether the last request may have arrived, although it failed."""
        self._known: dict[str, bytearray] | None = None
        self._room = MAX_POINTS
        """How many points a request may have: fewer after one that failed, as it may have been too much."""
        self._hopeless: set[Position] = set()
        self._ended = False
        self._problem = ""

    def start(self, run: RunStart) -> None:
        self._start = run
        committed = run.resumed_from if run.committed is None else run.committed
        self._committed = committed or -1  # at step 0 nothing is committed: an evaluation there may come again
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def steps(self, metrics: Sequence[StepMetrics], world_size: int, attempt: int) -> None:
        """Does nothing: the thread reads the record."""

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Does nothing, as `steps`."""

    def event(self, name: str, /, **fields: object) -> None:
        """Keeps the last event of every name, as a tag. After a commit the thread may send the lines up to it."""
        with self._changed:
            self._tags.update([event_tag(name, redact(fields))])
            if name == SAVED and isinstance(step := fields.get("step"), int):
                self._committed = max(self._committed, step)
            self._changed.notify_all()

    def state(self) -> dict[str, str]:
        """The run's id, if it is known by now; the run's directory has it, too."""
        run_id = self._run_id or self._start.state.get(RUN_ID)
        return {RUN_ID: run_id} if run_id else {}

    def sync(self) -> None:
        """Does nothing: a commit does not wait for MLflow."""

    def finish(self, status: Status) -> None:
        """Sends the rest, and the status, within the deadline. Says what is left, also as an event."""
        if self._thread is None or self._closed or self._abandoned:
            return
        if status == "handed_over":
            # The run goes on in MLflow, too: the next attempt sends what is left, and a node may be gone in seconds.
            self._abandoned = True
            return
        with self._changed:
            self._status = status
            if status == "finished":
                # Nothing of a run that has reached its end will be cut. What a failed run has not committed will: it
                # would be there twice when the run continues.
                self._committed = _ALL
            self._closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + self._finish_seconds
        while self._thread.is_alive() and (left := deadline - time.monotonic()) > 0:
            self._thread.join(min(0.5, left))
            if self._progress is not None and self._thread.is_alive():
                self._progress("steps sent to MLflow", *self._reached())
        self._abandoned = not self._ended
        unsent = self.unsent
        if unsent is not None and not self._start.over:  # otherwise the command says it
            logger.warning("%s", unsent)
            with suppress(RaytuneError):  # the run has ended, however that was; this must not end it in another way
                append_event(
                    self._directory / EVENTS_FILE,
                    NOT_SENT_TO_MLFLOW,
                    attempt=self._start.attempt,
                    fields={"because": unsent},
                )

    @property
    def unsent(self) -> str | None:
        """After `finish`: what MLflow has not got, in a sentence; None if it has everything."""
        if self._ended:
            return None
        sent, wanted = self._reached()
        has = f"has {sent:,} of {wanted:,} steps of this run" if sent < wanted else "does not know how this run ended"
        has = has if self._asked else "has not answered"
        because = f" ({self._problem[:200]})" if self._problem else ""  # some errors quote half of a library
        return f"MLflow at {shown_uri(self._uri)} {has}{because}; the same command sends the rest"

    def _reached(self) -> tuple[int, int]:
        """The last step that MLflow has, and the last one that it may have."""
        total = self._start.total_steps
        wanted = max(0, self._committed if total is None else min(self._committed, total))
        return min(self._sent.place.step, wanted), wanted

    # ---- from here on: what the thread does ----

    def _work(self) -> None:
        failures = last_tries = 0
        with muted(*NOISY_LOGGERS):
            while not self._ended and not self._abandoned:
                try:
                    self._advance()
                    failures, last_tries, self._problem = 0, 0, ""
                except Exception as error:  # foreign code; whatever it raises must not reach training
                    failures += 1
                    self._unsure = True
                    self._problem = redact_text(in_one_line(error))
                    if failures == 1:
                        logger.warning("MLflow at %s: %s", shown_uri(self._uri), self._problem)
                    if self._closed:
                        last_tries += not isinstance(error, RefusedError)
                        if last_tries == _LAST_TRIES and not self._start.over:
                            return  # the command goes on, without the devices that the ranks hold
                        time.sleep(_LAST_PAUSES_SECONDS)
                    self._pause(min(2.0 ** min(failures, 10), _MAX_PAUSE_SECONDS))

    def _pause(self, seconds: float) -> None:
        """Wait, but not once the run has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed, timeout=seconds)

    def _advance(self) -> None:
        """Opens the run, or sends what comes next, or ends the run, or waits until there is something to do."""
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
            tags, committed, closed = dict(self._tags), self._committed, self._closed
        began = time.monotonic()
        points, sent, num_lines = self._next(self._run, committed)
        if sent != self._sent:
            self._send(self._run, points, sent, num_lines)
            # At most half of the time, so that training has Python's lock for as long, whatever there is to send.
            self._pause(time.monotonic() - began)
        elif tags:
            self._send_tags(self._run, tags)
        elif closed:
            self._run.end(_STATUS[self._status])
            self._ended = True
        else:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._tags or self._committed != committed)

    def _open(self) -> MlflowRun:
        """The run of this attempt, of the run's directory, or of the checkpoint; else a new one."""
        client = connect(self._uri)
        file = self._directory / MLFLOW_ID_FILE
        known = self._start.state.get(RUN_ID, "")
        if file.exists():
            known = read_file(file, limit=1024).decode().strip()
        asked_for = known.removeprefix(_ASKED_FOR) if known.startswith(_ASKED_FOR) else None
        run = find_run(client, self._uri, known) if known and asked_for is None else None
        if run is None:
            # Kept before it is asked for: a server may create a run and not say so, and this process may crash then.
            token = asked_for or uuid.uuid4().hex
            self._directory.mkdir(parents=True, exist_ok=True)
            replace_at_once(file, f"{_ASKED_FOR}{token}\n".encode())
            run = create_run(
                client, experiment=self._experiment, artifact_root=self._artifact_root, name=self._start.name,
                token=token, again=asked_for is not None,
            )  # fmt: skip
        self._run_id = run.id
        replace_at_once(file, f"{run.id}\n".encode())
        if not self._start.over:
            run.set_running()
        self._describe(run)
        self._go_to(self._cursor(run, otherwise=None))
        self._first = self._sent
        logger.info("MLflow run %s (%s) at %s", run.id, self._experiment, shown_uri(self._uri))
        return run

    def _describe(self, run: MlflowRun) -> None:
        """Sends params, artifacts, tags and the events on record, unless they are there."""
        start = self._start
        if not start.over or _ATTEMPT not in run.tags:
            params = {key: str(redact(value, key)) for key, value in start.params.items()}
            if start.parameters is not None:
                params["parameters.total"] = str(start.parameters.total)
                params["parameters.trainable"] = str(start.parameters.trainable)
            try:
                run.add_params({mlflow_name(key): value[:_MAX_PARAM_CHARS] for key, value in params.items()})
            except RefusedError as error:
                logger.warning("MLflow did not take the params of run %s: %s", run.id, redact_text(str(error)))
            try:
                run.add_text(redact_yaml(start.config), "config.yaml")
                run.add_text(json.dumps(redact(start.plan), indent=2, default=str), "plan.json")
            except Exception as error:  # artifacts may live in another store than metrics, and must not cost those
                problem = redact_text(in_one_line(error))
                logger.warning("MLflow did not take the artifacts of run %s: %s", run.id, problem)
            # Last, as a sign that the others are there.
            run.set_tags({_ATTEMPT: str(start.attempt), _RESUMED_FROM: str(start.resumed_from)})
        events = dict(event_tag(each["event"], each["fields"]) for each in read_events(self._directory / EVENTS_FILE))
        with self._changed:
            self._tags = {**{key: text for key, text in events.items() if run.tags.get(key) != text}, **self._tags}

    def _cursor(self, run: MlflowRun, *, otherwise: Sent | None) -> Sent:
        """How far the record is in MLflow, by what the run there says; `otherwise` if it says nothing."""
        with self._changed:
            committed = max(self._committed, 0)
        sent = Sent.from_text(run.tags.get(CURSOR)) or otherwise
        if sent is None:
            # Nothing has been sent, or a version without cursors has sent it, which dropped what a server that was away
            # for long did not get. Those points have other times than the lines: what is there is not sent again.
            self._known = self._history(run)
            return Sent(highest=max(map(len, self._known.values()), default=0) - 1)
        if sent.place.step > committed:
            # The newest checkpoint was damaged, and its steps are trained again. MLflow keeps what it has of them; only
            # what it lacks is sent.
            return Sent(Position(committed), max(sent.highest, sent.place.step))
        return sent

    def _history(self, run: MlflowRun) -> dict[str, bytearray]:
        """By key, the steps that MLflow has: a byte for each."""
        found: dict[str, bytearray] = {}
        limit = self._start.total_steps or _ALL
        for key in run.keys:
            steps = [step for step in run.steps_of(key) if 0 <= step <= limit]
            found[key] = bytearray(max(steps, default=-1) + 1)
            for step in steps:
                found[key][step] = 1
        return found

    def _go_to(self, sent: Sent) -> None:
        self._sent, self._unsure, self._asked = sent, False, True
        self._reader.seek(sent.place)

    def _next(self, run: MlflowRun, last_step: int) -> tuple[list[Point], Sent, int]:
        """The next points up to a step, where they end, and of how many lines they are."""
        points: list[Point] = []
        place, num_lines, highest = self._sent.place, 0, self._sent.highest
        for place, line in self._reader.lines(last_step):
            num_lines += 1
            if place not in self._hopeless:
                found = points_of(line, run.start_time)
                points += [point for point in found if point[3] > highest or not self._has(run, point)]
            if len(points) > self._room - 10:  # a step has up to nine
                break
        return points, Sent(place, highest), num_lines

    def _has(self, run: MlflowRun, point: Point) -> bool:
        """Whether MLflow has a value of this key for this step."""
        if self._known is None:
            self._known = self._history(run)
        key, _, _, step = point
        steps = self._known.get(key, b"")
        return step < len(steps) and steps[step] == 1

    def _send(self, run: MlflowRun, points: Sequence[Point], sent: Sent, num_lines: int) -> None:
        try:
            # MLflow's database has the points before the tag: if the server dies between the two, they are sent once
            # more, and it knows them by their time and value.
            run.add_points(points, {CURSOR: sent.to_text()})
        except Exception as error:
            self._room = max(1, self._room // 4)
            # A line that is refused every time would hold up all that come after it.
            if isinstance(error, RefusedError) and num_lines == 1:
                self._hopeless.add(sent.place)
                logger.warning("MLflow does not take a line of step %d, so it is left out there", sent.place.step)
            raise
        self._sent = sent
        self._room = min(2 * self._room, MAX_POINTS)
        if sent.place.step > sent.highest:
            self._known = None

    def _send_tags(self, run: MlflowRun, tags: Mapping[str, str]) -> None:
        try:
            run.set_tags(tags)
        except RefusedError as error:
            logger.warning("MLflow did not take tags of run %s: %s", run.id, redact_text(str(error)))
        with self._changed:
            self._tags = {key: text for key, text in self._tags.items() if tags.get(key) != text}
