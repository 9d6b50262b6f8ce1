"""Find steps whose loss stands out from the steps before."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from raytune_fsdp.record.report.history import Numbers

WINDOW = 64
"""A loss is compared with this many steps before it."""
_EVERY = 8  # The window moves by this many steps: the medians of 100,000 steps then take 0.1 s, moving by one 0.8 s.
DEVIATIONS = 8.0
"""One loss in 10**15 is this many standard deviations above the mean, if the noise is normal."""
_LEAST = 0.005
"""The least height of a spike, relative to the median: a loss that hardly moves does not spike in its fourth digit."""
MOST = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """The worst step of a group that stands out together."""

    step: int
    loss: float
    before: float
    """The median of the steps before; NaN if the loss was not finite for all of them."""


def spikes(steps: Numbers, loss: Numbers) -> tuple[list[Spike], int]:
    """Return the `MOST` highest spikes in the order of steps, and how many there are. A non-finite loss is highest."""
    if len(loss) <= WINDOW:
        return [], 0
    with np.errstate(all="ignore"):  # losses near the largest float overflow
        before, height = _heights(loss)
    out = np.flatnonzero(height > DEVIATIONS)
    groups = np.split(out, np.flatnonzero(np.diff(out) > WINDOW) + 1) if len(out) else []
    worst = [int(group[np.argmax(height[group])]) for group in groups]
    shown = sorted(sorted(worst, key=lambda i: -height[i])[:MOST])
    found = [Spike(step=int(steps[i]), loss=float(loss[i]), before=float(before[i])) for i in shown]
    return found, len(worst)


def _heights(loss: Numbers) -> tuple[Numbers, Numbers]:
    """Return for every step the median of the steps before, and how many deviations its loss is above it."""
    known = np.isfinite(loss)
    # A loss that is not finite counts as the last finite one; if none is, all are 0.
    last = np.maximum.accumulate(np.where(known, np.arange(len(loss)), -1))
    filled = loss[np.maximum(last, int(np.argmax(known)))] if known.any() else np.zeros_like(loss)
    windows = np.lib.stride_tricks.sliding_window_view(filled[:-1], WINDOW)[::_EVERY]
    medians, deviations = np.empty(len(windows)), np.empty(len(windows))
    for first in range(0, len(windows), 8192):  # 4 MB each
        some = windows[first : first + 8192]
        middle = np.median(some, axis=1)
        medians[first : first + 8192] = middle
        deviations[first : first + 8192] = 1.4826 * np.median(np.abs(some - middle[:, None]), axis=1)
    place = np.arange(len(loss) - WINDOW) // _EVERY
    scale = np.maximum(deviations, np.maximum(_LEAST / DEVIATIONS * np.abs(medians), 1e-12))
    before, height = np.full(len(loss), math.nan), np.zeros(len(loss))
    before[WINDOW:] = medians[place]
    height[WINDOW:] = (filled[WINDOW:] - medians[place]) / scale[place]
    height[~known] = math.inf
    return before, height
