"""How often to save, for how often something fails: the interval that loses the least time, and the share that is left.

Failures come at random, one in so many GPU hours. Each costs what was trained since the state of the newest checkpoint
was taken, and the time until the next attempt trains; each save holds training up for a moment, and counts once it is
written. The means of that are known in closed form; `benchmarks/productive.py` draws such failures, and agrees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GPU_HOURS = 50_700.0
"""GPU hours between two failures: Llama 3's 54 days on 16,384 GPUs had 419 unexpected interruptions."""
STALL_SECONDS, WRITE_SECONDS = 0.5, 30.0
"""How long a save holds training up, and how long it takes until it is committed, while training goes on."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """The seconds from a failure to the next attempt's first step."""

    detect: float = 2.8
    """Until it is noticed and all ranks have ended. This and the next two were measured after the loss of one of two
    nodes on two cores (docs/results.md), where nothing is large."""
    start: float = 4.4
    """Until ranks are there."""
    imports: float = 0.2
    load: float = 50.0
    """Until the first step: 2.0 s as measured, and, assumed, a checkpoint of 12 GB for each GPU, read with 250 MB/s."""

    @property
    def seconds(self) -> float:
        return self.detect + self.start + self.imports + self.load


RECOVERY_SECONDS = Recovery().seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """How often something fails, and what it costs."""

    gpus: int
    gpu_hours: float = GPU_HOURS
    stall: float = STALL_SECONDS
    write: float = WRITE_SECONDS
    recovery: float = RECOVERY_SECONDS

    @property
    def apart(self) -> float:
        """The mean seconds of running between two failures."""
        return self.gpu_hours * 3600 / self.gpus

    def share(self, interval: float) -> float:
        """Return the share of the time in which steps are trained that stay, with a save after every `interval`
        seconds of training."""
        mean, cycle = self.apart, interval + self.stall
        if cycle + self.write > 700 * mean:  # nothing is ever saved, and the exponential would overflow
            return 0.0
        cycles = cycle / mean
        saved = mean * cycles / math.expm1(cycles) if cycles else mean  # seconds until a failure that a save has kept
        trained = interval / cycle if cycle else 1.0  # of these
        return math.exp(-self.write / mean) * saved * trained / (mean + self.recovery)

    def best_interval(self) -> float:
        """Return the interval whose share is largest: about the root of 2 * stall * apart, but no shorter than a save
        takes, since one is written at a time."""
        mean = self.apart
        low, high = 0.0, 1.0  # the interval in units of `mean`, at which the derivative of `share` is 0
        for _ in range(60):
            middle = (low + high) / 2
            if -math.expm1(-middle - self.stall / mean) > middle:
                low = middle
            else:
                high = middle
        return max(self.write, low * mean)
