"""The order of the data: keyed permutations that are looked up, never stored.

What must never change under its number (golden values are in the tests):

    mix64(x)      the finalizer of splitmix64, on integers modulo 2**64
    derive_key    xxh3_64 of the parts, each written as i<n>:<decimal>, or s<n>:<utf-8>, with n its length in bytes
    Permutation   a balanced Feistel network of 8 rounds over 2*h bits, where 4**h is the smallest power of 4 >= n;
                  round r maps (left, right) to (right, left ^ (mix64(k_r ^ right) mod 2**h)), where
                  k_r = mix64(key + (r+1)*G) and G = 0x9E3779B97F4A7C15;
                  a result >= n is permuted again until it is < n (cycle walking: at most 4 passes on average)

`mixture` uses these to order the rows, `windows` the samples inside a window, `stream` the windows of an epoch and,
again, their samples. All of that belongs to a version of the order, as do the rows themselves. A run has one of these:

    2             documents are packed best-fit decreasing in any order; a pattern or directory is listed by following
                  links wherever they lead
    3             with `shuffle: none`, documents are packed in their own order (`packing.best_fit_in_order`); a
                  directory that links lead to again is read once (`sources.places`)
    4             a directory is read by splits (`sources.splits`), and chats also by what `sources.keys` looks for;
                  modules that a function of the user's imports belong to the run (`data.trial`); equal rows are held
                  out together, or not at all (`data.duplicates`)

A run keeps the version that it was begun with. A new run, and windows in the cache, have the lowest that gives them
their rows in their order: most data is the same under all, and so keeps its runs and its cache.

That version says nothing about an evaluation which a run gains later, and which may need a higher one. It is read as it
would have been at the beginning: by the newest version that there was then, which a run keeps, too (`Order`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

from raytune_fsdp.base.random import mix64

OLDEST_ORDER = 2
"""The version of all that later ones do not change, and of every run begun before there was another."""

THIRD_ORDER = 3
FOURTH_ORDER = 4

ORDER_VERSION = FOURTH_ORDER
"""The newest."""

_ROUNDS = 8
_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def is_known(version: object) -> TypeGuard[int]:
    # A checkpoint may be a stranger's, and name anything.
    return type(version) is int and OLDEST_ORDER <= version <= ORDER_VERSION


def order_of(begun_with: int | None) -> int:
    """The version by whose rules data is read: that of the run which continues, or the newest."""
    return begun_with if is_known(begun_with) else ORDER_VERSION


@dataclass(frozen=True, slots=True)
class Order:
    """By which version rows are read, and which one they have."""

    rules: int
    """They are read by the rules of this one."""
    least: int
    """They have the lowest that gives them, but not a lower one than this."""

    @classmethod
    def of(cls, order_version: int | None, newest_order: int | None = None) -> Order:
        """That of a run with this version, or of a new one. `newest_order`: the newest that there was at its beginning,
        for what it may have gained since. What it had then needs no more than the run's version, and stays the same."""
        if not is_known(order_version):
            return cls(ORDER_VERSION, OLDEST_ORDER)
        return cls(max(order_version, newest_order) if is_known(newest_order) else order_version, order_version)

    def version(self, lowest: int) -> int:
        """The version of rows which `lowest` gives as the rules do."""
        return min(max(lowest, self.least), self.rules)


class Permutation:
    """A permutation of range(n) chosen by `key`, in constant memory."""

    def __init__(self, n: int, *, key: int) -> None:
        assert n >= 0, n
        self._n = n
        self._half_bits = ((n - 1).bit_length() + 1) // 2 if n > 1 else 0
        self._half_mask = (1 << self._half_bits) - 1
        self._round_keys = tuple(mix64(key + (r + 1) * _GOLDEN) for r in range(_ROUNDS))

    def __len__(self) -> int:
        return self._n

    def __call__(self, index: int) -> int:
        if not 0 <= index < self._n:
            raise IndexError(f"{index} is not in range({self._n})")
        if self._half_bits == 0:
            return index
        value = self._feistel(index)
        while value >= self._n:
            value = self._feistel(value)
        return value

    # About 9 us a lookup for n = 1,000,000, so 40 ms for the 4096 rows of a default window: little beside tokenizing,
    # where a stored permutation would take 8 bytes a row in every process.
    def _feistel(self, value: int) -> int:
        bits, mask = self._half_bits, self._half_mask
        left, right = value >> bits, value & mask
        for key in self._round_keys:
            left, right = right, left ^ (mix64(key ^ right) & mask)
        return left << bits | right
