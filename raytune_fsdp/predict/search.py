"""Find the cheapest cluster on which a config ends in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.plan.plan import Plan, resolve
from raytune_fsdp.predict.devices import Device
from raytune_fsdp.predict.planned import cost
from raytune_fsdp.predict.prediction import Cluster, Prediction, predict_from, traced
from raytune_fsdp.predict.subject import ModelSpec
from raytune_fsdp.predict.trace.trace import Trace

_RECOMPUTE = ("none", "selective", "full")

_FIELD = "parallel.activation_checkpointing"

_MOST_NODES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A device, and what it costs by the hour."""

    device: Device
    price: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Suitable:
    changes: Mapping[str, Any]
    """Fields of the config and their new values."""
    prediction: Prediction
    price: float | None
    """The price of the whole run."""


def search(
    subject: ModelSpec,
    config: FinetuneConfig,
    plan: Plan,
    offers: Sequence[Offer],
    *,
    per_node: int,
    between: float | None,
    most_hours: float | None,
) -> list[Suitable]:
    """Return clusters on which it fits and ends in time, the cheapest first.

    They are compared by price where all have one, else by GPU-hours. How activations are kept is chosen for each;
    everything that decides what is learned stays.
    """
    config = config.with_sections(train={"max_steps": plan.steps, "epochs": None})
    best: list[Suitable] = []
    wants_bf16 = config.parallel.precision.startswith("bf16")
    wants_fp8 = config.parallel.precision == "fp8"
    offers = [each for each in offers if (each.device.bf16 or not wants_bf16) and (each.device.fp8 or not wants_fp8)]
    batches = config.train.global_batch // config.train.micro_batch * config.parallel.mesh.together
    # At most as many GPUs as a step has micro-batches, or parts.
    for world in sizes(per_node, min(batches, _MOST_NODES * per_node)):
        fitting: dict[str, list[Suitable]] = {}
        for recompute in _RECOMPUTE:
            changed = config.with_sections(parallel={"activation_checkpointing": recompute})
            try:
                here = resolve(changed, world)
            except ConfigError:  # hybrid_shard wants multiples
                break
            same: dict[str, Trace] = {}
            for offer in offers:
                kind = offer.device.kind
                cluster = Cluster(device=offer.device, per_node=per_node, between=between)
                if kind not in same or world == 1:
                    same[kind] = traced(subject, changed, here, cluster)
                prediction = predict_from(same[kind], changed, here, cluster)
                changes = {} if recompute == config.parallel.activation_checkpointing else {_FIELD: recompute}
                each = Suitable(changes=changes, prediction=prediction, price=cost(prediction, offer.price))
                if prediction.fits and (most_hours is None or prediction.hours <= most_hours):
                    fitting.setdefault(offer.device.name, []).append(each)
        best += [min(found, key=lambda each: each.prediction.hours) for found in fitting.values()]
    priced = all(each.price is not None for each in best)
    return sorted(
        best, key=lambda each: (each.price or 0.0) if priced else each.prediction.hours * each.prediction.world
    )


def sizes(per_node: int, most: int) -> list[int]:
    """Return numbers of GPUs, up to this many: 1, 2, 4 … of a machine, then 1, 2, 4 … machines."""
    powers = [2**power for power in range(most.bit_length())]
    return [each for each in powers if each < per_node] + [n * per_node for n in powers if n * per_node <= most]
