"""`run`: what the run is called, where it lives, what it starts from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from raytune_fsdp.config.rules import Section, local_path, run_name

MOST_THREADS = 1024


class ForkConfig(Section):
    run: Annotated[str, AfterValidator(local_path)]
    """Begin where this run was after `step`, with its weights, optimizer state, loss scale and place in the data: its
    directory, or its name if it is in `run.storage`, too. What may differ from it: `optim` (but `optimizer.type`,
    `optimizer.moments`, `groups`, and whether `sgd` has a momentum), the run's length, and the numbers of the loss. Nothing
    is copied: that run keeps the checkpoint until `raytune-fsdp fork --unpin`. See docs/sweeps.md."""

    step: int = Field(ge=1)
    """The step of one of its checkpoints. The first step of this run is the one after it."""


class RunConfig(Section):
    name: Annotated[str, AfterValidator(run_name)]
    """Name of the run and of its directory below `run.storage`. Letters, digits, `.`, `_` and `-`; the same name
    continues the same run."""

    storage: Annotated[str, AfterValidator(local_path)] = "runs"
    """Directory that every machine of the run can write to. The run lives in `<storage>/<name>`."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the data's order, of random weights and of dropout."""

    deterministic: bool = False
    """On GPUs: use only kernels that give the same bits every time. Without this, a continued run equals an uninterrupted
    one up to rounding; on CPUs both are equal to the bit in any case. It costs time, and refuses the few operations that
    have no such kernel."""

    exact: bool = False
    """Sum losses and gradients in the order of micro-batches, so that a run learns the same at any number of ranks, to the
    bit. On GPUs it includes `deterministic`. Without this, runs on other numbers of ranks are equal up to rounding."""

    threads: int | None = Field(default=None, ge=1, le=MOST_THREADS)
    """With `exact` on CPUs: threads of each rank, which decide how products are added up. Null: those that the first attempt
    has (its machine's cores, divided by its ranks there); later attempts keep them."""

    digest_every: int | None = Field(default=None, ge=1)
    """Put a digest of all weights, of the optimizer's state and of the place in the data into the record after every so many
    steps, as a checkpoint has one, without writing a checkpoint. Training waits meanwhile. Null: only checkpoints of runs
    with `exact` have a digest. It may change at any time."""

    resume: Literal["auto", "never", "always"] = "auto"
    """`auto` continues from the newest complete checkpoint, or starts from scratch if there is none; `never` refuses a
    directory that has a checkpoint; `always` refuses one that has none."""

    fork: ForkConfig | None = None
    """The run is a fork of another one."""
    stop_after: int | None = Field(default=None, ge=1)
    """End after this step as if the run had been asked to stop there: with a checkpoint, and the evaluation if one is due.
    Without it, or with a later one, the same command goes on. It changes neither the run's length nor its learning
    rates."""

    @property
    def repeats_bits(self) -> bool:
        """Whether only kernels are used that give the same bits every time."""
        return self.deterministic or self.exact


# `profile`: steps to look at closely.


class ProfileConfig(Section):
    steps: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list, max_length=20)
    """Steps to record with torch's profiler. Each rank writes a trace, and a table of what took longest, to `profile/` in
    the run directory. A recorded step is slower, and learns the same."""
