"""Compute what a rank's collectives move in an optimizer step.

It is counted in numbers of weights and gradients, times (N-1)/N if N ranks gather or reduce them: what a rank already
has is not sent. With Psi for all weights and one micro-batch a step, `full_shard` moves 3 Psi (gathered for forward,
gathered for backward, gradients reduced), `shard_grad_op` 2 Psi, `replicate` 2 Psi (an all-reduce sends everything
twice). With M micro-batches these are 3 M Psi, (1 + M) Psi and 2 Psi: what stays gathered is gathered once a step, and
replicas reduce after the last micro-batch. Ranks that share samples also exchange tokens for heads
(`exchanged_by_attention`).

In bytes, a weight has 2 in 16 bits. Under `fp8` the Psi8 weights that layers multiply with in 8 bits have 1: gathered
once, (2 Psi - Psi8) (N-1)/N. For layers alone that is 0.50 of bf16's bytes, for a whole 8B 0.57 and for a 70B 0.52.
If gradients are summed in two levels on G nodes of L ranks, (G-1)/N of the (N-1)/N come from other nodes. If they are
added in order (`run.exact`), a rank gets (L-1)/L of them inside of its node. Of sums it gets 1/N each time that they
are passed from one node to the next, (G-1)/G of 1/N when the owners get theirs, and as much again where a round goes on
with a sum.

`tests/distributed/test_traffic.py` compares this with the collectives of real steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSize:
    """How many numbers the weights of a unit have, with the padding of the last rank's shards."""

    weights: float
    narrow: float = 0.0
    """How many of these are sent in 8 bits."""
    trained: float
    """How many of these have gradients that are reduced."""
    stays: bool = False
    """Whether they stay gathered from forward to backward, whatever the strategy is."""
    reached: bool = True
    """Whether the unit's results get a gradient: it, or something before it, is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """How a run spreads its weights, as far as it decides what is moved."""

    shard_size: int
    replicas: int
    micro_batches: int
    """Forward and backward passes of a rank in a step."""
    stay: bool = False
    """Whether all weights stay gathered until the step ends (`shard_grad_op`, `replicate`)."""
    deferred: bool = False
    """`parallel.defer_gradient_sync`."""
    bytes_gathered: int
    """Bytes of a weight in an all-gather."""
    bytes_reduced: int
    """Bytes of a gradient in a reduction."""
    nodes: int = 1
    """The number of nodes with one copy of the model, if gradients are summed inside of each node first
    (`parallel.reduce: hierarchical`); else 1."""
    bytes_crossing: int = 4
    """Bytes of a gradient that is sent from one of these nodes to another."""
    exact: bool = False
    """`run.exact`."""
    hops: float | None = None
    """How often such a sum is passed from node to node in a step. None: G-1 times a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a rank receives in a step, in numbers; it sends as many. Only the (N-1)/N from other ranks are counted."""

    gathered: float
    """Weights that are gathered."""
    narrow: float = 0.0
    """How many of these come in 8 bits."""
    scattered: float
    """Gradients, summed over the ranks that share a copy of the model."""
    crossing: float = 0.0
    """How many of these are sums of a node, and come from another node."""
    direct: bool = False
    """Whether each rank sends its gradients straight to the ranks that keep the rows, on whichever node."""
    all_reduced: float
    """Gradients of its shard, summed over the replicas and sent back: both ways are counted."""
    bytes_gathered: int
    bytes_reduced: int
    bytes_crossing: int = 4

    @property
    def numbers(self) -> float:
        return self.gathered + self.scattered + self.all_reduced

    @property
    def bytes_of_weights(self) -> float:
        return (self.gathered - self.narrow) * self.bytes_gathered + self.narrow

    @property
    def bytes_scattered(self) -> float:
        return (self.scattered - self.crossing) * self.bytes_reduced + self.crossing * self.bytes_crossing

    @property
    def bytes_of_gradients(self) -> float:
        return self.bytes_scattered + self.all_reduced * self.bytes_reduced

    @property
    def bytes(self) -> float:
        return self.bytes_of_weights + self.bytes_of_gradients


def step_traffic(units: Sequence[UnitSize], how: Collectives) -> Traffic:
    """Compute what a rank moves in one step, without the few other numbers that ranks exchange."""
    shards, replicas, passes = how.shard_size, how.replicas, how.micro_batches
    across, between = (shards - 1) / shards, 2 * (replicas - 1) / replicas
    trained = sum(unit.trained for unit in units)
    gathers = narrow = 0.0
    for unit in units:
        again = unit.reached and not unit.stays
        times = 1 if how.stay else passes * (2 if again else 1)
        gathers += unit.weights * times
        narrow += unit.narrow * times
    reductions = trained * (1 if how.deferred else passes)
    # A rank has its node's sums for as many parts as there are nodes, and gets its own part from all other nodes.
    scattered, crossing = reductions * across, reductions * (how.nodes - 1) / shards
    if how.exact and how.nodes > 1:
        ends = (how.nodes - 1) / how.nodes * (2 * reductions - trained)
        hops = passes * (how.nodes - 1) if how.hops is None else how.hops
        crossing = (trained * hops + ends) / shards
        scattered = reductions * (1 - how.nodes / shards) + crossing
    return Traffic(
        gathered=gathers * across,
        narrow=narrow * across,
        scattered=scattered,
        crossing=crossing,
        direct=how.exact and how.nodes == 1,
        all_reduced=trained / shards * between,
        bytes_gathered=how.bytes_gathered,
        bytes_reduced=how.bytes_reduced,
        bytes_crossing=how.bytes_crossing,
    )


def exchanged_by_attention(*, tokens: int, heads: int, key_heads: int, width: int, members: int) -> float:
    """Return how many numbers a rank receives in forward for a layer's attention over a micro-batch of `tokens` tokens.

    Queries, keys and values come, and results go back; backward moves as much, and so does what is computed again. Keys
    and values with fewer heads than there are members are sent more than once.
    """
    moved = 2 * heads + 2 * math.lcm(key_heads, members)
    return tokens / members * moved * width * (members - 1) / members
