"""A process's sign of life: it counts progress in the work, for a thread that reports it.

A beat is an addition and never touches the device. Code that waits for something else, such as storage, says for how
long this is no reason to worry.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Pulse:
    beats: int = 0
    step: int = 0
    """The last step whose batch was taken."""
    patience_seconds: float = 0.0
    """How much longer than usual the next beat may take."""
    computing: int = 0
    """Calls of others' code that are running: they cannot beat, and make progress as long as they use the processor."""


_pulse = Pulse()


def beat(step: int | None = None) -> None:
    """Note progress: one more micro-batch of a step or an evaluation, or another answer, is done."""
    _pulse.beats += 1
    if step is not None:
        _pulse.step = step


def pulse() -> Pulse:
    """Return the pulse of this process."""
    return _pulse


@contextmanager
def computing() -> Iterator[None]:
    """Mark the body of a `with` as one long call that cannot beat, such as a compiler's."""
    _pulse.computing += 1
    try:
        yield
    finally:
        _pulse.computing -= 1
        beat()


@contextmanager
def waiting(seconds: float) -> Iterator[None]:
    """Mark the body of a `with` as one that may wait this long for something that is not ours."""
    beat()
    _pulse.patience_seconds += seconds
    try:
        yield
    finally:
        _pulse.patience_seconds -= seconds
        beat()
