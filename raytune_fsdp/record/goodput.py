"""Where the time of a run went, from its record alone: the seconds of each attempt by phase, and the share that counts.

A second of training counts if its step stayed: `metrics.jsonl` has the steps that did, and `events.jsonl` says what was
cut from it, and when attempts began and ended. Every second from the start of the first command to the last sign of the
run is of one phase, or of a pause between two commands, while nobody ran. Clocks of several machines are compared, so
what would be less than nothing is nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from raytune_fsdp.base.errors import RaytuneError
from raytune_fsdp.base.untrusted import is_count
from raytune_fsdp.plan.run_dir import EVENTS_FILE, METRICS_FILE
from raytune_fsdp.record import names
from raytune_fsdp.record.console import took
from raytune_fsdp.record.jsonl import each_event, raw_steps
from raytune_fsdp.record.lines import is_number, read_line, seconds_of

PHASES = {
    "start": "until ranks are there",
    "load": "imports, model, data",
    "productive": "steps that stayed",
    "between": "between steps: evaluations, saves, digests",
    "lost": "steps that did not stay",
    "detect": "until a failure was noticed",
    "stop": "until all ranks had ended",
}
"""The phases of an attempt. `detect` begins with the end of the last step on record, so it is an upper bound."""
_ARRIVED = "workers"
"""The phase that ends when ranks are in our function. What comes before it is the start, what comes after it loads."""
_OF_COMMANDS = ("start", "checks", "Ray")
"""Phases that only the first attempt of a command has."""
_NUMBER = rb"([0-9]++(?:[.][0-9]++)?(?:e-?[0-9]++)?)"
_TIMES = re.compile(
    rb'\{"kind": "step", "trajectory": \{"step": ([1-9][0-9]{0,14}), [^{}]*+\}, "world_size": [0-9]++, "attempt": '
    rb'([0-9]{1,9}), "time": "([0-9T:.+-]{19,40})", [^\n]*?"step_seconds": '
    + _NUMBER
    + rb', "data_seconds": '
    + _NUMBER
    + b","
)
"""Matches the line of a step in the form in which it is written: 100,000 take 0.5 s, and 1.3 s when each is parsed."""
_LONGEST = 10 * 365 * 86_400.0
"""Seconds. No phase is longer: a record may have any number."""


class StepTime(NamedTuple):
    """A step on record."""

    step: int
    attempt: int
    ended: float
    """In seconds since 1970; NaN in records of older versions."""
    seconds: float
    waited: float
    """Of these, the seconds for which it waited for its data."""


@dataclass(slots=True)
class AttemptTime:
    """An attempt, and where its time went."""

    number: int | None
    """None: it failed before its ranks had agreed on a number."""
    begins_command: bool = True
    """Whether it is the first attempt of a command."""
    ended: str = ""
    """finished, failed, interrupted, handed_over; empty: it was killed, or still runs."""
    steps: int = 0
    """Steps that it trained, and that stayed."""
    waited: float = 0.0
    """The seconds of these steps in which they waited for data; they are in `productive`, too."""
    steps_lost: int = 0
    """Steps that it trained, and that did not stay."""
    steps_again: int = 0
    """Those of `steps` that an attempt before had trained, too."""
    again: float = 0.0
    """Seconds from its first step to where the run had been before; they are in `productive` and `between`, too."""
    pause: float = 0.0
    """Seconds before it in which no command worked on the run."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @property
    def failed(self) -> bool:
        return self.ended == "failed"


