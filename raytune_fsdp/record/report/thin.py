"""Thin curves to at most `MOST` points that lose no extreme: the mean, least and greatest of each bucket of steps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from raytune_fsdp.record.report.history import Numbers

MOST = 1000
"""The most buckets. A curve is about 1,200 pixels wide at most, and 30 curves of three numbers a bucket are 0.7 MB."""
_DIGITS = 5

Buckets = np.ndarray[Any, np.dtype[np.int64]]
"""The index at which each bucket begins, and the end of the last."""


def buckets(count: int, most: int = MOST) -> Buckets:
    """Divide `count` steps into at most `most` buckets, each of one step at least."""
    return np.linspace(0, count, min(count, most) + 1).astype(np.int64)


def thinned(values: Numbers, into: Buckets) -> dict[str, list[float | int | None]]:
    """Return `mid`, the mean of each bucket, and `low` and `high` if buckets have more than one step.

    Values that are not finite do not count; a bucket with no other value is None.
    """
    return band(values, values, values, into)


def band(low: Numbers, mid: Numbers, high: Numbers, into: Buckets) -> dict[str, list[float | int | None]]:
    """Thin a curve that is a band already, to the least of `low`, the mean of `mid` and the greatest of `high`."""
    if len(into) < 2:
        return {"mid": []}
    starts = into[:-1]
    with np.errstate(all="ignore"):  # a bucket without a number has no mean
        known = np.isfinite(mid)
        many = np.add.reduceat(known, starts, dtype=np.int64)
        # Divide before adding: a sum of losses near the largest float would be infinite.
        share = np.repeat(many, np.diff(into))
        means = np.add.reduceat(np.where(known, mid, 0.0) / np.maximum(share, 1), starts)
        found = {"mid": rounded(np.where(many > 0, means, math.nan))}
        if low is not high or len(mid) > len(starts):
            found["low"] = rounded(np.fmin.reduceat(_finite(low), starts))
            found["high"] = rounded(np.fmax.reduceat(_finite(high), starts))
    return found


def rounded(values: Iterable[float]) -> list[float | int | None]:
    """Round numbers for a page to five significant digits; None for what is not finite."""
    return [number(value) for value in values]


def number(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _finite(values: Numbers) -> Numbers:
    return np.where(np.isfinite(values), values, math.nan)
