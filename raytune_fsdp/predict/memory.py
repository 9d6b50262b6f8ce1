"""Find the memory that a rank needs for a step of the whole network, from a few traced layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass

from raytune_fsdp.predict.trace.live import Bytes, Kind, PhaseStart, Timeline, add
from raytune_fsdp.predict.trace.trace import Trace

_OFFLOADED: frozenset[Kind] = frozenset({"weights", "gradients", "optimizer"})
"""What `parallel.cpu_offload` keeps in the memory of the host; it is traced as if it were on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of tensors on a rank, by what they are."""

    start: Bytes
    """What stays from one step to the next, as it is before the step."""
    peak: Bytes
    """What there is when the device holds most."""
    where: str
    """What the rank does then."""
    elsewhere: frozenset[Kind]
    """The kinds that are in the memory of the host."""
    sent: int = 0
    """The most bytes of activations that wait in the memory of the host, which may be before the peak."""

    @property
    def total(self) -> int:
        """Bytes of the device at the peak."""
        return _on_device(self.peak, self.elsewhere)

    @property
    def kept(self) -> int:
        """Bytes of the device that stay from step to step."""
        return _on_device(self.start, self.elsewhere)

    @property
    def on_host(self) -> int:
        """Bytes of the host at the peak."""
        return sum(self.peak.values()) - self.total


@dataclass(frozen=True, slots=True)
class _Phase:
    name: str
    before: Bytes
    most: Bytes
    after: Bytes


def _on_device(parts: Bytes, elsewhere: Container[Kind]) -> int:
    return sum(size for kind, size in parts.items() if kind not in elsewhere)


def memory_of(trace: Trace) -> Memory:
    """Go through the phases of the whole network, each as it was traced, and find the peak."""
    elsewhere = frozenset[Kind]({"host"}) | (_OFFLOADED if trace.offloaded else frozenset())
    phases = {phase.name: phase for phase in _phases(trace.timeline, elsewhere)}
    now = phases["start"].before
    used: set[int] = set()
    for stands in trace.stands_for:  # what the layers that were left out keep
        now = add(now, trace.persistent[stands]) if stands in used else now
        used.add(stands)
    start, peak, where, sent = now, now, "start", 0
    for name in all_phases(trace, phases):
        phase = phases[name]
        most = add(now, add(phase.most, phase.before, -1))
        if _on_device(most, elsewhere) > _on_device(peak, elsewhere):
            peak, where = most, name
        now = add(now, add(phase.after, phase.before, -1))
        sent = max(sent, now.get("host", 0))
    return Memory(start=_whole(start), peak=_whole(peak), where=_in_words(where), elsewhere=elsewhere, sent=sent)


def all_phases(trace: Trace, phases: Container[str]) -> Iterator[str]:
    """Yield the names of the phases of the whole network, in order."""
    yield "start"
    for number in range(trace.passes):
        yield f"pass {number}"
        forward = (f"forward {number} {stands}" for stands in trace.stands_for)
        yield from (name for name in forward if name in phases)  # the layers of the part that sees do not run
        yield f"head {number}"
        backward = (f"backward {number} {stands}" for stands in reversed(trace.stands_for))
        yield from (name for name in backward if name in phases)  # none below the first layer that is trained
    yield "update"


def _phases(timeline: Timeline, elsewhere: Container[Kind]) -> Iterator[_Phase]:
    """Yield what is alive at the beginning, at the most and at the end of each phase between two marks."""
    now: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    place = 0
    marks = [*timeline.marks, PhaseStart("", len(timeline.changes), 0)]
    before: dict[str, int] = {}
    most: dict[str, int] = {}
    for index, mark in enumerate(marks):
        until = mark.changes
        total = _on_device(now, elsewhere)  # type: ignore[arg-type]
        for change in timeline.changes[place:until]:
            kind = timeline.kind(change.storage)
            now[kind] += change.by
            if kind not in elsewhere:
                total += change.by
                if total > sizes["most"]:
                    sizes["most"], most = total, dict(now)
        place = until
        if index:
            yield _Phase(marks[index - 1].name, before, most, dict(now))  # type: ignore[arg-type]
        before, most = dict(now), dict(now)
        sizes["most"] = _on_device(now, elsewhere)  # type: ignore[arg-type]


def _whole(parts: Bytes) -> Bytes:
    return {kind: size for kind, size in parts.items() if size}


def _in_words(where: str) -> str:
    name, *numbers = where.split()
    return {
        "start": "between steps",
        "pass": "before the first layer",
        "forward": f"forward of layer {numbers[-1] if numbers else ''}",
        "head": "norm, head and loss",
        "backward": f"backward of layer {numbers[-1] if numbers else ''}",
        "update": "update of the weights",
    }[name]
