"""`optim`: the optimizer, its learning rate over time, clipping."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from raytune_fsdp.config.rules import Section, check_expression
from raytune_fsdp.config.sections.optimizers import UNUSED, AdamWOptimizer, OptimizerChoice

Floor = Annotated[float, Field(ge=0, le=1, description="Final learning rate, as a fraction of `optim.lr`.")]


class ConstantSchedule(Section):
    type: Literal["constant"]
    """The learning rate stays at its peak after warmup."""


class LinearSchedule(Section):
    type: Literal["linear"]
    """The learning rate falls linearly."""

    floor: Floor = 0.0


class CosineSchedule(Section):
    type: Literal["cosine"] = "cosine"
    """The learning rate falls along half a cosine."""

    floor: Floor = 0.0


class WsdSchedule(Section):
    type: Literal["wsd"]
    """Warmup, stable, decay: constant, with a linear fall at the end."""

    decay: float = Field(default=0.1, gt=0, le=1)
    """Fraction of the steps that the final decay takes."""

    floor: Floor = 0.0


class PolynomialSchedule(Section):
    type: Literal["polynomial"]
    """The learning rate falls as a power of the steps that are left."""

    power: float = Field(default=2.0, gt=0)
    """The power; 1 is linear."""

    floor: Floor = 0.0


class InverseSqrtSchedule(Section):
    type: Literal["inverse_sqrt"]
    """The learning rate falls as one over the square root of the steps, without an end."""

    timescale: int | None = Field(default=None, ge=1)
    """Steps after which it has fallen to 0.71 of the peak. Null: the length of the warmup, or 10,000 without one."""


class OneCycleSchedule(Section):
    type: Literal["one_cycle"]
    """The learning rate rises along half a cosine and falls along another. The rise is the warmup."""

    rise: float = Field(default=0.3, gt=0, lt=1)
    """Fraction of the steps in which it rises."""

    start: float = Field(default=0.04, ge=0, le=1)
    """First learning rate, as a fraction of `optim.lr`."""

    floor: Floor = 4e-6


Schedule = Annotated[
    ConstantSchedule
    | LinearSchedule
    | CosineSchedule
    | WsdSchedule
    | PolynomialSchedule
    | InverseSqrtSchedule
    | OneCycleSchedule,
    Field(discriminator="type"),
]


class GroupConfig(Section):
    match: str
    """A regular expression. The group has all weights in whose names it is found and that no earlier group has."""

    lr_ratio: float = Field(default=1.0, gt=0)
    """The group's learning rate, as a multiple of what it would be otherwise."""

    weight_decay: float | None = Field(default=None, ge=0)
    """The group's weight decay, which also holds for norms, biases and embeddings in it. Null: what it would be otherwise."""

    @model_validator(mode="after")
    def _expression(self) -> Self:
        check_expression("match", self.match)
        return self


class OptimConfig(Section):
    optimizer: OptimizerChoice = Field(default_factory=AdamWOptimizer)
    """The rule that updates the weights."""

    lr: float = Field(default=5e-5, gt=0)
    """Peak learning rate."""

    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay; norms, biases and embeddings are left out."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """First decay rate of AdamW, also of the AdamW in muon."""

    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Second decay rate of AdamW, also of the AdamW in muon."""

    eps: float = Field(default=1e-8, gt=0)
    """Epsilon of AdamW, also of the AdamW in muon."""

    stochastic_rounding: bool = False
    """Round updated weights up or down by chance, so that small updates are not lost, with `parallel.precision: bf16_pure`.
    The chance is keyed by seed, step, weight and place."""

    groups: list[GroupConfig] = Field(default_factory=list)
    """Weights with a learning rate or decay of their own."""

    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Clip the global norm of the gradient to this. Null: no clipping."""

    warmup_ratio: float = Field(default=0.03, ge=0, le=1)
    """Fraction of the scheduled steps in which the learning rate rises from zero."""

    warmup_steps: int | None = Field(default=None, ge=0)
    """Length of the warmup in steps, instead of `warmup_ratio`."""

    schedule: Schedule = Field(default_factory=CosineSchedule)
    """The learning rate after warmup."""

    schedule_steps: int | None = Field(default=None, ge=1)
    """Steps that the schedule is planned for. Default: the length that the run had when it first started. A run that is
    extended later keeps that length, and stays at the floor, unless this is set. If the floor is 0, so that added steps
    would train nothing, it must be set."""

    max_skipped: int = Field(default=10, ge=1)
    """Updates whose loss or gradient norm is not finite are skipped on all ranks; this many in a row stop the run."""

    @model_validator(mode="after")
    def _used(self) -> Self:
        kind = self.optimizer.type
        for name in UNUSED.get(kind, ()):
            value, default = getattr(self, name), type(self).model_fields[name].default
            # Judged by its value, not by whether the user wrote it: the config.yaml of a run has every field.
            if value != default:
                own = f"; {kind}'s own is optim.optimizer.{name}" if hasattr(self.optimizer, name) else ""
                raise ValueError(
                    f"optim.{name}={value:g}: means nothing to optim.optimizer.type={kind}: leave it out, or set it back "
                    f"to {default:g}{own}"
                )
        return self

    @model_validator(mode="after")
    def _warmup(self) -> Self:
        for name in ("warmup_ratio", "warmup_steps"):
            value, default = getattr(self, name), type(self).model_fields[name].default
            if self.schedule.type == "one_cycle" and value and value != default:  # by its value, as above
                raise ValueError(
                    f"optim.{name}={value}: the schedule one_cycle has a rise of its own: set "
                    "optim.schedule.rise, and leave the warmup out"
                )
        if self.schedule_steps is not None and (self.warmup_steps or 0) > self.schedule_steps:
            raise ValueError(
                f"optim.warmup_steps={self.warmup_steps} is more than optim.schedule_steps={self.schedule_steps}: "
                "lower the first or raise the second"
            )
        return self
