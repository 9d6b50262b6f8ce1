"""Send MLflow what a run has besides metrics: a run for each attempt, tables of events, answers and digests, and the
report."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from raytune_fsdp import __version__
from raytune_fsdp.base.errors import in_one_line
from raytune_fsdp.base.redaction import redact_text
from raytune_fsdp.plan.run_dir import EVENTS_FILE, REPORT
from raytune_fsdp.record.copies.mlflow_run import MlflowRun, Point, RefusedError, mlflow_name
from raytune_fsdp.record.goodput import read_goodput
from raytune_fsdp.record.jsonl import read_events
from raytune_fsdp.record.lines import time_of
from raytune_fsdp.record.names import ANSWERED, ATTEMPT_ENDED, ATTEMPT_FAILED, DIGESTED, FIRST_STEP, SAVED
from raytune_fsdp.record.tracker import RunStart

logger = logging.getLogger(__name__)

_NUM_EVENTS, _REPORT, _TIME = "raytune_fsdp.events", "raytune_fsdp.report", "raytune_fsdp.time"
"""Tags: how many events the table has, the hash of the report that is there, and the attempt and event of which it has
where the time of the run went."""
DIGEST = "raytune_fsdp.digest"
"""Tag: the newest digest of the weights, and its step. MLflow's metrics are numbers, so none can hold it."""
_LISTED = "mlflow.loggedArtifacts"
"""MLflow's own tag: it makes its pages show a file as a table."""
_EVERY_SECONDS, _SHARE = 60.0, 50
"""A table is sent whole, and that of a long run may have megabytes: so it is sent once a minute at most, and takes at
most a fiftieth of the time."""
_MOST_FAILURES = 3
"""Failures in a row while other requests succeed. Fewer than the last tries of a run, which are for its metrics."""
_MOST_ROWS = 10_000
_MOST_BYTES = 64 << 20

SOURCE = {"mlflow.source.name": f"raytune-fsdp {__version__} train", "mlflow.source.type": "LOCAL"}
"""Tags of what has made a run, which MLflow's table of runs shows."""
NOTE = "mlflow.note.content"
"""MLflow's tag of a run's description, which people may write themselves."""

Event = Mapping[str, Any]


class AttemptRuns:
    """The MLflow runs of attempts, below the one of the run.

    They are found by their tags, so a creation whose answer was lost is not repeated.
    """

    def __init__(self) -> None:
        self._runs: dict[int, MlflowRun] | None = None
        self._failures = 0

    def forget(self) -> None:
        """Look again before the next use."""
        self._runs = None

    def of(self, run: MlflowRun, attempt: int) -> MlflowRun:
        """Return the MLflow run of an attempt; create it if there is none."""
        if self._runs is None:
            self._runs = run.attempts()
        if attempt not in self._runs:
            self._runs[attempt] = run.add_attempt(attempt)
        return self._runs[attempt]

    def begin(self, run: MlflowRun, attempt: int, tags: Mapping[str, str], events: Iterable[Event]) -> None:
        self.of(run, attempt).set_tags(tags)
        self._end_before(attempt, events)

    def end(self, run: MlflowRun, attempt: int, status: str, events: Iterable[Event]) -> None:
        self.of(run, attempt).end(status)
        self._end_before(attempt, events)

    def _end_before(self, attempt: int, events: Iterable[Event]) -> None:
        """End the runs of earlier attempts, whose processes had no time or no server to do so."""
        failed = {event["attempt"] for event in events if event["event"] == ATTEMPT_FAILED}
        for number, before in (self._runs or {}).items():
            if number < attempt and before.status == "RUNNING":
                before.end("FAILED" if number in failed else "KILLED")

    def add_points(self, run: MlflowRun, points: Mapping[int, Sequence[Point]]) -> None:
        """Add the figures of nodes, by attempt. Their failures must not hold up the metrics."""
        if self._failures >= _MOST_FAILURES:
            return
        try:
            for attempt, each in points.items():
                self.of(run, attempt).add_points(each, {})
            self._failures = 0
        except Exception as error:
            self._failures += 1
            if self._failures < _MOST_FAILURES and not isinstance(error, RefusedError):
                raise
            logger.warning("MLflow did not take figures of nodes: %s", redact_text(in_one_line(error)))


