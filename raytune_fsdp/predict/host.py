"""What a run needs besides its GPUs: memory of the machines, and storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raytune_fsdp.config import CheckpointConfig, FinetuneConfig
from raytune_fsdp.plan.plan import Plan
from raytune_fsdp.predict.prediction import PROCESS, Prediction

_FILES = 2
"""The most memory, in sizes of the largest tensor, while weights are read, exported or merged: the project's own bound
(docs/architecture.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerNeeds:
    """What peer copies need of a machine, in bytes."""

    others: int
    """How many other machines have a copy of what this one's ranks have."""
    memory: int
    """What it keeps from the first copy on: the newest whole one and the next, of its ranks and of as many others."""
    sent: int
    """What it sends to other machines with each copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNeeds:
    """What a run needs besides its GPUs, in bytes."""

    loading: int
    """Memory of a machine while weights are read."""
    training: int
    saving: int
    """Memory of a machine while a checkpoint is copied and written. Peer copies take more: `peers`."""
    exporting: int
    """Memory of the one machine that exports."""
    naive: int
    """Memory of a machine if every rank read the whole model, in 32 bits, as it is stored by default."""
    checkpoint: int
    kept: Mapping[str, int]
    """The number of checkpoints at a time: those that stay, and the one that is being written."""
    by_clock: int
    """How many more there may be at a time because of the clock, which only asks for them where there is room."""
    peers: PeerNeeds

    @property
    def storage(self) -> int:
        return self.checkpoint * sum(self.kept.values())


def host_needs(config: FinetuneConfig, found: Prediction) -> HostNeeds:
    """Return what a run needs besides its GPUs, on machines with as many ranks as the cluster says."""
    ranks = min(found.cluster.per_node, found.world)
    on_host = ranks * PROCESS
    if config.parallel.cpu_offload:  # weights and what the optimizer keeps; gradients, as large as trained weights
        at_rest, state = sum(found.memory.start.values()), found.memory.start.get("optimizer", 0)
        layout = found.plan.layout
        own = found.checkpoint // (layout.shard_size * layout.tensor)
        on_host += ranks * (at_rest + max(0, own - state))
    on_host += ranks * found.memory.sent
    staged = found.checkpoint * ranks // found.world if config.checkpoint.asynchronous else 0
    return HostNeeds(
        loading=on_host + ranks * _FILES * found.largest,
        training=on_host,
        saving=on_host + staged,
        exporting=PROCESS + _FILES * found.largest,
        naive=ranks * (PROCESS + 4 * found.parameters.total),
        checkpoint=found.checkpoint,
        kept=kept_at_once(config.checkpoint, found.plan),
        by_clock=more_by_clock(config.checkpoint, found.plan),
        peers=_of_peers(config.checkpoint, found, ranks),
    )


def _of_peers(chosen: CheckpointConfig, found: Prediction, ranks: int) -> PeerNeeds:
    machines, own = -(-found.world // ranks), found.checkpoint * ranks // found.world
    others = min(chosen.peer_copies, machines - 1)
    return PeerNeeds(others=others, memory=2 * (1 + others) * own if chosen.peer_copies else 0, sent=others * own)


def kept_at_once(chosen: CheckpointConfig, plan: Plan) -> dict[str, int]:
    """Return how many checkpoints a run needs room for: the most it has at a time, by what they are kept for."""
    saves = plan.saves  # others, by the clock: see more_by_clock
    kept = {"newest": min(saves, chosen.keep_last or saves), "best": chosen.keep_best}
    if chosen.keep_every and chosen.keep_last:
        kept["every"] = plan.steps // chosen.keep_every
    left = saves
    for name, count in kept.items():
        kept[name] = min(count, left)
        left -= kept[name]
    # An older one is only removed once a newer one is complete.
    return {**{name: count for name, count in kept.items() if count}, **({"being written": 1} if left else {})}


def more_by_clock(chosen: CheckpointConfig, plan: Plan) -> int:
    """Return how many more checkpoints a run has at a time at most, where there is room: recovery points."""
    if not chosen.by_clock:
        return 0
    # Two until there is a planned one, and the next is written. Of the others one stays until the next is complete.
    return 2 if plan.saves == 1 else 1
