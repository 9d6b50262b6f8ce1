"""The digest of a tensor: the same however its rows are divided, another for any other number, name, type or shape."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import pytest
import torch

from raytune_fsdp.base import row_hashes
from raytune_fsdp.base.row_hashes import HashedRows, Hashes, TensorRows, digests_of, join_by_pairs, receiver
from raytune_fsdp.checkpoint.writing import PieceLayout, hash_pieces
from raytune_fsdp.model.pieces.pieces import range_of


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


def joined(tensors: dict[str, torch.Tensor], world: int, fails: int | None = None) -> tuple[Any, list[list[str]]]:
    """The digests, or None, of tensors whose rows are shared out, and the messages that each rank has received."""
    rows = {name: TensorRows.of(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    boxes: list[Queue[str]] = [Queue() for _ in range(world)]
    received: list[list[str]] = [[] for _ in range(world)]

    def on(rank: int) -> Hashes | str | None:
        def receive(source: int) -> Any:
            assert receiver(source) == rank
            received[rank].append(boxes[source].get(timeout=30))
            return json.loads(received[rank][-1])

        cuts = {name: range_of(len(tensor), world, rank) for name, tensor in tensors.items()}
        pieces = {name: tensor[slice(*cuts[name])] for name, tensor in tensors.items() if cuts[name][0] < cuts[name][1]}
        layout = PieceLayout(mine=(*pieces,), rows={name: (each, cuts[name][0]) for name, each in rows.items()})
        found = join_by_pairs(
            "its disk is full" if rank == fails else hash_pieces(pieces, layout), rows, rank=rank, world=world,
            send=lambda value: boxes[rank].put(json.dumps(value)), receive=receive,
        )  # fmt: skip
        assert rank == 0 or found is None
        return found

    with ThreadPoolExecutor(world) as threads:
        first, *_ = threads.map(on, range(world))
    return first if isinstance(first, str) else digests_of(first or {}, rows), received


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8, 13])
def test_ranks_join_what_they_have_hashed_by_pairs(world: int) -> None:
    tensors = {"long": torch.randn(4096, 70), "narrow": torch.randn(5000), "few": torch.randn(3, 700)}
    digests, received = joined(tensors, world)
    assert digests == {name: digest_of(tensor, name=name) for name, tensor in tensors.items()}
    assert [len(messages) for messages in received] == [
        sum(1 for source in range(1, world) if receiver(source) == rank) for rank in range(world)
    ]
    assert len(received[0]) == (world - 1).bit_length()
    # Rows that follow each other meet in larger nodes: a message of half of them is hardly longer than that of one.
    if world == 8:
        one, two, four = (len(message) for message in received[0])
        assert two < 1.5 * one and four < 1.5 * one
    if world > 1:
        assert joined(tensors, world, fails=world - 1)[0] == "its disk is full"
        assert joined(tensors, world, fails=0)[0] == "its disk is full"
