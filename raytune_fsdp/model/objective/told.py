"""What the host knows of a micro-batch's documents, for losses of groups of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed import ProcessGroup

from raytune_fsdp.base.batch import GROUP_COLUMNS, Targets
from raytune_fsdp.model.pieces.sums import summed


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the host knows of a micro-batch's documents, on the device; and which of it this rank counts."""

    documents: torch.Tensor
    """[2 + columns, documents] in fp64: the first target of each, how many it has, and what the loss is told of it."""
    total: int
    """The targets of the whole micro-batch."""
    longest: int
    groups: slice
    """The groups that begin in this rank's part."""

    @classmethod
    def of(cls, targets: Targets, device: torch.device, size: int = 2) -> Told:
        """`size`: the documents of a group."""
        counts = np.array(targets.by_document, dtype=np.int64)
        told = np.array(targets.columns or np.empty((0, len(GROUP_COLUMNS))), dtype=np.float64)  # a filler has none
        if len(told) != len(counts) or len(counts) % size or told.shape[1] < len(GROUP_COLUMNS):
            raise RuntimeError(f"{len(counts)} documents that are told {told.shape} values make no groups of {size}")
        first = np.cumsum(counts) - counts
        table = torch.from_numpy(np.ascontiguousarray(np.vstack([first, counts, told.T])))
        if device.type == "cuda":  # the host does not wait for it
            table = table.pin_memory().to(device, non_blocking=True)
        inside = (first[::size] >= targets.before) & (first[::size] < targets.before + len(targets.ids))
        begin = int(np.argmax(inside)) if inside.any() else 0
        return cls(
            documents=table, total=int(counts.sum()), longest=int(counts.max(initial=0)),
            groups=slice(begin, begin + int(inside.sum())),
        )  # fmt: skip

    def gathered(self, each: torch.Tensor, targets: Targets, group: ProcessGroup | None) -> torch.Tensor:
        """Return in fp64 what is known of each target of the whole micro-batch, of which a rank may have a part."""
        every = each.double()
        if group is not None and self.total:
            # Each number is one rank's and zero on all others, so that no order can change it.
            every = every.new_zeros(self.total, *every.shape[1:])
            every[targets.before : targets.before + len(targets.ids)] = each.double()
            every = summed(group, every)
        return every

    def datasets(self, targets: Targets, size: int = 2) -> torch.Tensor:
        """Return the datasets of the groups that begin on this rank."""
        return targets.datasets[self.documents[0, ::size][self.groups].long() - targets.before]
