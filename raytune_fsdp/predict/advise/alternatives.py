"""Other ways to train the same thing on the same cluster, or on more or less of it.

How weights are spread, what is computed again and how many samples go at a time change how long a run takes, never what
it learns. Another method changes that, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from raytune_fsdp.base.errors import ConfigError, RaytuneError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.sections.optimizers import state_bytes
from raytune_fsdp.model.network import MASTER_DTYPE
from raytune_fsdp.plan.plan import layout_of
from raytune_fsdp.predict.advise.changes import with_changes
from raytune_fsdp.predict.prediction import Cluster, Prediction, predict
from raytune_fsdp.predict.speed import Seconds
from raytune_fsdp.predict.subject import ModelSpec
from raytune_fsdp.predict.trace.live import Kind

METHODS: Mapping[str, Mapping[str, Any]] = {
    "lora": {"type": "lora", "rank": 16, "alpha": 32},
    "qlora": {"type": "qlora", "rank": 16, "alpha": 32},
}

_HIDDEN = 0.5
"""A share of the computation's time: collectives that take no longer are hidden behind it."""

_MOST_SAMPLES = 1024

_PAYS = 0.95
"""A share of the throughput that ever larger micro-batches come to: from there on a larger one no longer pays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    changes: Mapping[str, Any]
    """Fields of the config and their new values, as they are written; `world` for the number of GPUs."""
    prediction: Prediction

    @property
    def learns_the_same(self) -> bool:
        return not any(name.startswith("method") for name in self.changes)

    @property
    def gpu_seconds(self) -> float:
        """GPU-seconds of a step."""
        return self.prediction.seconds.step * self.prediction.world


def alternatives(subject: ModelSpec, config: FinetuneConfig, world: int, cluster: Cluster) -> list[Alternative]:
    """Return other methods, ways to spread weights, and numbers of GPUs, in order."""
    found: list[Alternative] = []
    moves: dict[Any, bool] = {}
    for how, changes, changed in _candidates(config, world, cluster):
        # Less sharding only saves traffic: it is not looked at where that is hidden behind the computation.
        if changed.parallel.strategy != "full_shard" and not moves.get(how, True):
            continue
        try:
            best = _largest_batch(subject, changed, world, cluster)
        except RaytuneError:  # such as a method whose library is not installed
            continue
        if best is None:
            continue
        micro, prediction = best
        if changed.parallel.strategy == "full_shard":
            moves[how] = prediction.seconds.moving > _HIDDEN * prediction.seconds.compute or not prediction.fits
        if micro != config.train.micro_batch:
            changes = {**changes, "train.micro_batch": micro}
        found.append(Alternative(changes=changes, prediction=prediction))
    found += _sizes(subject, config, world, cluster)
    return in_order(found)


def in_order(found: Iterable[Alternative]) -> list[Alternative]:
    """Sort alternatives: those that fit first, then the cheapest."""
    return sorted(found, key=lambda each: (not each.prediction.fits, each.gpu_seconds))


def _sizes(subject: ModelSpec, config: FinetuneConfig, world: int, cluster: Cluster) -> Iterator[Alternative]:
    """Yield half as many GPUs, and twice as many, until it fits."""
    for size in (world // 2, world * 2, world * 4, world * 8):
        try:
            prediction = predict(subject, config, size, cluster) if size else None
        except ConfigError:  # too many for the batch, or no multiple of shard_size
            continue
        if prediction is not None:
            yield Alternative(changes={"world": size}, prediction=prediction)
            if prediction.fits and size > world:
                return


def cheapest_fit(found: list[Alternative]) -> Alternative | None:
    """Return what makes it fit for the least: what learns the same first, then the fewest changes, then the fastest."""
    fitting = [each for each in found if each.prediction.fits]
    return min(fitting, key=lambda each: (not each.learns_the_same, len(each.changes), each.gpu_seconds), default=None)


def change_in_words(changes: Mapping[str, Any]) -> str:
    """Return changes for a line of a table, with the last names of fields."""
    short = {"activation_checkpointing": "recompute"}
    words = []
    for name, value in changes.items():
        if name == "world":
            words.append(f"{value} GPU{'s' * (value != 1)}")
        else:
            last = name.rpartition(".")[2]
            words.append(f"{short.get(last, last)}={value}")
    return " ".join(words)


def as_flags(changes: Mapping[str, Any]) -> str:
    """Return changes as flags, to be copied behind a command."""
    names = {"world": "world-size"}
    return " ".join(
        f"--{names.get(name, name)} {str(value).lower() if isinstance(value, bool) else value}"
        for name, value in changes.items()
    )


def micro_batches(subject: ModelSpec, config: FinetuneConfig, known: Prediction) -> tuple[int | None, int | None]:
    """Return the largest micro-batch that fits, and the one from which a larger one no longer pays.

    The first is independent of the batch (None: not even one sample fits), the second of what fits (None: not known).
    `known`: the prediction for the config itself.
    """
    world, cluster, division = known.world, known.cluster, known.plan.division

    def at(size: int) -> Prediction:
        if size == division.micro_batch and division.full_rounds == 1:
            return known
        return predict(subject, with_micro_batch(config, world, size), world, cluster)

    one, two, memory = at(1), at(2), cluster.device.memory
    paying = _paying(one.seconds, two.seconds)
    if not one.fits:
        return None, paying
    if not two.fits:
        return 1, paying
    # The peak of a sum of phases is convex: a line through two sizes is at or below it beyond them, and at or above it
    # between them. So two that fit say how many may fit at most, and one that does and one that does not say how many
    # certainly do.
    (left, low), (right, high) = (1, one.needed), (2, two.needed)  # the two largest that were traced, and fit
    fits, most = right, min(_MOST_SAMPLES, right + int((memory - high) / max(1, high - low)))
    tried = most
    while fits < most:
        found = at(tried)
        if found.fits:
            (left, low), (right, high) = (right, high), (tried, found.needed)
            fits, most = right, min(most, right + int((memory - high) * (right - left) / max(1, high - low)))
            tried = most
        else:
            most = tried - 1
            fits = max(fits, right + int((memory - high) * (tried - right) / (found.needed - high)))
            tried = fits if fits > right else fits + 1
    return fits, paying


def _paying(one: Seconds, two: Seconds) -> int | None:
    """Return the size from which a larger micro-batch no longer pays; None: it is further away than anybody goes, as
    where the host decides how long a pass takes."""
    slope = max(1e-9, two.compute - one.compute)
    fixed, update = max(0.0, one.compute - slope), one.update
    for size in range(1, _MOST_SAMPLES):
        step = max(fixed + slope * size, one.moving) + update
        if slope * size >= _PAYS * step:
            return size
    return None


def allowed_micro_batch(config: FinetuneConfig, world: int) -> int:
    """Return the most samples at a time that the batch of a step has for every rank, or for all that share samples."""
    batch, data_ranks = config.train.global_batch, world // config.parallel.mesh.together
    return max((size for size in range(1, batch // data_ranks + 1) if batch % size == 0), default=1)


def with_micro_batch(config: FinetuneConfig, world: int, size: int) -> FinetuneConfig:
    """Return the config with one pass of `size` samples in each step."""
    batch = size * world // config.parallel.mesh.together
    return config.with_sections(train={"micro_batch": size, "global_batch": batch})


def _candidates(
    config: FinetuneConfig, world: int, cluster: Cluster
) -> Iterator[tuple[object, dict[str, Any], FinetuneConfig]]:
    """Yield method and recomputation, what that changes, and the config that results."""
    methods: list[Mapping[str, Any] | None] = [None]
    if config.method.type == "full":
        methods += [METHODS["lora"], METHODS["qlora"]]
    elif config.method.type == "lora":
        methods.append({**config.method.model_dump(exclude_unset=True), "type": "qlora"})
    spread, here = ("full_shard", "shard_grad_op", "replicate") if world > 1 else ("full_shard",), cluster.per_node
    strategies: list[dict[str, Any]] = [{"strategy": name} for name in spread]
    if world > here and world % here == 0 and here % config.parallel.mesh.together == 0:
        strategies.append({"strategy": "hybrid_shard", "shard_size": here})
    for method in methods:
        for recompute in ("none", "selective", "full"):
            for strategy in strategies:
                asked = {**strategy, "activation_checkpointing": recompute}
                written = {
                    f"parallel.{name}": value
                    for name, value in asked.items()
                    if getattr(config.parallel, name) != value
                }
                changes = written if method is None else {"method.type": method["type"], **written}
                with suppress(ValidationError):  # they do not go together with the rest of the config
                    changed = with_changes(config, written if method is None else {**written, "method": method})
                    yield (str(method), recompute), changes, changed


def _largest_batch(
    subject: ModelSpec, config: FinetuneConfig, world: int, cluster: Cluster
) -> tuple[int, Prediction] | None:
    """Return the fastest micro-batch that fits and leaves every rank one, with its prediction. Two sizes are traced."""
    if certainly_too_much(subject, config, world, cluster):
        return None
    batch, data_ranks = config.train.global_batch, world // config.parallel.mesh.together
    sizes = [size for size in (2**power for power in range(12)) if batch % size == 0 and batch // size >= data_ranks]

    def of(size: int) -> tuple[int, Prediction]:
        return size, predict(subject, config.with_sections(train={"micro_batch": size}), world, cluster)

    one = of(1)
    if not one[1].fits or len(sizes) < 2:
        return one
    # What a sample more takes is about what the first one takes besides weights, gradients and the optimizer's state.
    changing = one[1].memory.peak.get("activations", 0)
    room = cluster.device.memory - one[1].needed
    more = max((size for size in sizes if (size - 1) * changing <= room), default=1)
    if more == 1 or one[1].seconds.moving < _HIDDEN * one[1].seconds.compute:
        return one  # nothing to hide
    larger = of(more)
    return larger if larger[1].fits and larger[1].seconds.step < one[1].seconds.step else one


def certainly_too_much(subject: ModelSpec, config: FinetuneConfig, world: int, cluster: Cluster) -> bool:
    """Return whether weights and optimizer state are more than the device has, by their number alone."""
    if config.method.type != "full" or config.parallel.cpu_offload:
        return False
    width = MASTER_DTYPE[config.parallel.precision].itemsize
    each = width + state_bytes(config.optim.optimizer, width)
    layout = layout_of(config, world)
    stays = 2 / layout.tensor if config.parallel.strategy == "shard_grad_op" else 0
    return subject.numbers * (each / (layout.shard_size * layout.tensor) + stays) > cluster.device.memory


# What one small change of a config would do: free memory, make it fit, or have a step wait less for its links.

_FASTER = 0.97
"""A share of a step's time: what saves less is not worth a word."""

