"""Load a committed checkpoint into model and optimizer, verified and read by all ranks together."""

from __future__ import annotations

import torch.distributed as dist
from transformers import PreTrainedModel

from raytune_fsdp.base.collectives import on_all_ranks
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, verify
from raytune_fsdp.checkpoint.contents import tensors_of
from raytune_fsdp.checkpoint.location import storage_at
from raytune_fsdp.checkpoint.reading import read_index, read_tensors
from raytune_fsdp.step.optim import Optimizer


def load(model: PreTrainedModel, optimizer: Optimizer, checkpoint: CommittedCheckpoint) -> None:
    """Read the tensors of a committed checkpoint into model and optimizer. Collective."""
    optimizer.init_state()
    storage = storage_at(checkpoint.root)
    tensors = tensors_of(model, optimizer)
    on_all_ranks(lambda: read_tensors(tensors, storage, checkpoint.name, index=read_index(storage, checkpoint.name)))


def verify_together(checkpoint: CommittedCheckpoint, *, hashes: bool, only_rank0: bool = False) -> str | None:
    """The problem with a committed checkpoint, the same on all ranks; each hashes a part of the files. Collective."""
    share = (0, 1) if only_rank0 else (dist.get_rank(), dist.get_world_size())

    def look() -> str | None:
        return verify(checkpoint, hashes=hashes, share=share) if dist.get_rank() == 0 or not only_rank0 else None

    return next(filter(None, on_all_ranks(look)), None)
