"""Put the digest of all numbers into the record of some steps, without saving them (`run.digest_every`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raytune_fsdp.base.measured import StepMetrics
from raytune_fsdp.checkpoint.saver import Saver
from raytune_fsdp.checkpoint.state import RunState
from raytune_fsdp.config.sections.run import RunConfig


@dataclass(frozen=True, slots=True)
class StepDigests:
    """Which steps get a digest, and how it is found: as that of a save, by what makes the saves."""

    config: RunConfig
    saver: Saver

    def due(self, step: int) -> bool:
        """Return whether this step gets a digest: the same on every rank, and at any number of ranks."""
        return self.config.digest_every is not None and step % self.config.digest_every == 0

    def with_digest(self, rows: Sequence[StepMetrics], state: RunState) -> list[StepMetrics]:
        """Return the rows, the last of which gets the digest of the state after it, on rank 0. Collective."""
        *before, last = rows
        assert last.step == state.step, f"step {state.step} has not been fetched"
        return [*before, replace(last, digest=self.saver.digest(state), exact=self.config.exact)]
