"""What follows from a config: batches, lengths, mesh, paths. Pure, frozen, and without torch.

`resolve(config, world, census)` is called on a laptop by `raytune-fsdp plan` and on every rank by the launcher, and
gives the same answer in both places. What depends on the world size is in `Plan.layout`, the rest does not.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.counts import Census
from raytune_fsdp.errors import ConfigError
from raytune_fsdp.urls import is_url


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one global batch and one model are spread over the ranks of an attempt."""

    world: int
    replicas: int
    """Ranks that hold the same shard (the first axis of the mesh)."""
    shard_size: int
    """Ranks that share one copy of the model (the second axis)."""
    rounds: int
    """Forward and backward passes of every rank in a step, fillers included."""
    fillers: int
    """Passes of a full step, over all ranks, that only keep the collectives aligned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything derived from the config."""

    run_dir: Path
    global_batch: int
    micro_batch: int
    blocks: int
    """Blocks of `micro_batch` packed samples in a step."""
    steps: int
    """Optimizer steps of the whole run."""
    total_samples: int | None
    """Packed samples of the whole run, where it is given in epochs: its last step may be short."""
    samples_per_epoch: int | None
    schedule_steps: int
    warmup_steps: int
    log_every: int
    eval_every: int
    save_every: int
    checkpoints: str
    """Directory or URL of the run's checkpoints."""
    layout: Layout

    def samples_before(self, step: int) -> int:
        """Packed samples that the steps before this one have consumed (steps count from 1)."""
        samples = (step - 1) * self.global_batch
        return samples if self.total_samples is None else min(samples, self.total_samples)

    def samples_of(self, step: int) -> int:
        """Packed samples of a step: a full batch, except perhaps in the run's last."""
        return self.samples_before(step + 1) - self.samples_before(step)

    def due(self, step: int, every: int) -> bool:
        """Whether something with this cadence happens after this step. The last step is always due."""
        return step % every == 0 or step == self.steps

    def to_dict(self) -> dict[str, Any]:
        """All that does not depend on the world size or on where the run lives, as plain data for plan.json."""
        values = asdict(self)
        del values["layout"], values["run_dir"], values["checkpoints"]
        return values


def resolve(
    config: FinetuneConfig, world: int, census: Census | None = None, *, planned_schedule: int | None = None
) -> Plan:
    """The plan of `config` on `world` ranks.

    `census` is needed where the length is given in epochs. `planned_schedule` is the schedule's length that the run's
    checkpoint remembers: a run that is extended keeps it unless `optim.schedule_steps` says otherwise.
    """
    train = config.train
    blocks = train.global_batch // train.micro_batch
    layout = _layout(config, world, blocks)
    steps, total_samples = _length(config, census)
    schedule_steps = config.optim.schedule_steps or planned_schedule or steps
    warmup = config.optim.warmup_steps
    if warmup is None:
        warmup = _part(config.optim.warmup_ratio, schedule_steps)
    if warmup > schedule_steps:
        raise ConfigError(
            f"optim.warmup_steps={warmup} is more than the {schedule_steps} steps of the schedule: "
            "lower it, or train longer (train.max_steps, train.epochs)"
        )
    run_dir = Path(config.run.storage).expanduser().absolute() / config.run.name
    return Plan(
        run_dir=run_dir,
        checkpoints=_checkpoints(config, run_dir),
        global_batch=train.global_batch,
        micro_batch=train.micro_batch,
        blocks=blocks,
        steps=steps,
        total_samples=total_samples,
        samples_per_epoch=census.epochs[0] if census else None,
        schedule_steps=schedule_steps,
        warmup_steps=warmup,
        log_every=train.log_every,
        eval_every=config.eval.every or steps,
        save_every=config.checkpoint.every or steps,
        layout=layout,
    )


def _checkpoints(config: FinetuneConfig, run_dir: Path) -> str:
    place = config.checkpoint.storage
    if place is None:
        return str(run_dir / "checkpoints")
    root = place.rstrip("/") if is_url(place) else str(Path(place).expanduser().absolute())
    return f"{root}/{config.run.name}/checkpoints"


def _layout(config: FinetuneConfig, world: int, blocks: int) -> Layout:
    """Mesh and rounds for this world size, or the reason why it cannot be had."""
    train, parallel = config.train, config.parallel
    if blocks < world:
        raise ConfigError(
            f"train.global_batch={train.global_batch} and train.micro_batch={train.micro_batch} make {blocks} block(s) "
            f"a step for {world} ranks, so some would always idle: use at most {blocks} rank(s), "
            f"a global_batch of at least {world * train.micro_batch}, or a smaller micro_batch"
        )
    if parallel.strategy == "hybrid_shard":
        shard_size = parallel.shard_size or 1
        if world % shard_size:
            valid = [d for d in range(1, world + 1) if world % d == 0]
            raise ConfigError(
                f"parallel.shard_size={shard_size} does not divide the world size {world}; valid: {valid}"
            )
    else:
        shard_size = 1 if parallel.strategy == "replicate" else world
    rounds = math.ceil(blocks / world)
    return Layout(
        world=world,
        replicas=world // shard_size,
        shard_size=shard_size,
        rounds=rounds,
        fillers=rounds * world - blocks,
    )


def _length(config: FinetuneConfig, census: Census | None) -> tuple[int, int | None]:
    """Optimizer steps of the run, and its packed samples where those are counted."""
    train = config.train
    if train.max_steps is not None:
        return train.max_steps, None
    assert train.epochs is not None, "the config has exactly one of max_steps and epochs"
    if census is None:
        raise ConfigError(f"train.epochs={train.epochs} needs a count of the data; train.max_steps does not")
    total = census.samples_in(Fraction(str(train.epochs)))
    return math.ceil(total / train.global_batch), total


def _part(fraction: float, whole: int) -> int:
    """`fraction` of `whole`, rounded up. By the decimals that were written: in floats, 0.07 of 100 is more than 7."""
    return math.ceil(Fraction(str(fraction)) * whole)
