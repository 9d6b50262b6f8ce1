"""Divide the samples of a run into steps, steps into micro-batches, and these among the data ranks. Pure arithmetic.

Steps count from 1. Micro-batch i of step s, with n micro-batches in a full step, belongs to data rank
((s-1)*n + i) mod data_ranks: ranks take turns through the whole run, so that fillers fall on all of them in turn where
data_ranks does not divide n.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import gcd

_STEPS = 64
"""Steps over which a mean is taken: with other numbers of ranks and micro-batches a pattern is repeated earlier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How samples are divided; the only owner of this arithmetic. `Plan.division` is the run's."""

    global_batch: int
    """Packed samples of a step."""
    micro_batch: int
    """Packed samples of a micro-batch."""
    total_samples: int | None
    """Packed samples of the whole run if its length is given in epochs; its last step may be short. None: every step
    is full."""
    data_ranks: int
    """Ranks that get micro-batches of their own."""

    def __post_init__(self) -> None:
        assert self.global_batch % self.micro_batch == 0, (self.global_batch, self.micro_batch)

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches in a full step."""
        return self.global_batch // self.micro_batch

    @property
    def full_rounds(self) -> int:
        """The number of forward and backward passes of every rank in a full step, fillers included."""
        return -(-self.micro_batches // self.data_ranks)

    @property
    def fillers(self) -> int:
        """The number of passes in a full step, over all ranks, that only keep the collectives aligned."""
        return self.full_rounds * self.data_ranks - self.micro_batches

    def samples_before(self, step: int) -> int:
        """Return how many packed samples the steps before this one have consumed."""
        samples = (step - 1) * self.global_batch
        return samples if self.total_samples is None else min(samples, self.total_samples)

    def samples_of(self, step: int) -> int:
        """Return the packed samples of a step: a full global batch, except perhaps in the run's last step."""
        return self.samples_before(step + 1) - self.samples_before(step)

    def samples_of_steps(self, first: int, last: int) -> int:
        """Return the packed samples of steps `first` to `last`, both included."""
        return self.samples_before(last + 1) - self.samples_before(first)

    def micro_batch_sizes(self, step: int) -> list[int]:
        """Return the number of samples in each micro-batch of a step."""
        samples = self.samples_of(step)
        assert samples > 0, f"step {step} starts after the last of {self.total_samples} samples"
        whole, rest = divmod(samples, self.micro_batch)
        return [self.micro_batch] * whole + [rest] * (rest > 0)

    def first_micro_batch(self, step: int) -> int:
        """Return the number of the step's first micro-batch, counted from the start of the run."""
        return (step - 1) * self.micro_batches

    def owner(self, step: int, index: int) -> int:
        """Return the data rank that computes a micro-batch of a step."""
        return (self.first_micro_batch(step) + index) % self.data_ranks

    def hops(self, per_node: int) -> float:
        """Return how often the sum of a full step goes from one node to the next, if it is passed on in their order.

        A round begins where the step before ended. If that is in the middle of a node, its turn comes twice.
        """
        ranks, every = self.data_ranks, min(_STEPS, self.data_ranks // gcd(self.micro_batches, self.data_ranks))
        nodes = [[self.owner(step, i) // per_node for i in range(self.micro_batches)] for step in range(1, every + 1)]
        rounds = [turns[start : start + ranks] for turns in nodes for start in range(0, len(turns), ranks)]
        return sum(one != other for turns in rounds for one, other in pairwise(turns)) / every

    def rounds(self, step: int) -> int:
        """Return how many forward and backward passes every rank makes in this step: fewer if the step is short."""
        return -(-len(self.micro_batch_sizes(step)) // self.data_ranks)
