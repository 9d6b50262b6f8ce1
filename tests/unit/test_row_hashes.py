"""The digest of a tensor: the same however its rows are divided, another for any other number, name, type or shape."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from raytune_fsdp.base import row_hashes
from raytune_fsdp.base.row_hashes import HashedRows, TensorRows


def digest_of(tensor: torch.Tensor, cuts: Sequence[int] = (), name: str = "weight") -> str:
    """The digest of a tensor of which someone has the rows between each two cuts, in no order."""
    rows = TensorRows.of(name, tensor.dtype, tensor.shape)
    parts: list[HashedRows] = []
    with ThreadPoolExecutor(2) as threads:
        for first, last in zip([0, *cuts], [*cuts, rows.count], strict=True):
            found = [*rows.hashed(first, tensor[first:last] if tensor.ndim else tensor, threads)]
            assert sum(len(each.ends) for each in found) <= 2
            parts += found
    random.Random(3).shuffle(parts)
    return rows.digest(parts)


@pytest.mark.parametrize(
    "shape", [(7,), (5000,), (1025, 3), (300, 40), (5, 2000), (37, 3, 11), (0, 4), (4, 0), (1, 1), (2049, 70)]
)
def test_it_does_not_matter_who_has_which_rows(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    whole, choose = digest_of(tensor), random.Random(2)
    monkeypatch.setattr(row_hashes, "_AT_ONCE", 20_000)  # a thread has some leaves
    for parts in (1, 2, 3, 7, 64):
        assert digest_of(tensor, sorted(choose.choices(range(shape[0] + 1), k=parts - 1))) == whole


def test_any_other_number_has_another_digest() -> None:
    tensor = torch.zeros(1500, 3)
    digests = {digest_of(tensor)}
    for row in range(0, 1500, 100):
        other = tensor.clone()
        other[row, 1] = -0.0  # equal, and not the same
        digests.add(digest_of(other))
    digests |= {digest_of(tensor, name="other"), digest_of(tensor.int()), digest_of(tensor.reshape(3, 1500))}
    digests |= {digest_of(tensor[:0]), digest_of(torch.zeros(())), digest_of(torch.ones(()))}
    assert len(digests) == 1 + 15 + 3 + 3


def test_rows_that_are_missing_or_there_twice_are_a_fault() -> None:
    rows, tensor = TensorRows.of("weight", torch.float32, (9000,)), torch.zeros(9000)
    with ThreadPoolExecutor(1) as threads:
        parts = [*rows.hashed(0, tensor[:5000], threads), *rows.hashed(5000, tensor[5000:], threads)]
    for wrong in (parts[:1], parts[1:], [*parts, *parts]):
        with pytest.raises(AssertionError):
            rows.digest(wrong)
