"""`optim.optimizer`: the rule that updates the weights."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from raytune_fsdp.config.rules import Section


class AdamWOptimizer(Section):
    type: Literal["adamw"] = "adamw"
    """AdamW, with `optim.beta1`, `optim.beta2` and `optim.eps`."""

    moments: Literal["as_weights", "fp32", "bf16", "8bit"] = "as_weights"
    """The type in which moments are kept. `as_weights`: fp32, but with `bf16_pure` bf16, rounded to the nearest. `bf16`:
    rounded stochastically. `8bit`: quantized in groups of 256 numbers; weights of fewer than 4,096 numbers keep fp32."""


class AdafactorOptimizer(Section):
    type: Literal["adafactor"]
    """Adafactor: keeps only the means of rows and columns of a matrix's second moments, and no first moments."""

    decay_power: float = Field(default=0.8, gt=0, le=1)
    """The second moment's decay rate in step t is 1 - t^-power."""

    clip: float = Field(default=1.0, gt=0)
    """A weight's update is scaled down to this root mean square."""


class SgdOptimizer(Section):
    type: Literal["sgd"]
    """Gradient descent. Its learning rates are far larger than AdamW's."""

    momentum: float = Field(default=0.9, ge=0, lt=1)
    """How much of the running sum of gradients is kept at each step; 0: nothing."""

    nesterov: bool = False
    """Look ahead by one step of the momentum."""

    @model_validator(mode="after")
    def _momentum(self) -> Self:
        if self.nesterov and not self.momentum:
            raise ValueError(
                "optim.optimizer.nesterov=true with optim.optimizer.momentum=0: there is no momentum to look ahead by: "
                "set momentum to 0.9, or leave nesterov out"
            )
        return self


class MuonOptimizer(Section):
    type: Literal["muon"]
    """Muon: the update of each matrix in the layers is made orthogonal, with steps as large as AdamW's; AdamW for
    embeddings, head, norms, biases and routers."""

    momentum: float = Field(default=0.95, ge=0, lt=1)
    """How much of the running mean of gradients is kept at each step."""

    nesterov: bool = True
    """Look ahead by one step of the momentum."""

    iterations: int = Field(default=5, ge=1, le=20)
    """Newton-Schulz iterations."""

    rest_lr_ratio: float = Field(default=1.0, gt=0)
    """The learning rate of the weights that AdamW updates, as a multiple of `optim.lr`."""


class LionOptimizer(Section):
    type: Literal["lion"]
    """Lion: every weight moves by the learning rate, in the direction of a mean of gradients. It wants a third to a tenth of
    AdamW's rate, and three to ten times its decay."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """The share of the mean in the direction; the rest is the gradient."""

    beta2: float = Field(default=0.99, ge=0, lt=1)
    """The mean's decay rate."""


OptimizerChoice = Annotated[
    AdamWOptimizer | AdafactorOptimizer | SgdOptimizer | MuonOptimizer | LionOptimizer, Field(discriminator="type")
]

UNUSED: dict[str, tuple[str, ...]] = {
    "adafactor": ("beta1", "beta2", "eps"),
    "sgd": ("beta1", "beta2", "eps"),
    "lion": ("beta1", "beta2", "eps"),
}
"""For each optimizer, the fields of `optim` that mean nothing to it."""


def state_bytes(chosen: OptimizerChoice, weight: int) -> float:
    """Return the bytes of state per trained number, which has `weight` bytes itself; for muon, of a matrix's number."""
    if chosen.type == "adamw":
        # With 8 bits, two scales in fp32 for each group of 256 numbers.
        return {"as_weights": 2.0 * weight, "fp32": 8.0, "bf16": 4.0, "8bit": 2 + 8 / 256}[chosen.moments]
    if chosen.type == "sgd":
        return weight if chosen.momentum else 0.0
    return 0.0 if chosen.type == "adafactor" else weight
