"""A sign of life: how often this process has got on with its work, for a thread that reports it.

A beat is an addition and never touches the device. Where work waits for something else, such as storage, it says for
how long that is no reason to worry.
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
    """How long the next beat may take, besides what a beat takes usually."""
    computing: int = 0
    """Calls of others' code that run now, cannot beat, and get on as long as they use the processor."""


_pulse = Pulse()


def beat(step: int | None = None) -> None:
    """One more block of a step, of an evaluation, or another answer is done."""
    _pulse.beats += 1
    if step is not None:
        _pulse.step = step


def pulse() -> Pulse:
    """That of this process."""
    return _pulse


@contextmanager
def computing() -> Iterator[None]:
    """The block is one long call that cannot beat, such as a compiler's."""
    _pulse.computing += 1
    try:
        yield
    finally:
        _pulse.computing -= 1
        beat()


@contextmanager
def waiting(seconds: float) -> Iterator[None]:
    """The block may wait this long for something that is not ours."""
    beat()
    _pulse.patience_seconds += seconds
    try:
        yield
    finally:
        _pulse.patience_seconds -= seconds
        beat()
