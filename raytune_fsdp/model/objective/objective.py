"""What a step minimises: the cross-entropy of its targets, and what a run adds to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from raytune_fsdp.config.sections.train import TrainConfig

if TYPE_CHECKING:
    from raytune_fsdp.model.objective.documents import DocumentLosses
    from raytune_fsdp.model.objective.routers import Routers


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What is added to the cross-entropy. The default is plain cross-entropy, as in evaluation."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    neftune_noise_alpha: float | None = None
    routers: Routers | None = None
    """Watches the routers of a mixture of experts, and adds their losses."""

    documents: DocumentLosses | None = None
    """Notes the losses of documents, which do not change what is minimised."""

    @classmethod
    def of(
        cls, train: TrainConfig, routers: Routers | None = None, documents: DocumentLosses | None = None
    ) -> Objective:
        return cls(
            label_smoothing=train.label_smoothing,
            z_loss=train.z_loss,
            neftune_noise_alpha=train.neftune_noise_alpha,
            routers=routers,
            documents=documents,
        )

    @property
    def experts(self) -> tuple[int, int]:
        """The number of layers with watched routers, and of experts in each."""
        return (0, 0) if self.routers is None else (self.routers.layers, self.routers.experts)

    @property
    def bends_losses(self) -> bool:
        """Whether the loss of a token is not its plain cross-entropy."""
        return bool(self.label_smoothing or self.z_loss)


CROSS_ENTROPY = Objective()
