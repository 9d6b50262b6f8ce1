"""What was predicted of a run's ranks before they started: what they measure is held against it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Of a rank, by `predict/`, for one number of ranks."""

    kept: int
    """Bytes of its device that tensors have from step to step: weights, buffers, the optimizer's state. Exact."""
    peak: int
    """Bytes of tensors, when they are most in a step in which every token is trained on."""
    where: str
    """What the rank does then."""
    beside: int
    """Bytes of the device that no tensor has: libraries, and gaps between tensors. Estimated."""
    checkpoint: int
    """Bytes of one, of all ranks together."""
    seconds: float | None
    """Of a step; None where nothing is known of the device's speed."""

    @property
    def needed(self) -> int:
        return self.peak + self.beside


@dataclass(frozen=True, slots=True)
class NotPredicted:
    because: str