class Tables:
    """Events, answers and digests of a run as tables in its MLflow run; an attempt's events also in the attempt's."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.stale = True
        """Whether there is something new."""
        self._next = 0.0

    def due(self) -> float | None:
        """Return the seconds until they are sent again; None if there is nothing new."""
        return self._next - time.monotonic() if self.stale else None

    def events(self) -> list[dict[str, Any]]:
        return read_events(self._directory / EVENTS_FILE)

    def differ_from(self, run: MlflowRun) -> bool:
        """Return whether MLflow has other tables, or none: older versions sent none."""
        events = self.events()
        return bool(events) and run.tags.get(_NUM_EVENTS) != str(len(events))

    def send(self, run: MlflowRun, attempts: AttemptRuns, attempt: int) -> None:
        began, events = time.monotonic(), self.events()
        self.stale = False
        try:
            if events:
                digests = digests_of(events)
                tables = {
                    "events.json": events_table(events),
                    "answers.json": answers_table(events),
                    "digests.json": _table(_DIGESTS, digests[-_MOST_ROWS:]) if digests else None,
                }
                _put(run, tables, len(events), {DIGEST: "{2} after step {0}".format(*digests[-1])} if digests else {})
            own = [event for event in events if event["attempt"] == attempt]
            if own:
                _put(attempts.of(run, attempt), {"events.json": events_table(own)}, len(own))
            self._send_time(run, events)
        except Exception:
            self.stale = True
            raise
        finally:
            now = time.monotonic()
            self._next = now + max(_EVERY_SECONDS, _SHARE * (now - began))

    def _send_time(self, run: MlflowRun, events: Sequence[Event]) -> None:
        """Send where the time went, once after the first step of each attempt but the first, and once at the end."""
        marks = [event for event in events if event["event"] in (FIRST_STEP, ATTEMPT_ENDED)]
        if not marks or (marks[-1]["event"] == FIRST_STEP and marks[-1] is marks[0]):
            return
        mark = f"{marks[-1]['attempt']} {marks[-1]['event']}"
        if run.tags.get(_TIME) == mark or (found := read_goodput(self._directory)) is None:
            return
        at = time_of(marks[-1]) or run.start_time
        points = [(mlflow_name(key), value, at, found.steps) for key, value in found.metrics().items()]
        run.add_points(points, {_TIME: mark})
        run.tags = {**run.tags, _TIME: mark}


def description(start: RunStart) -> str:
    """Say in a few lines what a run is: the model, the method, the data, its length, and where the rest is."""
    said = start.params
    model = said.get("model.path") or said.get("model.architecture.model_type") or "A model"
    first = [f"`{model}`", str(said.get("method.type", "full"))]
    if start.parameters is not None:
        first.append(start.parameters.words)
    used = {
        purpose: ", ".join(f"`{each.name}` ({each.rows:,} rows)" for each in start.datasets if each.purpose == purpose)
        for purpose in ("training", "evaluation")
    }
    lines = [", ".join(first), *(f"{purpose}: {names}" for purpose, names in used.items() if names)]
    if start.total_steps is not None:
        lines.append(f"{start.total_steps:,} steps of {said.get('train.global_batch', '?')} samples")
    lines.append("the whole config is config.yaml, what follows from it plan.json, and the page report/index.html")
    return redact_text("\n".join(f"- {line}" for line in lines))


def _put(
    run: MlflowRun, tables: Mapping[str, str | None], num_events: int, tags: Mapping[str, str] | None = None
) -> None:
    there = [name for name, text in tables.items() if text is not None]
    for name in there:
        run.add_text(str(tables[name]), name)
    listed = json.dumps([{"path": name, "type": "table"} for name in there])
    run.set_tags({_LISTED: listed, **(tags or {}), _NUM_EVENTS: str(num_events)})


def events_table(events: Sequence[Event]) -> str:
    """Return the newest events as a table."""
    rows = [
        [
            event.get("time"), event["attempt"], event["event"], event["fields"].get("step"),
            json.dumps({key: value for key, value in event["fields"].items() if key != "step"}, default=str),
        ]
        for event in events[-_MOST_ROWS:]
    ]  # fmt: skip
    return _table(["time", "attempt", "event", "step", "fields"], rows)


def answers_table(events: Iterable[Event]) -> str | None:
    """Return the model's answers by prompt and step as a table; the last answer of a step that was trained again."""
    answers: dict[tuple[str, Any], list[Any]] = {}
    for event in events:
        fields = event["fields"]
        if event["event"] == ANSWERED:
            prompt, answer = (_text(fields.get(key)) for key in ("prompt", "answer"))
            answers[prompt, _text(fields.get("step"))] = [fields.get("step"), prompt, answer]
    return _table(["step", "prompt", "answer"], list(answers.values())[-_MOST_ROWS:]) if answers else None


_DIGESTS = ["step", "of", "weights", "everything"]


def digests_of(events: Iterable[Event]) -> list[list[Any]]:
    """Return the digests of saves and of steps as rows of a table; the last one of a step that was trained again."""
    found: dict[tuple[str, str], list[Any]] = {}
    for event in events:
        fields, of = event["fields"], {SAVED: "checkpoint", DIGESTED: "step"}.get(event["event"])
        if of is not None and isinstance(fields.get("digest"), str):
            key = of, _text(fields.get("step"))
            found.pop(key, None)  # the order is that of the newest
            found[key] = [fields.get("step"), of, fields["digest"], fields.get("everything")]
    return list(found.values())


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _table(columns: list[str], rows: list[list[Any]]) -> str:
    """Write a table in the form of MLflow's own `log_table`, which would have pandas read and join it."""
    # Row by row: one call for all rows would hold Python's lock for 20 ms, and training would wait.
    data = ", ".join(json.dumps(row, default=str) for row in rows)
    return f'{{"columns": {json.dumps(columns)}, "data": [{data}]}}'


def send_report(run: MlflowRun, directory: Path) -> None:
    """Send the files in `report/`, unless MLflow has them. No links: the directory may be a stranger's."""
    place = directory / REPORT
    files = [file for file in sorted(place.rglob("*")) if file.is_file() and not file.is_symlink()]
    files = [file for file in files if file.stat().st_size <= _MOST_BYTES]
    digest = xxhash.xxh3_128()
    for file in files:
        digest.update(f"{file.relative_to(place)}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    if files and run.tags.get(_REPORT) != digest.hexdigest():
        for file in files:
            run.add_file(file, str(file.relative_to(directory).parent))
        run.set_tags({_REPORT: digest.hexdigest()})
