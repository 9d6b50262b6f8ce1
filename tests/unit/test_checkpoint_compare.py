"""The tensors of two checkpoints, number by number."""

from __future__ import annotations

import math

import pytest
import torch

from raytune_fsdp.tools.audit import comparison as compare
from raytune_fsdp.tools.audit.comparison import TensorDifference


class Stored:
    """One tensor, as a checkpoint gives it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": tuple(self.tensor.shape)}

    def read(self, _: str, first: int, last: int) -> torch.Tensor:
        return self.tensor[first:last]


@pytest.mark.parametrize("place", [0, 3, 7])
def test_what_is_no_number_is_the_largest_difference_wherever_it_is(
    monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """Tensors are read in pieces: a small difference in a later one does not hide it."""
    monkeypatch.setattr(compare, "_AT_ONCE", 4)
    left = torch.ones(8, 2)
    right = left + 1e-6
    right[place, 1] = math.nan
    found: TensorDifference = compare._compared("weight", Stored(left), Stored(right), None)  # type: ignore[arg-type]
    assert math.isnan(found.most) and found.place == (place, 1) and not found.equal
