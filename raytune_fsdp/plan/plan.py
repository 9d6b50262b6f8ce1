"""What follows from a config: batches, lengths, mesh. Pure, frozen, without torch; reads no path and no environment.

`raytune-fsdp plan` calls `resolve(config, world, census)` on a laptop, and the launcher calls it on every rank: both
get the same answer. Only `Plan.layout`, and with it `Plan.division.data_ranks`, depends on the world size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.every import PerEpoch, SaveEvery
from raytune_fsdp.config.sections.cluster import Between
from raytune_fsdp.plan.cadence import Every, PartsOfEpochs, due, times_due, to_json
from raytune_fsdp.plan.counts import Census
from raytune_fsdp.plan.division import Division

_MAX_SAMPLES = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the model is spread over the ranks of an attempt."""

    world: int
    data_ranks: int
    """Groups of ranks that get micro-batches of their own."""
    replicas: int
    """Ranks that hold the same shard."""
    shard_size: int
    """Ranks over which one copy of the model is sharded; if `tensor` divides the model, each of its parts."""
    sequence: int = 1
    """Ranks that each have a part of a micro-batch's tokens. Their numbers follow one another, so that they are mostly
    on one node."""
    tensor: int = 1
    """Ranks that each have a part of every layer and compute a micro-batch together. They have neighbouring numbers."""

    @property
    def together(self) -> int:
        """The number of ranks that compute the same micro-batches."""
        return self.sequence * self.tensor

    def data_rank(self, rank: int) -> int:
        """Return the data rank whose micro-batches a rank computes."""
        return rank // self.together

    def member(self, rank: int) -> int:
        """Return which part of its micro-batches' tokens a rank has."""
        return rank // self.tensor % self.sequence

    def counts(self, rank: int) -> bool:
        """Return whether this rank's results count: it is the first of those that compute the same tokens."""
        return rank % self.tensor == 0


ALONE = Layout(world=1, data_ranks=1, replicas=1, shard_size=1)
"""The layout of a single rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything derived from the config."""

    division: Division
    """How the samples are divided into steps, micro-batches and ranks."""
    steps: int
    """Optimizer steps of the whole run."""
    samples_per_epoch: int | None
    schedule_steps: int
    warmup_steps: int
    log_every: int
    eval_every: Every
    save_every: Every
    """When a checkpoint is due, whatever the clock says. Checkpoints by the clock are not part of the plan."""
    layout: Layout
    datasets: int
    """How many datasets are trained on."""
    export_every: Every | None = None
    """When the model is exported during training; None: only at the end."""

    def due(self, step: int, every: Every) -> bool:
        """Return whether something with this cadence is due after this step. After the last step everything is."""
        return due(step, every) or step == self.steps

    @property
    def saves(self) -> int:
        """How many checkpoints are due, including that of the last step."""
        return times_due(self.steps - 1, self.save_every) + 1

    def to_dict(self) -> dict[str, Any]:
        """Return everything that does not depend on the world size, as plain data for plan.json."""
        return {
            "global_batch": self.division.global_batch,
            "micro_batch": self.division.micro_batch,
            "blocks": self.division.micro_batches,
            "steps": self.steps,
            "total_samples": self.division.total_samples,
            "samples_per_epoch": self.samples_per_epoch,
            "schedule_steps": self.schedule_steps,
            "warmup_steps": self.warmup_steps,
            "log_every": self.log_every,
            "eval_every": to_json(self.eval_every),
            "save_every": to_json(self.save_every),
        }

    def spread(self) -> dict[str, int]:
        """Return everything that depends on the world size, as plain data for events and `raytune-fsdp plan`."""
        return {
            "world": self.layout.world,
            "replicas": self.layout.replicas,
            "shard_size": self.layout.shard_size,
            **({"sequence": self.layout.sequence} if self.layout.sequence > 1 else {}),
            **({"tensor": self.layout.tensor} if self.layout.tensor > 1 else {}),
            "rounds": self.division.full_rounds,
            "fillers": self.division.fillers,
        }


