"""What a rank's collectives move in an optimizer step.

In numbers of weights and gradients, each times (N-1)/N where N ranks gather or reduce it: what a rank has already does
not travel. With Psi for all weights and one micro-batch a step, `full_shard` moves 3 Psi (gathered for forward,
gathered for backward, gradients reduced), `shard_grad_op` 2 Psi, `replicate` 2 Psi (an all-reduce sends everything
twice). With M micro-batches these are 3 M Psi, (1 + M) Psi and 2 Psi: what stays gathered is gathered once a step, and
replicas reduce after the last micro-batch. Ranks that share samples exchange tokens for heads beside that
(`exchanged_by_attention`).

In bytes, a weight has 2 in 16 bits. Under `fp8` those that blocks multiply with in 8 bits, Psi8 of them, have 1:
gathered once, (2 Psi - Psi8) (N-1)/N. Of blocks that is 0.50 of bf16's bytes, of a whole 8B 0.57 and of a 70B 0.52.
Gradients that are summed in two levels on G nodes: of the (N-1)/N, (G-1)/N come from other nodes.

`tests/distributed/test_traffic.py` compares this with the collectives of real steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSize:
    """The numbers of weights that are gathered together, with those that fill up the last rank's shards."""

    weights: float
    narrow: float = 0.0
    """Those of them that travel in 8 bits."""
    trained: float
    """Those of them whose gradients are reduced."""
    stays: bool = False
    """Whether they stay gathered from forward to backward whatever the strategy is."""
    reached: bool = True
    """Whether a gradient comes to what it returns: it, or something before it, is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """How a run spreads its weights, as far as it decides what moves."""

    shard_size: int
    replicas: int
    micro_batches: int
    """Forward and backward passes of a rank in a step."""
    stay: bool = False
    """Whether all weights stay gathered until the step ends (`shard_grad_op`, `replicate`)."""
    deferred: bool = False
    """`parallel.defer_gradient_sync`."""
    bytes_gathered: int
    """Of a weight in an all-gather."""
    bytes_reduced: int
    """Of a gradient in a reduction."""
    nodes: int = 1
    """Those that ranks with one copy of the model are on, if gradients are summed inside of each first
    (`parallel.reduce: hierarchical`); else 1."""
    bytes_crossing: int = 4
    """Of a gradient from one of those nodes to another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a rank receives in a step, which is also what it sends; in numbers, (N-1)/N of them counted."""

    gathered: float
    """Weights."""
    narrow: float = 0.0
    """Those of them that come in 8 bits."""
    scattered: float
    """Gradients, summed over the ranks that share a copy of the model."""
    crossing: float = 0.0
    """Those of them that are sums of a node, and come from another one."""
    all_reduced: float
    """Gradients of its shard, summed over the replicas, and sent back: both ways are in it."""
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
    """What a rank moves in one step. The few numbers that ranks tell each other beside it are not in it."""
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
    return Traffic(
        gathered=gathers * across,
        narrow=narrow * across,
        scattered=reductions * across,
        # A rank has the sums of its node for as many parts as there are nodes, and gets its own from all others.
        crossing=reductions * (how.nodes - 1) / shards,
        all_reduced=trained / shards * between,
        bytes_gathered=how.bytes_gathered,
        bytes_reduced=how.bytes_reduced,
        bytes_crossing=how.bytes_crossing,
    )


def summed_by_layers(*, tokens: int, width: int, layers: int, members: int, recomputed: int = 0) -> float:
    """The numbers that a rank receives for layers that are cut, of a block of so many tokens.

    The results of attention and of the MLP are added up in forward, the gradients of what comes into them in backward;
    and so many results again of a block that is computed again. What is added up is sent there and back."""
    return layers * (4 + recomputed) * tokens * width * 2 * (members - 1) / members


def exchanged_by_attention(*, tokens: int, heads: int, key_heads: int, width: int, members: int) -> float:
    """The numbers that a rank receives for the attention of one layer over a block of so many tokens, in forward.

    Queries, keys and values come, and results go back; backward moves as much, and what is computed again does, too.
    Keys and values of fewer heads than there are members travel more than once."""
    moved = 2 * heads + 2 * math.lcm(key_heads, members)
    return tokens / members * moved * width * (members - 1) / members
