"""Compare what was predicted for a rank with what it measures, once in every attempt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from raytune_fsdp.base.measured import NotPredicted, Predicted, StepMetrics

_FIRST_STEPS = 1
"""The first steps do not count: they compile, and fill caches."""

_ENOUGH = 8
"""Steps of an attempt after which the prediction is judged; a shorter run is judged at its last step."""


class Forecast:
    """Judges a prediction by all steps, in order. Not collective."""

    def __init__(
        self, predicted: Predicted | NotPredicted | None, kept: Callable[[], int], *, gpu: bool, last: int
    ) -> None:
        """`kept` returns the bytes that tensors have on the device between two steps. `last` is the run's last step."""
        self._predicted = predicted if isinstance(predicted, Predicted) else None
        self._kept, self._gpu, self._last = kept, gpu, last
        self._seconds: list[float] = []
        self._news: dict[str, Any] | None = None

    def compared(self, rows: Sequence[StepMetrics]) -> list[StepMetrics]:
        """Return the rows; once in an attempt, add to the last of them how far the prediction was off."""
        found = list(rows)
        predicted = self._predicted
        if predicted is None or not found:
            return found
        self._seconds += [row.step_seconds for row in found]
        if len(self._seconds) < _ENOUGH and found[-1].step < self._last:
            return found
        self._predicted = None  # once is enough
        later = self._seconds[_FIRST_STEPS:]
        kept, peak = self._kept(), max((found[-1].memory_bytes, *found[-1].rank_memory_bytes))
        errors = {
            "kept": _error(predicted.kept, kept),
            # On a CPU the peak of tensors is not known: what is measured is that of the process.
            "peak": _error(predicted.peak, peak) if self._gpu else None,
            "seconds": _error(predicted.seconds, median(later)) if predicted.seconds is not None and later else None,
        }
        self._news = {
            "step": found[-1].step,
            "kept_bytes": kept,
            "peak_bytes": peak if self._gpu else None,
            "step_seconds": median(later) if later else None,
            **{f"{name}_error": each for name, each in errors.items()},
        }
        found[-1] = replace(found[-1], predicted=tuple(errors.values()))
        return found

    def news(self) -> list[dict[str, Any]]:
        """Return what has been found since the last call."""
        found, self._news = self._news, None
        return [] if found is None else [found]


def _error(predicted: float, measured: float) -> float | None:
    """Return the relative error of a prediction (predicted / measured - 1)."""
    return predicted / measured - 1 if measured else None
