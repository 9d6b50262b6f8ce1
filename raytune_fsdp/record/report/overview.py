"""Sum a run up in a few numbers, for a list of runs and for the start of `watch`.

They come from its record alone, which may be anybody's: what cannot be read is left out.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from raytune_fsdp.base.errors import RaytuneError
from raytune_fsdp.base.untrusted import LINE_BYTES, MIB, is_count, lines_of, open_regular, read_json_object
from raytune_fsdp.plan.run_dir import EVALUATIONS_FILE, EVENTS_FILE, METRICS_FILE, PLAN_FILE
from raytune_fsdp.record import names
from raytune_fsdp.record.goodput import known_goodput
from raytune_fsdp.record.jsonl import read_events
from raytune_fsdp.record.lines import read_line, step_of

_PLAN_BYTES = 16 * MIB
_TAIL_BYTES = 1 << 18
_SAMPLE_BYTES = 1 << 16

Ended = Literal["finished", "failed", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    path: Path
    steps: int | None
    """The steps of the whole run."""
    step: int
    """The newest step on record; 0 before the first one."""
    loss: float | None
    world: int | None
    best: tuple[float, int] | None
    """The lowest mean of an evaluation's losses, and the step before it."""
    began: str | None
    """When the first attempt began, by the clocks of the run's machines; so is `last`, the time of the newest line."""
    last: str | None
    attempt: int
    ended: Ended
    """The run's state if no command works on it."""
    productive: float | None = None
    """The share of its time in which steps were trained that stayed; None if it is not known, or was not asked for."""

    @property
    def at(self) -> str:
        """Where the run is, for a message."""
        return f"step {self.step:,}" + (f" of {self.steps:,}" if self.steps is not None else "")


def overview(path: Path, *, productive: bool = False) -> Overview:
    """Read a run directory; change nothing. `productive`: look at the time of every step, too."""
    events: list[dict[str, Any]] = []
    with suppress(RaytuneError, OSError, ValueError):
        events = read_events(path / EVENTS_FILE)
    steps = steps_of(path)
    newest = last_step(path / METRICS_FILE)
    evaluated: list[tuple[float, int]] = []
    for file in (METRICS_FILE, EVALUATIONS_FILE):
        with suppress(OSError, ValueError):
            for raw in lines_of(path / file):
                # Most lines are those of steps, so do not parse them.
                line = None if raw.startswith(b'{"kind": "step"') else read_line(raw)
                if line and line["kind"] == "eval" and (value := names.score(line["values"], None)) is not None:
                    evaluated.append((value, step_of(line)))
    own = [event for event in events if event["event"] != names.AUDITED]
    times = [str(event["time"]) for event in own if isinstance(event.get("time"), str)]
    last = newest.get("time") if newest else None
    time = known_goodput(path) if productive else None
    return Overview(
        path=path,
        steps=steps,
        step=step_of(newest) if newest else 0,
        loss=float(newest["trajectory"]["loss"]) if newest else None,
        world=newest["world_size"] if newest and is_count(newest.get("world_size")) else None,
        best=min(evaluated, default=None),
        began=times[0] if times else None,
        last=max([*times[-1:], *([last] if isinstance(last, str) else [])], default=None),
        attempt=max((event["attempt"] for event in events), default=0),
        ended=ended_as(events, steps),
        productive=None if time is None else time.share,
    )


def steps_of(path: Path) -> int | None:
    """Return how many steps a run has when it is complete; None if its plan cannot be read."""
    with suppress(OSError, ValueError):
        steps = read_json_object(path / PLAN_FILE, limit=_PLAN_BYTES).get("steps")
        return steps if is_count(steps) else None
    return None


def first_step(metrics: Path) -> dict[str, Any] | None:
    """Return the oldest line of a step."""
    with suppress(OSError, ValueError):
        for raw in lines_of(metrics):
            line = read_line(raw)
            if line is not None and line["kind"] == "step":
                return line
    return None


def last_step(metrics: Path) -> dict[str, Any] | None:
    """Return the newest line of a step, from the end of the file alone."""
    with suppress(OSError, ValueError), open(open_regular(metrics, links=True), "rb") as file:
        size = file.seek(0, 2)
        for reach in (_TAIL_BYTES, LINE_BYTES):  # answers to many prompts make long lines
            file.seek(max(0, size - reach))
            for raw in reversed(file.read(reach).splitlines(keepends=True)):
                line = read_line(raw) if raw.endswith(b"\n") else None
                if line is not None and line["kind"] == "step":
                    return line
    return None


def some_losses(metrics: Path, many: int = 48) -> list[float]:
    """Return the losses of some steps, evenly spread over a record, which is not read as a whole."""
    found: list[float] = []
    last = 0
    with suppress(OSError, ValueError), open(open_regular(metrics, links=True), "rb") as file:
        size = file.seek(0, 2)
        for i in range(many):
            file.seek(size * i // many)
            if i:
                file.readline(_SAMPLE_BYTES)  # the rest of a line
            line = read_line(file.readline(_SAMPLE_BYTES))
            if line is not None and line["kind"] == "step" and step_of(line) > last:
                last = step_of(line)
                found.append(float(line["trajectory"]["loss"]))
    return found


def ended_as(events: list[dict[str, Any]], steps: int | None) -> Ended:
    """Return how the newest attempt ended. One that was killed left no event: it counts as interrupted."""
    newest = max((event["attempt"] for event in events), default=0)
    ended: Ended = "interrupted"
    for event in events:
        name, fields = event["event"], event["fields"]
        if name == names.SAVED and steps is not None and fields.get("step") == steps:
            return "finished"
        if event["attempt"] != newest:
            continue
        status = fields.get("status") if name == names.ATTEMPT_ENDED else None
        if status == "finished":  # before its last step, if evaluations have ended it
            return "finished"
        if name == names.ATTEMPT_FAILED or status == "failed":
            ended = "failed"
    return ended


def as_json(found: Overview, state: str) -> str:
    """Return one line of JSON, with null for what is not known or not finite."""
    loss = found.loss if found.loss is not None and math.isfinite(found.loss) else None
    best = {"loss": found.best[0], "step": found.best[1]} if found.best else None
    return json.dumps({
        "name": found.path.name, "path": str(found.path), "state": state, "step": found.step, "steps": found.steps,
        "loss": loss, "best_evaluation": best, "world": found.world, "attempt": found.attempt,
        "began": found.began, "last": found.last, "productive_share": found.productive,
    })  # fmt: skip