@dataclass(frozen=True, slots=True)
class Goodput:
    """Where the time of a run went."""

    attempts: list[AttemptTime]

    def of(self, phase: str) -> float:
        """Return the seconds of a phase, over all attempts."""
        return sum(each.seconds[phase] for each in self.attempts)

    @property
    def seconds(self) -> float:
        """The seconds in which a command worked on the run."""
        return sum(map(self.of, PHASES))

    @property
    def pauses(self) -> float:
        return sum(each.pause for each in self.attempts)

    @property
    def share(self) -> float:
        """The share of these seconds in which steps were trained that stayed."""
        return self.of("productive") / self.seconds if self.seconds else 0.0

    @property
    def steps(self) -> int:
        """The steps that stayed."""
        return sum(each.steps for each in self.attempts)

    @property
    def steps_again(self) -> int:
        return sum(each.steps_again for each in self.attempts)

    @property
    def failures(self) -> int:
        return sum(each.failed for each in self.attempts)

    @property
    def failure_seconds(self) -> float:
        """What failures have cost: steps that did not stay, and all that comes before the next attempt trains."""
        spent, before = 0.0, False
        for each in self.attempts:
            spent += sum(each.seconds[phase] for phase in ("start", "load") if before)
            spent += sum(each.seconds[phase] for phase in ("lost", "detect", "stop") if each.failed)
            before = each.failed
        return spent

    def in_words(self) -> str:
        """Return a sentence without its full stop."""
        said = [f"{self.share:.1%} of {took(self.seconds)} trained steps that stayed"]
        if self.failures:
            many, each = self.failures, " each" if self.failures > 1 else ""
            said.append(f"{many} failure{'s' * (many > 1)} cost {took(self.failure_seconds / many)}{each}")
        if self.steps_again:
            said.append(f"{self.steps_again:,} step{'s were' if self.steps_again > 1 else ' was'} trained again")
        if self.pauses:
            said.append(f"nobody ran it for another {took(self.pauses)} between commands")
        return "; ".join(said)

    def metrics(self) -> dict[str, float]:
        """Return it as named numbers, for receivers of the record."""
        return {
            names.PRODUCTIVE_SHARE: self.share,
            names.STEPS_AGAIN: float(self.steps_again),
            **{names.goodput_seconds(phase): self.of(phase) for phase in PHASES},
            names.goodput_seconds("pauses"): self.pauses,
        }


def read_goodput(run_dir: Path) -> Goodput | None:
    """Read a run's record once; None if it does not say when an attempt began."""
    return goodput(each_event(run_dir / EVENTS_FILE), step_times(raw for _, raw in raw_steps(run_dir / METRICS_FILE)))


def known_goodput(run_dir: Path) -> Goodput | None:
    """Return the same for what can do without it: None also if the record cannot be read, or has no time in it."""
    with suppress(RaytuneError, OSError, ValueError):
        found = read_goodput(run_dir)
        return found if found is not None and found.seconds else None
    return None


def step_times(lines: Iterable[bytes]) -> Iterator[StepTime]:
    """Yield the steps among the lines of a `metrics.jsonl`."""
    for raw in lines:
        if (known := _TIMES.match(raw)) is not None:  # most lines, so do not parse them
            step, attempt, ended, seconds, waited = known.groups()
            with suppress(ValueError):
                at = datetime.fromisoformat(ended.decode()).timestamp()
                yield StepTime(int(step), int(attempt), at, _seconds(float(seconds)), _seconds(float(waited)))
                continue
        line = read_line(raw)
        if line is not None and line["kind"] == "step":
            attempt = line.get("attempt")
            yield StepTime(
                step=line["trajectory"]["step"],
                attempt=attempt if is_count(attempt) else 0,
                ended=seconds_of(line),
                seconds=_seconds(line.get("step_seconds")),
                waited=_seconds(line.get("data_seconds")),
            )


def goodput(events: Iterable[Mapping[str, Any]], steps: Iterable[StepTime]) -> Goodput | None:
    """Divide the time of a run, by its events and the steps that stayed, both in the order of the record."""
    seen = _seen_in(events)
    by_number = {each.time.number: each for each in seen if each.time.number is not None}
    if not any(math.isfinite(each.first_word) for each in seen):
        return None
    _add_cuts(seen, by_number)
    some = none = False
    for step in steps:
        if (attempt := by_number.get(step.attempt)) is not None and math.isfinite(step.ended):
            attempt.add(step)
            some = True
        else:
            none = True
    if none and not some:
        return None  # an older record does not say when steps ended, or of which attempt they are
    _LaidOut(seen)
    return Goodput([each.time for each in seen])


class _Seen:
    """What the record says of an attempt."""

    def __init__(self, number: int | None) -> None:
        self.time = AttemptTime(number)
        self.first_word = self.last_word = math.nan
        """When the record first and last says something that happened in it."""
        self.phases: dict[str, float] = {}
        """The phases before the first step that it finished, with their seconds."""
        self.began = math.nan
        """When the first of them began; NaN if that is not on record."""
        self.first_step = math.nan
        """When it ended its first step."""
        self.over = math.nan
        """When it ended, or had failed."""
        self.stopping = 0.0
        """The seconds before that for which it had been known to have failed."""
        self.driver_knows = False
        """Whether what follows is of the same command."""
        self.cut: list[Mapping[str, Any]] = []
        """The steps that this attempt cut from the record, by the attempts that had trained them."""
        self.resumed_from = 0
        self.lost_before = 0.0
        """The seconds that attempts before it had trained since the checkpoint from which it goes on."""
        self.uncounted = 0.0
        """The seconds that it trained in vain, where the record does not say which steps: in older versions."""
        self.reached = 0
        """The last step that it trained, as far as that is known."""
        self.before = 0
        """The last step that attempts before it had trained."""
        self.trained = math.nan
        """When the first step on record began that stayed; `last` is when the last one ended, also of the others."""
        self.last = math.nan
        self.at_step = 0

    def add(self, step: StepTime) -> None:
        """Add a step that stayed."""
        seconds, waited = _seconds(step.seconds), _seconds(step.waited)
        if not self.time.steps:
            seconds -= min(seconds, waited)  # until the first batch was there: that is a part of its start
            self.trained = step.ended - seconds
        else:
            self.time.waited += min(seconds, waited)
        self.time.steps += 1
        self.time.seconds["productive"] += seconds
        self.last = max(step.ended, self.last) if math.isfinite(self.last) else step.ended
        self.at_step = max(self.at_step, step.step)
        if step.step <= self.before:
            self.time.steps_again += 1
            self.time.again = max(self.time.again, step.ended - self.trained)


