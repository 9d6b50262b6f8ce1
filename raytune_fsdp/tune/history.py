"""What the log says of each trial."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from raytune_fsdp.tune.log import Decision, Draw, Entry, Trial, TrialEnded, Value

State = Literal["open", "stopped", "complete", "failed"]


@dataclass(slots=True)
class TrialHistory:
    """What became of a trial so far."""

    trial: Trial
    values: dict[int, float] = field(default_factory=dict)
    """By step, in the order in which they came."""
    ended: TrialEnded | None = None
    """How its newest run has ended."""
    stopped: bool = False
    draws: list[Draw] = field(default_factory=list)

    @property
    def number(self) -> int:
        return self.trial.number

    @property
    def state(self) -> State:
        if self.ended is not None and self.ended.error is not None:
            return "failed"
        return "stopped" if self.stopped else "open" if self.ended is None else "complete"

    @property
    def step(self) -> int:
        """The step of its last value; 0 if it has none."""
        return max(self.values, default=0)

    @property
    def last(self) -> float:
        """Its last value; NaN if it has none."""
        return self.values[self.step] if self.values else math.nan

    @property
    def changes(self) -> Mapping[str, Any]:
        """What it changes of the base in its newest run (`tune/log.py:changes_now`)."""
        return self.draws[-1].changes if self.draws else self.trial.changes

    def lacks(self, found: Value | TrialEnded) -> bool:
        """Return whether this is news: it goes on, and what was found is of its newest run and not on the log."""
        if self.state != "open" or (self.draws and found.step < self.draws[-1].step):
            return False
        return isinstance(found, TrialEnded) or found.step > self.step


def histories(trials: Iterable[Trial], log: Iterable[Entry]) -> dict[int, TrialHistory]:
    """Return what became of each trial, by its number."""
    known = {trial.number: TrialHistory(trial) for trial in trials}
    for entry in log:
        match entry:
            case Value():
                known[entry.trial].values[entry.step] = entry.value
            case TrialEnded():
                known[entry.trial].ended = entry
            case Decision():
                for number in entry.stop:
                    known[number].stopped = True
            case Draw():
                drawn = known[entry.trial]
                drawn.draws.append(entry)
                drawn.ended, drawn.stopped = None, False
    return known


def rank(value: float, highest: bool) -> tuple[bool, float]:
    """Return what values are sorted by, the best first: those that are not finite come last."""
    finite = math.isfinite(value)
    return not finite, (-value if highest else value) if finite else 0.0


def has_failed(new: Sequence[Value | TrialEnded], until: int | None) -> bool:
    """Return whether the news of a trial is that it has failed for good, or was left out, no further than this step."""
    end = new[-1] if new else None
    return isinstance(end, TrialEnded) and end.error is not None and until is not None and end.step <= until


def end_of(new: Sequence[Value | TrialEnded], until: int | None) -> list[Value | TrialEnded]:
    """Return what of the news of a trial that has ended belongs on the log: its last value, and its end.

    Of one that has failed where trials are compared, not the value there: the comparison follows at once, and it would
    win a place.
    """
    lost = has_failed(new, until)
    return [each for each in new if not (lost and isinstance(each, Value) and each.step == until)][-2:]


def news(found: Iterable[Value | TrialEnded], known: Mapping[int, TrialHistory]) -> dict[int, list[Value | TrialEnded]]:
    """Return what was found of each trial and is not on the log: values by their steps, then the end of its run."""
    own: dict[int, dict[float, Value | TrialEnded]] = {}
    for each in found:
        if known[each.trial].lacks(each):
            own.setdefault(each.trial, {})[each.step if isinstance(each, Value) else math.inf] = each
    return {number: [new[step] for step in sorted(new)] for number, new in own.items()}