_RECOMPUTE = "parallel.activation_checkpointing"

_AXES: Mapping[str, tuple[Kind, ...]] = {"sequence": ("activations",), "tensor": ("activations", "gathered")}
"""Axes of a mesh, in the order in which they are tried, and the parts of the peak that they divide."""

_MEMBERS = (2, 4, 8)
"""Numbers of ranks that compute together: more than a machine has would exchange over its links to others."""


def step_down(subject: ModelSpec, config: FinetuneConfig, found: Prediction) -> Alternative | None:
    """Return the first change that learns the same and would free memory of the device.

    Other methods are among the alternatives: to trace one takes three seconds for the first page of a 70B.
    """
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


def shared(subject: ModelSpec, config: FinetuneConfig, found: Prediction) -> Alternative | None:
    """Return the change with the fewest ranks that share each sample, or else every layer, so that a config fits whose
    activations are too much. If that does not do, everything is computed again, too. None: it fits, or no such mesh
    makes it fit."""
    if found.fits:
        return None
    recomputed = config.parallel.activation_checkpointing == "full"
    for axis, freed in _AXES.items():
        if found.needed - sum(found.memory.peak.get(part, 0) for part in freed) > found.cluster.device.memory:
            continue
        for more in ({},) if recomputed else ({}, {_RECOMPUTE: "full"}):
            for members in _MEMBERS:
                if members <= getattr(config.parallel.mesh, axis) or found.world % members:
                    continue
                if axis == "sequence" and config.data.seq_len % members:
                    continue
                other = _with(subject, config, found, {**_mesh(config, found.world, axis, members), **more})
                if other is not None and other.prediction.fits:
                    return other
    return None


