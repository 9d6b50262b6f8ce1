"""The losses of documents while a run trains on them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raytune_fsdp.base.batch import Borders
from raytune_fsdp.model.objective.documents import sums_by_segment


@pytest.fixture(params=[False, True], ids=["", "deterministic"])
def deterministic(request: pytest.FixtureRequest) -> Iterator[None]:
    """As `run.deterministic`, with which a GPU has no running sums."""
    torch.use_deterministic_algorithms(request.param)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("member", [None, 0, 1])
def test_each_loss_is_that_of_its_document(deterministic: None, member: int | None) -> None:
    borders = Borders(starts=torch.tensor([0, 3, 5, 12, 20], dtype=torch.int32), longest=8)
    part: Any = None if member is None else SimpleNamespace(member=member)
    block: Any = SimpleNamespace(
        targets=SimpleNamespace(places=torch.tensor([1, 2, 5, 9])), borders=borders, part=part,
        input_ids=torch.zeros(1, 10),
    )  # fmt: skip
    found = sums_by_segment(torch.tensor([1.0, 2.0, 4.0, 8.0]), block)
    # The other half of the block has places 10 to 19.
    assert found.tolist() == ([0.0, 0.0, 1.0, 14.0] if member else [3.0, 0.0, 12.0, 0.0])
    assert found.dtype == torch.float64
