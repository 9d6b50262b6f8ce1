"""The copy that a save writes from: no larger than what it copies, and not there before it is needed."""

from __future__ import annotations

import torch

from raytune_fsdp.checkpoint.writing import Staging


def test_it_takes_what_it_copies_and_nothing_before() -> None:
    tensors = {"a": torch.arange(1000.0), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.zeros(0, 4)}
    staging = Staging()
    assert staging._block.nbytes == 0
    staging.copy(tensors, ["a", "b", "c"])
    assert (
        sum(t.nbytes for t in tensors.values()) <= staging._block.nbytes <= sum(t.nbytes + 64 for t in tensors.values())
    )
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    tensors["a"].add_(1)
    for name, piece in staging.pieces.items():
        assert torch.equal(piece, before[name])
        assert piece.untyped_storage().nbytes() == piece.nbytes, "torch.save writes all of a storage"
    taken, place = staging._block.nbytes, staging.pieces["a"].data_ptr()
    staging.copy(tensors, ["a", "b", "c"])
    assert torch.equal(staging.pieces["a"], tensors["a"])
    assert (staging._block.nbytes, staging.pieces["a"].data_ptr()) == (taken, place)
