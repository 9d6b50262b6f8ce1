"""Hash the numbers of a tensor so that it does not matter which rows are where: several processes can each do theirs.

Rows that have 1 KiB together are a leaf. Two leaves make a node, two nodes a larger one, as far as they come, and the
sha256 of what is left is the tensor's. Who has some rows sends the largest nodes that lie within them, and the bytes of
the leaves at both ends that others have a part of.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Self

import torch

_LEAF_BYTES = 1024
"""Hashing these takes about as long as the call. Of a longer leaf more would be sent where two ranks have a part of it:
of the adapters of a 70B, whose rows are short, with 4 KiB up to 15 MiB a rank."""

_AT_ONCE = 32 << 20
"""Bytes that one thread hashes at once, unless a row has more."""

Node = tuple[int, int, str]
"""Level, number within the level, and hash. Node n of a level is made of 2n and 2n + 1 of the level below."""


@dataclass(frozen=True, slots=True)
class HashedRows:
    """What is sent of some rows that follow each other."""

    nodes: Sequence[Node]
    ends: Sequence[tuple[int, str]]
    """First row and bytes, in hex, of what is here of a leaf that is not here as a whole. Who has hashed rows that
    follow each other has one at each end, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRows:
    """The rows of a tensor, as they are cut into leaves."""

    name: str
    dtype: str
    shape: Sequence[int]
    row_bytes: int
    """A tensor without dimensions is one row."""

    @classmethod
    def of(cls, name: str, dtype: torch.dtype, shape: Sequence[int]) -> Self:
        """Return the rows of a tensor."""
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        return cls(name=name, dtype=str(dtype).removeprefix("torch."), shape=tuple(shape), row_bytes=row_bytes)

    @property
    def count(self) -> int:
        return 0 if not self.row_bytes else self.shape[0] if self.shape else 1

    @property
    def leaf(self) -> int:
        """How many rows a leaf has."""
        return max(1, _LEAF_BYTES // max(1, self.row_bytes))

    def hashed(self, first: int, rows: torch.Tensor, threads: Executor) -> Iterator[HashedRows]:
        """Hash the rows from `first` on, which are these."""
        if not rows.numel():
            return iter(())
        content = rows.contiguous().reshape(-1).view(torch.uint8).numpy().data
        step = max(1, _AT_ONCE // self.row_bytes // self.leaf) * self.leaf
        # Not from `first` on: that would cut leaves that are here as a whole.
        cuts = [first, *range((first // step + 1) * step, first + len(content) // self.row_bytes, step)]
        at = [(cut - first) * self.row_bytes for cut in cuts]
        parts = (content[start:stop] for start, stop in zip(at, [*at[1:], len(content)], strict=True))
        return threads.map(self._hashed, cuts, parts)

    def _hashed(self, first: int, content: memoryview) -> HashedRows:
        size, leaf, count, nodes, ends = self.row_bytes, self.leaf, self.count, _Stack(), []
        stop = first + len(content) // size
        for number in range(first // leaf, -(-stop // leaf)):
            whole = _rows_of(number, leaf, count)
            here = (max(first, whole[0]), min(stop, whole[1]))
            part = content[(here[0] - first) * size : (here[1] - first) * size]
            if here == whole:
                nodes.add((0, number, _sha256(part)))
            else:
                ends.append((here[0], part.hex()))
        return HashedRows(nodes.nodes, ends)

    def joined(self, parts: Iterable[HashedRows]) -> HashedRows:
        """Return what is known of all these rows together: where they meet, two nodes are one."""
        known, stack = [*parts], _Stack()
        leaves, ends = self._leaves_of(end for part in known for end in part.ends)
        found = [*leaves, *(node for part in known for node in part.nodes)]
        for level, number, digest in sorted(found, key=lambda node: node[1] << node[0]):
            stack.add((level, number, digest))
        return HashedRows(stack.nodes, ends)

    def digest(self, parts: Iterable[HashedRows]) -> str:
        """Return the hash of the tensor from all of its rows."""
        whole, leaves = self.joined(parts), 0
        assert not whole.ends, f"{self.name}: rows of a leaf are missing, or there twice"
        for level, number, _ in whole.nodes:
            assert number << level == leaves, f"{self.name}: leaf {leaves} is missing, or is there twice"
            leaves += 1 << level
        assert leaves == -(-self.count // self.leaf), f"{self.name} has {leaves} leaves"
        head = json.dumps([self.name, self.dtype, [*self.shape]])
        return _sha256(head.encode() + b"".join(bytes.fromhex(digest) for _, _, digest in whole.nodes))

    def _leaves_of(self, ends: Iterable[tuple[int, str]]) -> tuple[list[Node], list[tuple[int, str]]]:
        """Return the leaves of which all rows are here, and the rows of others."""
        by_leaf: dict[int, list[tuple[int, str]]] = {}
        for first, content in ends:
            by_leaf.setdefault(first // self.leaf, []).append((first, content))
        whole: list[Node] = []
        parts: list[tuple[int, str]] = []
        for number, found in by_leaf.items():
            joined = bytes.fromhex("".join(content for _, content in sorted(found)))
            start, stop = _rows_of(number, self.leaf, self.count)
            if len(joined) == (stop - start) * self.row_bytes:
                whole.append((0, number, _sha256(joined)))
            else:
                parts += found
        return whole, parts


def _rows_of(number: int, leaf: int, count: int) -> tuple[int, int]:
    """Return the rows of a leaf, by its number, how many rows a leaf has, and how many there are."""
    return number * leaf, min(count, (number + 1) * leaf)


def root(digests: Mapping[str, str]) -> str:
    """Return the hash of several tensors together, from those of each by name."""
    return _sha256(b"".join(bytes.fromhex(digests[name]) for name in sorted(digests)))


# Joining what all ranks have hashed, by pairs: no rank gets a message from each of the others.
#
# Rank 0 would otherwise parse and join what all have sent, while it trains: for a 70B with its moments on 512 ranks
# that took 3.1 s of processor time. Ranks that follow each other have rows that do, so their hashes meet in larger
# nodes, and what is sent does not grow on its way to rank 0.

Hashes = Mapping[str, Sequence[HashedRows]]
"""What was hashed of each tensor."""


def receiver(rank: int) -> int:
    """Return the rank to which this one sends what it has joined: its own number without the lowest bit."""
    return rank & (rank - 1)


def senders(rank: int, world: int) -> list[int]:
    """Return the ranks whose `receiver` this one is."""
    found, distance = [], 1
    while distance < world and rank % (2 * distance) == 0:
        found += [rank + distance] if rank + distance < world else []
        distance *= 2
    return found


def join_by_pairs(
    mine: Hashes | str,
    rows: Mapping[str, TensorRows],
    *,
    rank: int,
    world: int,
    send: Callable[[object], None],
    receive: Callable[[int], Any],
) -> Hashes | str | None:
    """Join what this rank has hashed with what it receives, and send it on; on rank 0, return it. All ranks call this.

    A text is for a rank that has nothing, and says why; then there is no digest. `send` sends to the `receiver` of this
    rank, and `receive` takes what another one has sent; both deal in plain lists.
    """
    found = mine if isinstance(mine, str) else _joined(rows, [mine])
    for sender in senders(rank, world):
        theirs = receive(sender)  # in any case: nothing stays where it was sent to
        if isinstance(found, str) or isinstance(theirs, str):
            found = found if isinstance(found, str) else theirs
        else:
            found = _joined(rows, [found, _from_plain(theirs)])
    if rank == 0:
        return found
    send(found if isinstance(found, str) else to_plain(found))
    return None


def to_plain(hashes: Hashes) -> dict[str, Any]:
    """Return hashes as they are sent."""
    return {name: [(each.nodes, each.ends) for each in found] for name, found in hashes.items()}


def digests_of(joined: Hashes, rows: Mapping[str, TensorRows]) -> dict[str, str]:
    """Return the digest of every tensor from what all ranks have hashed of it."""
    return {name: each.digest(joined.get(name, ())) for name, each in rows.items()}


def _joined(rows: Mapping[str, TensorRows], parts: Sequence[Hashes]) -> Hashes:
    names = {name: None for part in parts for name in part}
    return {name: [rows[name].joined(r for part in parts for r in part.get(name, ()))] for name in names}


def _from_plain(message: Mapping[str, Any]) -> Hashes:
    return {name: [HashedRows(*each) for each in found] for name, found in message.items()}


class _Stack:
    """Nodes in order, of which two are replaced by the one that they make."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def add(self, node: Node) -> None:
        while self.nodes and node[1] % 2 and self.nodes[-1][:2] == (node[0], node[1] - 1):
            level, number, digest = self.nodes.pop()
            node = (level + 1, number // 2, _sha256(bytes.fromhex(digest + node[2])))
        self.nodes.append(node)


def _sha256(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()