def resolve(
    config: FinetuneConfig, world: int, census: Census | None = None, *, planned_schedule: int | None = None
) -> Plan:
    """Return the plan of `config` on `world` ranks.

    `census` is needed if the length is given in epochs. `planned_schedule` is the schedule's length in the run's
    checkpoint: a run that is extended keeps it unless `optim.schedule_steps` sets another.
    """
    train = config.train
    layout = layout_of(config, world)
    if train.max_steps is not None:
        steps, total_samples = train.max_steps, None
    else:
        assert train.epochs is not None, "a config has exactly one of max_steps and epochs"
        if census is None:
            raise ConfigError(f"train.epochs={train.epochs} needs a count of the data; train.max_steps does not")
        total_samples = census.samples_in(Fraction(str(train.epochs)))
        steps = math.ceil(total_samples / train.global_batch)
    if steps * train.global_batch > _MAX_SAMPLES:
        length = f"train.max_steps={steps:,}" if train.epochs is None else f"train.epochs={train.epochs:g}"
        raise ConfigError(f"{length}: a run has at most 2**62 packed samples, which have numbers of 64 bits; lower it")
    schedule_steps = config.optim.schedule_steps or planned_schedule or steps
    warmup = 0 if config.optim.schedule.type == "one_cycle" else config.optim.warmup_steps
    if warmup is None:
        # Exact decimals, rounded up: in floats 0.07 * 100 is 7.000000000000001, which would round up to 8.
        warmup = math.ceil(Fraction(str(config.optim.warmup_ratio)) * schedule_steps)
    if warmup > schedule_steps:
        raise ConfigError(
            f"optim.warmup_steps={warmup} is more than the {schedule_steps} steps of the schedule: "
            "lower it, or train longer (train.max_steps, train.epochs)"
        )
    return Plan(
        division=Division(
            global_batch=train.global_batch,
            micro_batch=train.micro_batch,
            total_samples=total_samples,
            data_ranks=layout.data_ranks,
        ),
        steps=steps,
        samples_per_epoch=census.epochs[0] if census else None,
        schedule_steps=schedule_steps,
        warmup_steps=warmup,
        log_every=train.log_every,
        **_cadences(config, steps, census),
        layout=layout,
        datasets=len(config.data.train),
    )


def _cadences(config: FinetuneConfig, steps: int, census: Census | None) -> dict[str, Every]:
    """Return when a run of `steps` steps is measured, saved and exported."""

    def every(field: str, chosen: int | PerEpoch | SaveEvery) -> Every:
        if isinstance(chosen, int):
            return chosen
        assert chosen.per_epoch is not None
        if config.train.epochs is None or census is None:
            raise ConfigError(
                f"{field}={chosen}: with train.max_steps={config.train.max_steps} the data is "
                f"not counted, so nobody knows how long an epoch is: set {field} to a number of steps, or train.epochs "
                "instead of train.max_steps"
            )
        return PartsOfEpochs.of(chosen.per_epoch, census.epochs, config.train.global_batch)

    found = {"eval_every": steps if config.eval.every is None else every("eval.every", config.eval.every)}
    saves = config.checkpoint.every
    if saves is None or saves == "auto" or config.checkpoint.by_clock:
        of_each = saves is not None and (config.checkpoint.keep_best > 0 or config.eval.where == "task")
        found["save_every"] = found["eval_every"] if of_each else steps
    else:
        found["save_every"] = every("checkpoint.every", saves)
    if config.export.every is not None:
        found["export_every"] = every("export.every", config.export.every)
    return found


