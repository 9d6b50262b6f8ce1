"""How often something is done, for fields that allow more than a number of steps."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from raytune_fsdp.config.rules import Section


class PerEpoch(Section):
    per_epoch: int = Field(ge=1)
    """How many times in every pass over the data: after the same steps on any number of ranks. Needs `train.epochs`."""

    def __str__(self) -> str:
        return f"{{per_epoch: {self.per_epoch}}}"


class SaveEvery(Section):
    """One of two ways to say how often a run is saved."""

    minutes: float | None = Field(default=None, gt=0)
    """Minutes of training after the newest checkpoint."""

    per_epoch: int | None = Field(default=None, ge=1)
    """How many times in every pass over the data: after the same steps on any number of ranks. Needs `train.epochs`."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.minutes is None) == (self.per_epoch is None):
            raise ValueError(f"minutes={self.minutes} and per_epoch={self.per_epoch}: set one of the two")
        return self

    def __str__(self) -> str:
        return f"{{minutes: {self.minutes:g}}}" if self.per_epoch is None else f"{{per_epoch: {self.per_epoch}}}"
