"""`raytune-fsdp watch`: follow a run that another command trains, from its directory, as its own command shows it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from raytune_fsdp.base.errors import Interrupted, TrainingError
from raytune_fsdp.base.measured import StepMetrics
from raytune_fsdp.base.untrusted import printable
from raytune_fsdp.cli.common import Parser, main_of, say
from raytune_fsdp.cli.progress import show_progress
from raytune_fsdp.cli.runs import check_run
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record import names
from raytune_fsdp.record.console import ConsoleTracker
from raytune_fsdp.record.lines import metrics_of, step_of
from raytune_fsdp.record.report.overview import last_step, overview, steps_of
from raytune_fsdp.record.screen_messages import tell
from raytune_fsdp.record.tail import EventFollower, RecordFollower
from raytune_fsdp.record.tracker import RunStart

_POLL_SECONDS = 0.5
_STEPS_BEFORE, _EVENTS_BEFORE = 200, 5
"""The most steps and events from before that are shown."""


def parser_of(prog: str) -> Parser:
    parser = Parser(
        prog, "Follow a run, from any machine that sees its directory. Ctrl-C ends this command, not the run."
    )
    parser.add_argument("run", type=Path, help="run directory")
    return parser


def _watch(parser: Parser, arguments: Sequence[str]) -> int:
    """Follow a run; return the exit code of its command, or 0 after Ctrl-C."""
    place = check_run(parser.parse(arguments).run)
    from raytune_fsdp.launch.run_lock import Signs

    signs = Signs(place)
    state = signs.look()
    try:
        if state in ("running", None):  # a run that has ended is not played again
            with show_progress():
                watched = _Watched(place)
                while state in ("running", None):
                    watched.look()
                    time.sleep(_POLL_SECONDS)
                    state = signs.look()
                watched.look()
                watched.end()
    except KeyboardInterrupt:
        say(f"{place.path.name} goes on; this command has only watched it")
        return 0
    found = overview(place.path)
    name = printable(found.path.name)
    step = found.at
    if state == "silent":
        why = "its command was killed, or its machine is lost; the same command continues it"
        raise TrainingError(f"{name} gives no sign of life, at {step}: {why}")
    if found.ended == "failed":
        raise TrainingError(
            f"{name} has failed, at {step}; what its ranks said: raytune-fsdp logs {printable(str(found.path))}"
        )
    if found.ended == "interrupted":
        raise Interrupted(f"{name} was stopped, at {step}; the same command continues it")
    say(f"{name} is finished: {step}" + (f", loss {found.loss:.4f}" if found.loss is not None else ""))
    return 0


class _Watched:
    """A run that is shown as its own command shows it."""

    def __init__(self, place: RunDir) -> None:
        self._place = place
        self._steps = steps_of(place.path)
        newest = last_step(place.metrics)
        after = max(0, step_of(newest) - _STEPS_BEFORE) if newest else 0
        self._record = RecordFollower(place.metrics, after=after)
        self._measured = RecordFollower(place.evaluations, after=after)
        self._events = EventFollower(place.events)
        self._tracker: ConsoleTracker | None = None
        tell(title=f"{place.path.name}  no step yet", elapsed=0.0)
        events = list(self._events.events())
        starts = [place for place, event in enumerate(events) if event["event"] == names.ATTEMPT_STARTED]
        if starts:  # show the attempt that is under way, and its last events
            self._event(events[starts[-1]])
            for event in events[starts[-1] + 1 :][-_EVENTS_BEFORE:]:
                self._event(event)

    def look(self) -> None:
        """Show what has happened since the last look. If storage does not answer, the next look asks it again."""
        with suppress(OSError):
            for event in self._events.events():
                self._event(event)
            steps: list[tuple[StepMetrics, int, int]] = []
            for line in chain(self._record.lines(), self._measured.lines()):
                if line["kind"] == "step":
                    steps.append((metrics_of(line), line.get("world_size", 1), line.get("attempt", 1)))
                elif self._tracker is not None:
                    self._show(steps)
                    values = {key: float(value) for key, value in line["values"].items()}
                    self._tracker.evaluation(step_of(line), values)
            self._show(steps)

    def _show(self, steps: list[tuple[StepMetrics, int, int]]) -> None:
        if steps:
            _, world, attempt = steps[-1]
            if self._tracker is None:  # older versions wrote no event about an attempt's start
                self._begin(attempt, 0)
            assert self._tracker is not None
            self._tracker.steps([step for step, *_ in steps], world, attempt)
        steps.clear()

    def _event(self, event: dict[str, Any]) -> None:
        name, fields = event["event"], event["fields"]
        if name == names.ATTEMPT_STARTED:
            self._begin(event["attempt"], fields.get("resumed_from"))
        if self._tracker is not None and name != names.ATTEMPT_ENDED:
            try:
                self._tracker.event(name, **fields)
            except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError):  # not as we write it
                self._tracker.event(name)

    def _begin(self, attempt: int, resumed_from: object) -> None:
        self.end()
        self._tracker = ConsoleTracker()
        resumed = resumed_from if type(resumed_from) is int else 0
        name = self._place.path.name
        self._tracker.start(RunStart(name=name, attempt=attempt, total_steps=self._steps, resumed_from=resumed))

    def end(self) -> None:
        if self._tracker is not None:
            self._tracker.finish("handed_over")


main = main_of("watch", parser_of, _watch)

if __name__ == "__main__":
    raise SystemExit(main())