def sizes_of(config: FinetuneConfig, hardware: int | None = None) -> list[int]:
    """Return the numbers of ranks that the run may have, ascending; ConfigError if there is none.

    `hardware`: what `cluster.workers: auto` stands for. None: not known yet, and the least number is taken.
    """
    workers = config.cluster.workers
    if not isinstance(workers, Between):
        least = least_ranks(config) if hardware is None else hardware
        return [layout_of(config, least if workers == "auto" else workers).world]
    _check_micro_batches(config, workers.max)
    step = least_ranks(config)
    sizes = [world for world in range(workers.min, workers.max + 1) if world % step == 0]
    if not sizes:
        below, above = workers.min // step * step, -(-workers.max // step) * step
        nearest = {"min": below, "max": above}
        ways = [f"{name}={world}" for name, world in nearest.items() if world and _possible(config, [world])]
        # The next larger one, as the model may not fit with a smaller one; `max` itself is always one.
        larger = (size for size in range(step + 1, workers.max) if workers.max // size * size >= workers.min)
        mesh = config.parallel.mesh
        if config.parallel.shard_size is not None and mesh.together == 1 and not (mesh.shard or mesh.replicate):
            ways.append(f"parallel.shard_size={next(larger, workers.max)}")
        other = f"cluster.workers={step}" if _possible(config, [step]) else "a larger train.global_batch"
        raise ConfigError(
            f"cluster.workers={{min: {workers.min}, max: {workers.max}}}: no number in between is a multiple of "
            f"{step}, as {_why_step(config)}; set {' or '.join(ways or [other])}"
        )
    if not (found := _possible(config, sizes)):
        layout_of(config, sizes[-1])  # says why
    return found


def _possible(config: FinetuneConfig, sizes: Sequence[int]) -> list[int]:
    """Return those of these numbers of ranks that the config's mesh allows."""
    found = []
    for world in sizes:
        with suppress(ConfigError):
            found.append(layout_of(config, world).world)
    return found


def least_ranks(config: FinetuneConfig) -> int:
    """Return the least number of ranks; every other is a multiple of it."""
    parallel, mesh = config.parallel, config.parallel.mesh
    shard = parallel.shard_size if parallel.strategy == "hybrid_shard" else None
    return (shard or (mesh.shard or 1) * mesh.together) * (mesh.replicate or 1)


def _why_step(config: FinetuneConfig) -> str:
    parallel, mesh = config.parallel, config.parallel.mesh
    if parallel.shard_size is not None:
        copies = f" and parallel.mesh.replicate={mesh.replicate} need" if mesh.replicate else " needs"
        return f"parallel.shard_size={parallel.shard_size}{copies} it"
    axes = {"replicate": mesh.replicate, "shard": mesh.shard}
    axes |= {axis: size for axis, size in (("sequence", mesh.sequence), ("tensor", mesh.tensor)) if size > 1}
    return f"parallel.mesh={{{', '.join(f'{axis}: {size}' for axis, size in axes.items() if size)}}} needs it"


def layout_of(config: FinetuneConfig, world: int) -> Layout:
    """Return the layout for this world size; ConfigError if there is none. Needs no census."""
    parallel, mesh = config.parallel, config.parallel.mesh
    if world % mesh.together:  # groups of ranks that compute the same samples do not fill the world
        axis = "sequence" if mesh.sequence > 1 else "tensor"
        valid = [d for d in range(1, world + 1) if world % d == 0]
        what = f"parallel.mesh.{axis}={mesh.together}"
        if mesh.together != getattr(mesh, axis):
            what = f"parallel.mesh.sequence={mesh.sequence} times parallel.mesh.tensor={mesh.tensor}"
        ways = [f"cluster.workers={below}"] if (below := world // mesh.together * mesh.together) else []
        ways.append(f"cluster.workers={below + mesh.together}")
        raise ConfigError(
            f"{what} does not divide the world size {world}; valid: {valid}; or set {' or '.join(ways)}, if there are "
            "as many GPUs"
        )
    _check_micro_batches(config, world)
    slices = world // mesh.tensor  # ranks that have the same part of every layer
    if parallel.strategy == "replicate":
        shard_size = 1
    elif parallel.strategy == "hybrid_shard":
        shard_size = _shard_size(config, world) // mesh.tensor
    else:
        shard_size = slices
    layout = Layout(
        world=world,
        data_ranks=world // mesh.together,
        replicas=slices // shard_size,
        shard_size=shard_size,
        sequence=mesh.sequence,
        tensor=mesh.tensor,
    )
    # Ranks with parts of a micro-batch hold shards like any other ranks, or a whole copy each.
    shard = max(1, shard_size // mesh.sequence)
    for axis, asked, found in (
        ("shard", mesh.shard, shard),
        ("replicate", mesh.replicate, layout.data_ranks // shard),
    ):
        if asked is not None and asked != found:
            raise ConfigError(
                f"parallel.mesh.{axis}={asked}: {parallel.strategy} on {world} ranks makes it {found}; leave it out, "
                "or use another number of ranks or another parallel.strategy"
            )
    return layout


def _shard_size(config: FinetuneConfig, world: int) -> int:
    """Return how many ranks share one copy of the model with hybrid_shard."""
    parallel, mesh = config.parallel, config.parallel.mesh
    if parallel.shard_size is not None:
        field, size = "parallel.shard_size", parallel.shard_size
        if world % size:
            valid = [d for d in range(1, world + 1) if world % d == 0]
            raise ConfigError(f"{field}={size} does not divide the world size {world}; valid: {valid}")
        return size
    if world % least_ranks(config):
        raise ConfigError(
            f"{_why_step(config)}, and {world} ranks are no multiple of {least_ranks(config)}; change one"
        )
    return mesh.shard * mesh.together if mesh.shard is not None else world // (mesh.replicate or 1)


def _check_micro_batches(config: FinetuneConfig, world: int) -> None:
    train, together = config.train, config.parallel.mesh.together
    micro_batches, data_ranks = train.global_batch // train.micro_batch, world // together
    if micro_batches < data_ranks:
        shared = f" in groups of {together}" if together > 1 else ""
        raise ConfigError(
            f"train.global_batch={train.global_batch} and train.micro_batch={train.micro_batch} make {micro_batches} "
            f"micro-batch(es) per step for {world} ranks{shared}, so some would always idle: use at most "
            f"{micro_batches * together} rank(s), a global_batch of at least {data_ranks * train.micro_batch}, or a "
            "smaller micro_batch"
        )