def _seen_in(events: Iterable[Mapping[str, Any]]) -> list[_Seen]:
    """Return the attempts in the order in which they began."""
    seen: list[_Seen] = []
    by_number: dict[int, _Seen] = {}
    for event in events:
        number, name, fields, at = event["attempt"], event["event"], event["fields"], seconds_of(event)
        attempt = by_number.get(number)
        over = attempt is None or attempt.driver_knows or attempt.time.ended == "handed_over"
        if name == names.ATTEMPT_FAILED and over:
            attempt = _Seen(None)  # it had no number of its own yet: the driver gives the last one
            seen.append(attempt)
        elif name in (names.ATTEMPT_STARTED, names.RANKS_JOINED) and attempt is None:
            attempt = by_number[number] = _Seen(number)
            seen.append(attempt)
        if attempt is None or name not in _SIGNS:
            continue  # others may be put on record later, by another command
        if isinstance(happened := fields.get("happened"), str):  # written late: the disk was full
            at = seconds_of({"time": happened})
        if not math.isfinite(attempt.first_word):
            attempt.first_word = attempt.last_word = at
        attempt.last_word = max(attempt.last_word, at) if math.isfinite(at) else attempt.last_word
        _SIGNS[name](attempt, fields, at)
    return seen


def _started(attempt: _Seen, fields: Mapping[str, Any], at: float) -> None:
    cut = fields.get(names.CUT)
    attempt.cut = [each for each in cut if isinstance(each, dict)] if isinstance(cut, list) else []
    attempt.lost_before = _seconds(fields.get(names.LOST_SECONDS))
    attempt.resumed_from = attempt.at_step = step if is_count(step := fields.get("resumed_from")) else 0


def _stepped(attempt: _Seen, fields: Mapping[str, Any], at: float) -> None:
    attempt.phases, attempt.first_step = _phases(fields), at
    attempt.began = at - _seconds(fields.get("seconds"))


def _failed(attempt: _Seen, fields: Mapping[str, Any], at: float) -> None:
    attempt.time.ended, attempt.over, attempt.driver_knows = "failed", at, True
    attempt.stopping = _seconds(fields.get(names.STOP_SECONDS))
    attempt.reached = reached - 1 if is_count(reached := fields.get("reached")) and reached else 0
    if not attempt.phases:
        attempt.phases = _phases(fields)
    if not math.isfinite(attempt.began) and "seconds" in fields:
        attempt.began = at - _seconds(fields["seconds"])


def _ended(attempt: _Seen, fields: Mapping[str, Any], at: float) -> None:
    status = fields.get("status")
    if status in ("finished", "failed", "interrupted", "handed_over") and not attempt.driver_knows:
        attempt.time.ended, attempt.over = status, at


def _noted(attempt: _Seen, fields: Mapping[str, Any], at: float) -> None:
    pass


_SIGNS = {
    names.RANKS_JOINED: _noted,
    names.ATTEMPT_STARTED: _started,
    names.FIRST_STEP: _stepped,
    names.SAVED: _noted,
    names.ATTEMPT_FAILED: _failed,
    names.ATTEMPT_ENDED: _ended,
}
"""Events that an attempt was there for."""


