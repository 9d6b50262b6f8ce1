"""The values of the reference, as micro-batches are told them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from raytune_fsdp.base.batch import MicroBatch, StepBatches
from raytune_fsdp.data.reference import Known, names_of


@dataclass(slots=True)
class Given:
    """What the reference gives to each document of a run, of its training and its evaluations."""

    known: Known

    def told(self, batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch whose loss is told the values of its documents, after what it is told of their rows."""
        if not batch.targets.columns:
            return batch
        values = self.known.find(names_of(batch)).tolist()
        columns = tuple((*told, value) for told, value in zip(batch.targets.columns, values, strict=True))
        return replace(batch, targets=replace(batch.targets, columns=columns))

    def steps(self, steps: Iterable[StepBatches]) -> Iterator[StepBatches]:
        """Yield steps whose micro-batches are told. They are whole, and on the host."""
        for step in steps:
            yield replace(step, micro_batches=tuple(map(self.told, step.micro_batches)))
