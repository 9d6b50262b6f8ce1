"""How the samples of a run are divided: into steps, steps into blocks, blocks among the data ranks. Pure arithmetic.

Steps count from 1. Block i of step s, with n blocks in a full step, belongs to data rank ((s-1)*n + i) mod data_ranks:
ranks take turns through the whole run, so that fillers fall on all of them in turn where data_ranks does not divide n.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The only owner of this arithmetic. `Plan.division` is the run's."""

    global_batch: int
    """Packed samples of a step."""
    micro_batch: int
    """Packed samples of a block."""
    total_samples: int | None
    """Packed samples of the whole run if its length is given in epochs; its last step may be short. None: every step
    is full."""
    data_ranks: int
    """Ranks that get blocks of their own."""

    def __post_init__(self) -> None:
        assert self.global_batch % self.micro_batch == 0, (self.global_batch, self.micro_batch)

    @property
    def blocks(self) -> int:
        """Blocks of a full step."""
        return self.global_batch // self.micro_batch

    @property
    def full_rounds(self) -> int:
        """Forward and backward passes of every rank in a full step, fillers included."""
        return -(-self.blocks // self.data_ranks)

    @property
    def fillers(self) -> int:
        """Passes of a full step, summed over all ranks, that only keep the collectives aligned."""
        return self.full_rounds * self.data_ranks - self.blocks

    def samples_before(self, step: int) -> int:
        """Packed samples that the steps before this one have consumed."""
        samples = (step - 1) * self.global_batch
        return samples if self.total_samples is None else min(samples, self.total_samples)

    def samples_of(self, step: int) -> int:
        """Packed samples of a step: a full batch, except perhaps in the run's last step."""
        return self.samples_before(step + 1) - self.samples_before(step)

    def samples_of_steps(self, first: int, last: int) -> int:
        """Packed samples of steps `first` to `last`, both included."""
        return self.samples_before(last + 1) - self.samples_before(first)

    def block_sizes(self, step: int) -> list[int]:
        """Samples of each block of a step."""
        samples = self.samples_of(step)
        assert samples > 0, f"step {step} starts after the last of {self.total_samples} samples"
        whole, rest = divmod(samples, self.micro_batch)
        return [self.micro_batch] * whole + [rest] * (rest > 0)

    def first_block(self, step: int) -> int:
        """Number of the step's first block, counted from the start of the run."""
        return (step - 1) * self.blocks

    def owner(self, step: int, index: int) -> int:
        """The data rank that computes a block of a step."""
        return (self.first_block(step) + index) % self.data_ranks

    def rounds(self, step: int) -> int:
        """Forward and backward passes of every rank in this step: fewer than in a full step if it is short."""
        return -(-len(self.block_sizes(step)) // self.data_ranks)