def _add_cuts(seen: list[_Seen], by_number: Mapping[int, _Seen]) -> None:
    """Add the steps that did not stay to the attempts that had trained them."""
    farthest, before = 0, None
    for attempt in seen:
        attempt.before = farthest
        if before is not None and not attempt.cut and attempt.lost_before:
            # Each event has the sum over all attempts since one checkpoint.
            same = before.resumed_from == attempt.resumed_from
            before.uncounted = max(0.0, attempt.lost_before - before.lost_before * same)
        for each in attempt.cut:
            of = by_number.get(number) if is_count(number := each.get("attempt")) else None
            steps, last, until = each.get("steps"), each.get("last"), seconds_of({"time": each.get("until")})
            if of is None or not is_count(steps) or not is_count(last):
                continue
            of.time.steps_lost += steps
            of.time.seconds["lost"] += _seconds(each.get("seconds"))
            of.at_step = max(of.at_step, last)
            if math.isfinite(until):
                of.last = max(of.last, until) if math.isfinite(of.last) else until
            attempt.before = max(attempt.before, last)
        farthest = max(farthest, attempt.before, attempt.reached)
        before = attempt if attempt.time.number is not None else before


class _LaidOut:
    """The attempts one after another, so that each second is of one phase."""

    def __init__(self, seen: list[_Seen]) -> None:
        self._clock = math.nan
        before: _Seen | None = None
        for attempt in seen:
            self._begin(attempt, before)
            self._train(attempt)
            self._end(attempt)
            before = attempt
        for attempt in seen:  # to the millisecond, as the record has its times
            found = attempt.time.seconds
            found |= {phase: round(each, 3) for phase, each in found.items()}
            attempt.time.pause = round(attempt.time.pause, 3)

    def _until(self, moment: float) -> float:
        """Go on to this moment, and return the seconds until then."""
        if not math.isfinite(moment):
            return 0.0
        if not math.isfinite(self._clock):
            self._clock = moment
        passed = min(max(0.0, moment - self._clock), _LONGEST)
        self._clock += passed
        return passed

    def _begin(self, attempt: _Seen, before: _Seen | None) -> None:
        time, phases = attempt.time, attempt.phases
        time.begins_command = before is None or (
            any(phase in phases for phase in _OF_COMMANDS)
            if phases
            else not before.driver_knows and before.time.ended != "handed_over"
        )
        gap = self._until(attempt.began if math.isfinite(attempt.began) else attempt.first_word)
        if time.begins_command or before is None:
            time.pause = gap
        else:
            before.time.seconds["stop"] += gap
        order = list(phases)
        arrived = order.index(_ARRIVED) + 1 if _ARRIVED in order else None
        first = [phase for phase in order if phase in _OF_COMMANDS] if arrived is None else order[:arrived]
        if first and math.isfinite(attempt.began):
            time.seconds["start"] += self._until(attempt.began + sum(phases[phase] for phase in first))

    def _train(self, attempt: _Seen) -> None:
        seconds = attempt.time.seconds
        began, phases = attempt.trained, attempt.phases
        if not math.isfinite(began) and math.isfinite(attempt.first_step):
            began = attempt.first_step - phases.get("step", 0.0)
        evaluated = min(phases.get("evaluation", 0.0), waited := self._until(began))
        seconds["load"] += waited - evaluated
        seconds["between"] += evaluated
        last = attempt.last
        if attempt.uncounted:
            seconds["lost"] = attempt.uncounted
            last = (last if math.isfinite(last) else self._clock) + attempt.uncounted
        if not math.isfinite(last):
            seconds["lost"] = 0.0
            return
        span = max(0.0, last - self._clock) if math.isfinite(self._clock) else 0.0
        # Of those that are gone it is not known for how long the first one waited.
        seconds["lost"] = min(seconds["lost"], max(0.0, span - seconds["productive"]))
        spent = min(seconds["productive"] + seconds["lost"], _LONGEST)
        seconds["between"] += max(0.0, span - spent)
        self._until(self._clock + max(span, spent))

    def _end(self, attempt: _Seen) -> None:
        seconds = attempt.time.seconds
        trained = attempt.time.steps or attempt.time.steps_lost or math.isfinite(attempt.first_step)
        if not attempt.time.failed:  # without an end it was killed together with its command, or it still runs
            over = attempt.over if attempt.time.ended else attempt.last_word
            seconds["between" if trained else "load"] += self._until(over)
        else:
            arrived = _ARRIVED in attempt.phases or attempt.time.number is not None
            before = "detect" if trained else "load" if arrived else "start"
            seconds[before] += self._until(attempt.over - attempt.stopping)
            seconds["stop"] += self._until(attempt.over)
            unknown = attempt.reached - attempt.at_step  # it had trained them, but not put them on record
            attempt.time.steps_lost += max(0, unknown)


def _phases(fields: Mapping[str, Any]) -> dict[str, float]:
    found = fields.get("phases")
    return {str(name): _seconds(each) for name, each in found.items()} if isinstance(found, dict) else {}


def _seconds(value: Any) -> float:
    """Return a number of seconds; 0 if it is none."""
    return float(value) if is_number(value) and 0 <= value <= _LONGEST else 0.0
