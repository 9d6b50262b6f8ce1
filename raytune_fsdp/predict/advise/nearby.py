"""What one small change of a config would do: free memory, make it fit, or have a step wait less for its links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from raytune_fsdp.base.errors import RaytuneError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.predict.advise.alternatives import Alternative, certainly_too_much
from raytune_fsdp.predict.advise.changes import with_changes
from raytune_fsdp.predict.prediction import Prediction, predict
from raytune_fsdp.predict.subject import Subject
from raytune_fsdp.predict.trace.live import Kind

_FASTER = 0.97
"""Of a step's time: what saves less is not worth a word."""

_RECOMPUTE = "parallel.activation_checkpointing"

_AXES: Mapping[str, tuple[Kind, ...]] = {"sequence": ("activations",), "tensor": ("activations", "gathered")}
"""Of a mesh, in the order in which they are tried, and the parts of the peak that they divide."""

_MEMBERS = (2, 4, 8)
"""Ranks that compute together: more than a machine has would exchange over its links to others."""


def step_down(subject: Subject, config: FinetuneConfig, found: Prediction) -> Alternative | None:
    """The first change that learns the same and would free memory of the device. (Other methods are among the
    alternatives: tracing one takes a 70B's first page three seconds.)"""
    for changes in _down(config, found):
        other = _with(subject, config, found, changes)
        if other is not None and other.prediction.needed < found.needed:
            return other
    return None


def _down(config: FinetuneConfig, found: Prediction) -> Iterator[Mapping[str, Any]]:
    parallel, train = config.parallel, config.train
    if parallel.activation_checkpointing in ("none", "every_n"):
        yield {_RECOMPUTE: "selective"}
    if parallel.activation_checkpointing != "full":
        yield {_RECOMPUTE: "full"}
    if train.micro_batch > 1:
        half = max(size for size in range(1, train.micro_batch // 2 + 1) if train.global_batch % size == 0)
        yield {"train.micro_batch": half}
    if found.world > 1 and parallel.strategy != "full_shard":
        yield {"parallel.strategy": "full_shard"}


def shared(subject: Subject, config: FinetuneConfig, found: Prediction) -> Alternative | None:
    """The fewest ranks that have to share each sample for a config to fit whose activations are too much, or else every
    layer; with everything computed again, if that does not do. None: it fits, or no such mesh makes it fit."""
    if found.fits:
        return None
    recomputed = config.parallel.activation_checkpointing == "full"
    for axis, freed in _AXES.items():
        if found.needed - sum(found.memory.peak.get(part, 0) for part in freed) > found.cluster.device.memory:
            continue
        for beside in ({},) if recomputed else ({}, {_RECOMPUTE: "full"}):
            for members in _MEMBERS:
                if members <= getattr(config.parallel.mesh, axis) or found.world % members:
                    continue
                if axis == "sequence" and config.data.seq_len % members:
                    continue
                other = _with(subject, config, found, {**_mesh(config, found.world, axis, members), **beside})
                if other is not None and other.prediction.fits:
                    return other
    return None


def _mesh(config: FinetuneConfig, world: int, axis: str, members: int) -> dict[str, Any]:
    """What a config with so many of them has to say; of ranks with samples of their own there are fewer then."""
    mesh, before = config.parallel.mesh, getattr(config.parallel.mesh, axis)
    changes = {f"parallel.mesh.{axis}": members}
    if mesh.shard is not None:
        changes["parallel.mesh.shard"] = shard = max(1, mesh.shard * before // members)
        if mesh.replicate is not None:
            changes["parallel.mesh.replicate"] = world // (shard * mesh.together // before * members)
    return changes


def moving_less(subject: Subject, config: FinetuneConfig, found: Prediction) -> list[Alternative]:
    """Of what learns the same, what fits and is faster, the fastest first."""
    tried = (_with(subject, config, found, changes) for changes in _less(config, found))
    faster = [
        each
        for each in tried
        if each is not None and each.prediction.fits and each.prediction.seconds.step < _FASTER * found.seconds.step
    ]
    return sorted(faster, key=lambda each: each.prediction.seconds.step)


def _less(config: FinetuneConfig, found: Prediction) -> Iterator[Mapping[str, Any]]:
    parallel, division, per_node = config.parallel, found.plan.division, found.cluster.per_node
    double = 2 * division.micro_batch
    if division.global_batch % double == 0 and division.global_batch // double >= division.data_ranks:
        yield {"train.micro_batch": double}
    if division.full_rounds > 1 and not parallel.defer_gradient_sync:
        yield {"parallel.defer_gradient_sync": True}
    if found.world > per_node > 1 and found.world % per_node == 0 and parallel.strategy == "full_shard":
        yield {"parallel.strategy": "hybrid_shard", "parallel.shard_size": per_node}


def _with(
    subject: Subject, config: FinetuneConfig, found: Prediction, changes: Mapping[str, Any]
) -> Alternative | None:
    """None: what does not go together, or cannot fit."""
    try:
        changed = with_changes(config, changes)
        if certainly_too_much(subject, changed, found.world, found.cluster):
            return None
        return Alternative(changes=changes, prediction=predict(subject, changed, found.world, found.cluster))
    except (ValidationError, RaytuneError):
        return None
