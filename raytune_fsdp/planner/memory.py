"""From a few traced blocks to the memory that a rank needs for a step of the whole network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass

from raytune_fsdp.planner.live import Bytes, PhaseStart, Timeline, add
from raytune_fsdp.planner.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of tensors on a rank, by what they are."""

    start: Bytes
    """Before the step: what stays from one to the next."""
    peak: Bytes
    """When they are most together."""
    where: str
    """What the rank does then."""

    @property
    def total(self) -> int:
        return on_device(self.peak)


@dataclass(frozen=True, slots=True)
class _Phase:
    name: str
    before: Bytes
    most: Bytes
    after: Bytes


def on_device(parts: Bytes) -> int:
    return sum(size for kind, size in parts.items() if kind != "host")


def memory_of(trace: Trace) -> Memory:
    """The traced phases, each as often as the whole network goes through it, one after the other."""
    phases = {phase.name: phase for phase in _phases(trace.timeline)}
    now = phases["start"].before
    used: set[int] = set()
    for stands in trace.stands_for:  # what the blocks that were left out keep
        now = add(now, trace.persistent[stands]) if stands in used else now
        used.add(stands)
    start, peak, where = now, now, "start"
    for name in all_phases(trace, phases):
        phase = phases[name]
        most = add(now, add(phase.most, phase.before, -1))
        if on_device(most) > on_device(peak):
            peak, where = most, name
        now = add(now, add(phase.after, phase.before, -1))
    return Memory(start=_whole(start), peak=_whole(peak), where=_in_words(where))


def all_phases(trace: Trace, phases: Container[str]) -> Iterator[str]:
    """The names of the phases of the whole network, in order."""
    yield "start"
    for number in range(trace.passes):
        yield f"pass {number}"
        yield from (f"forward {number} {stands}" for stands in trace.stands_for)
        yield f"head {number}"
        backward = (f"backward {number} {stands}" for stands in reversed(trace.stands_for))
        yield from (name for name in backward if name in phases)  # none below the first block that is trained
    yield "update"


def _phases(timeline: Timeline) -> Iterator[_Phase]:
    """What is alive at the beginning, at the most and at the end of what is between two marks."""
    now: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    place = 0
    marks = [*timeline.marks, PhaseStart("", len(timeline.changes), 0)]
    before: dict[str, int] = {}
    most: dict[str, int] = {}
    for index, mark in enumerate(marks):
        until = mark.changes
        total = on_device(now)  # type: ignore[arg-type]
        for change in timeline.changes[place:until]:
            kind = timeline.kind(change.storage)
            now[kind] += change.by
            if kind != "host":
                total += change.by
                if total > sizes["most"]:
                    sizes["most"], most = total, dict(now)
        place = until
        if index:
            yield _Phase(marks[index - 1].name, before, most, dict(now))  # type: ignore[arg-type]
        before, most = dict(now), dict(now)
        sizes["most"] = on_device(now)  # type: ignore[arg-type]


def _whole(parts: Bytes) -> Bytes:
    return {kind: size for kind, size in parts.items() if size}


def _in_words(where: str) -> str:
    name, *numbers = where.split()
    return {
        "start": "between steps",
        "pass": "before the first block",
        "forward": f"forward of block {numbers[-1] if numbers else ''}",
        "head": "norm, head and loss",
        "backward": f"backward of block {numbers[-1] if numbers else ''}",
        "update": "update of the weights",
    }[name]
