"""Hash the numbers of a tensor so that it does not matter which rows are where: several processes can each do theirs.

Rows that have 1 KiB together are a leaf. Two leaves make a node, two nodes a larger one, as far as they come, and the
sha256 of what is left is the tensor's. Who has some rows sends the largest nodes that lie within them, and the bytes of
the leaves at both ends that others have a part of.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Self

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
