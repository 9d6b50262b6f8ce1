"""What a step minimises: the cross-entropy of its targets, and what a run adds to that."""

from __future__ import annotations

from dataclasses import dataclass

from raytune_fsdp.config.train import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What is added to the cross-entropy. As it is by default, it is what an evaluation measures: that alone."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    neftune_noise_alpha: float | None = None

    @classmethod
    def of(cls, train: TrainConfig) -> Objective:
        return cls(
            label_smoothing=train.label_smoothing,
            z_loss=train.z_loss,
            neftune_noise_alpha=train.neftune_noise_alpha,
        )

    @property
    def bends_losses(self) -> bool:
        """Whether the loss of a token is another one than its cross-entropy."""
        return bool(self.label_smoothing or self.z_loss)


CROSS_ENTROPY = Objective()