def _mesh(config: FinetuneConfig, world: int, axis: str, members: int) -> dict[str, Any]:
    """Return what a config with `members` ranks on an axis has to say: then fewer ranks have samples of their own."""
    mesh, before = config.parallel.mesh, getattr(config.parallel.mesh, axis)
    changes = {f"parallel.mesh.{axis}": members}
    if mesh.shard is not None:
        changes["parallel.mesh.shard"] = shard = max(1, mesh.shard * before // members)
        if mesh.replicate is not None:
            changes["parallel.mesh.replicate"] = world // (shard * mesh.together // before * members)
    return changes


def moving_less(subject: ModelSpec, config: FinetuneConfig, found: Prediction) -> list[Alternative]:
    """Return the changes that learn the same, fit and are faster, the fastest first."""
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
    # Other micro-batches have other bits.
    if (
        not config.run.exact
        and division.global_batch % double == 0
        and division.global_batch // double >= division.data_ranks
    ):
        yield {"train.micro_batch": double}
    if division.full_rounds > 1 and not parallel.defer_gradient_sync:
        yield {"parallel.defer_gradient_sync": True}
    if found.world > per_node > 1 and found.world % per_node == 0 and parallel.strategy == "full_shard":
        yield {"parallel.strategy": "hybrid_shard", "parallel.shard_size": per_node}
        if parallel.reduce == "flat" and config.run.exact:
            yield {"parallel.reduce": "hierarchical"}


def _with(
    subject: ModelSpec, config: FinetuneConfig, found: Prediction, changes: Mapping[str, Any]
) -> Alternative | None:
    """Return the alternative with these changes; None if they do not go together, or cannot fit."""
    try:
        changed = with_changes(config, changes)
        if certainly_too_much(subject, changed, found.world, found.cluster):
            return None
        return Alternative(changes=changes, prediction=predict(subject, changed, found.world, found.cluster))
    except (ValidationError, RaytuneError):
        return None
