"""What was predicted for a run's ranks before they started, to be compared with what they measure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The prediction of `predict/` for a rank, at one number of ranks."""

    kept: int
    """Bytes of its device that tensors hold from step to step: weights, buffers, the optimizer's state. Exact."""
    peak: int
    """The most bytes of tensors during a step in which every token is trained on."""
    where: str
    """What the rank does at that peak."""
    assumed: int
    """Bytes of the device besides tensors: libraries, and gaps between tensors. Estimated."""
    checkpoint: int
    """Bytes of one checkpoint, of all ranks together."""
    seconds: float | None
    """Seconds of a step; None if nothing is known of the device's speed."""

    @property
    def needed(self) -> int:
        return self.peak + self.assumed


@dataclass(frozen=True, slots=True)
class NotPredicted:
    because: str
