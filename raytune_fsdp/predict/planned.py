"""Find out everything about a config on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.plan.plan import Plan
from raytune_fsdp.predict.advise.advice import Advice, advice
from raytune_fsdp.predict.advise.alternatives import (
    Alternative,
    allowed_micro_batch,
    alternatives,
    in_order,
    micro_batches,
    moving_less,
    shared,
    step_down,
)
from raytune_fsdp.predict.host import HostNeeds, host_needs
from raytune_fsdp.predict.prediction import Cluster, Prediction, predict
from raytune_fsdp.predict.stopping import Stopping, Writing
from raytune_fsdp.predict.subject import ModelSpec
from raytune_fsdp.predict.teacher import teacher_pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Everything that was found out about a config on a cluster."""

    prediction: Prediction
    host_needs: HostNeeds
    advice: Sequence[Advice]
    largest_micro_batch: int | None
    """The largest that fits, whatever the batch is; None: not even one sample fits."""
    allowed_micro_batch: int
    """The largest that the batch has for every rank."""
    paying_micro_batch: int | None
    """The size from which a larger one no longer pays; None: not known."""
    step_down: Alternative | None
    """The first change that learns the same and would free memory; None: there is none."""
    alternatives: Sequence[Alternative]
    shared: Alternative | None
    """The alternative in which the fewest ranks share each sample, or else every layer, so that it fits; None: it fits,
    or no such mesh does."""
    price: float | None
    """The price of a GPU for an hour."""
    free: int | None
    """Free bytes at the place of the checkpoints; None: it is not on this machine."""
    stopping: Stopping | None
    """How long saves and stops take; None: how fast its storage writes is not known."""
    basis: str
    """Where the network's sizes are from."""


def planned(
    config: FinetuneConfig,
    plan: Plan,
    cluster: Cluster,
    *,
    architecture: Path | None = None,
    price: float | None = None,
    free: int | None = None,
    writing: Writing | None = None,
    with_alternatives: bool = False,
) -> Planned:
    """Plan a run on as many of these GPUs as `plan` has ranks. Look for alternatives, too, where it does not fit."""
    asked, config = config, as_long(config, plan)
    subject, world = ModelSpec.of(config, architecture), plan.layout.world
    found = predict(subject, config, plan, cluster)
    others = alternatives(subject, config, world, cluster) if with_alternatives or not found.fits else []
    together = shared(subject, config, found)
    if together is not None:
        others = in_order([*others, together])
    largest, paying = micro_batches(subject, config, found)
    bound = found.seconds.bound == "communication"
    stopping = None if writing is None else Stopping.of(found, writing)
    return Planned(
        prediction=found,
        host_needs=host_needs(config, found),
        advice=advice(
            asked,
            found,
            moving_less(subject, config, found) if bound else None,
            stopping,
            teacher_pass(asked, plan, cluster),
        ),
        largest_micro_batch=largest,
        allowed_micro_batch=allowed_micro_batch(config, world),
        paying_micro_batch=paying,
        step_down=step_down(subject, config, found),
        alternatives=others,
        shared=together,
        price=price,
        free=free,
        stopping=stopping,
        basis=subject.basis,
    )


def as_long(config: FinetuneConfig, plan: Plan) -> FinetuneConfig:
    """Return the config with its length in steps, also where that was given in epochs."""
    return config.with_sections(train={"max_steps": plan.steps, "epochs": None})


def cost(found: Prediction, price: float | None) -> float | None:
    return None if price is None else found.hours * found.world * price
