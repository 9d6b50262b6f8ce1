"""The order of rows over datasets: which row comes at each place of an epoch. Exact, and looked up instead of stored.

A dataset of n rows and weight w is an endless sequence of passes over its rows, each pass in an order of its own. Epoch
e takes the entries ceil(e*w*n) to ceil((e+1)*w*n) of that sequence: after any number of epochs every row has been seen
as often as the weight says, rounded up or down. Weights are exact fractions, so rounding errors never add up.

Inside an epoch, entry j of a dataset's c entries has the key (2j+1)/(2c), and entries are sorted by key, then by
dataset: each dataset is spread evenly over the epoch.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, islice
from typing import Literal, TypeGuard

from raytune_fsdp.base.random import derive_key, mix64

# The order of the data: keyed permutations that are looked up, never stored.
#
# None of this may ever change under its number (golden values are in the tests):
#
#     mix64(x)      the finalizer of splitmix64, on integers modulo 2**64
#     derive_key    xxh3_64 of the parts, each written as i<n>:<decimal>, or s<n>:<utf-8>, with n its length in bytes
#     Permutation   a balanced Feistel network of 8 rounds over 2*h bits, where 4**h is the smallest power of 4 >= n;
#                   round r maps (left, right) to (right, left ^ (mix64(k_r ^ right) mod 2**h)), where
#                   k_r = mix64(key + (r+1)*G) and G = 0x9E3779B97F4A7C15;
#                   a result >= n is permuted again until it is < n (cycle walking: at most 4 passes on average)
#
# `mixture` orders the rows with these, `windows` the samples inside a window, `stream` the windows of an epoch and,
# again, their samples. All of that belongs to a version of the order, and so do the rows themselves. A run has one of
# these versions:
#
#     2             documents are packed best-fit decreasing in any order; a pattern or directory is listed by following
#                   links wherever they lead
#     3             with `shuffle: none`, documents are packed in their own order (`packing.best_fit_in_order`); a
#                   directory that links lead to a second time is read once (`sources.places`)
#     4             a directory is read by splits (`sources.splits`), and chats also by what `sources.keys` looks for;
#                   modules that a user's function imports belong to the run (`data.trial`); equal rows are held out
#                   together, or not at all (`data.duplicates`)
#     5             the end of a turn is trained on also where a template leaves it to whatever follows, and not where
#                   generation never writes it; nor is an empty thought that the template adds (`rows.turns`)
#     6             columns that say they are JSON are read as such (`sources.json_columns`); a text that begins or ends
#                   with the tokens that the tokenizer adds there gets no second ones (`rows.formats`)
#
# A run keeps the version that it was begun with. A new run, and windows in the cache, have the lowest version that
# gives them their rows in their order: most data is the same under all versions, and so keeps its runs and its cache.
#
# That version says nothing about an evaluation which a run gains later, and which may need a higher one. Such an
# evaluation is read as it would have been when the run was begun: by the newest version there was then. A run keeps
# that one, too (`Order`).

OLDEST_ORDER = 2
"""The version of all data that later ones do not change, and of every run begun before there was another."""

THIRD_ORDER = 3
FOURTH_ORDER = 4
FIFTH_ORDER = 5
SIXTH_ORDER = 6

ORDER_VERSION = SIXTH_ORDER
"""The newest version."""

_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15


def is_known(version: object) -> TypeGuard[int]:
    # A checkpoint may be a stranger's, and name anything.
    return type(version) is int and OLDEST_ORDER <= version <= ORDER_VERSION


def order_of(begun_with: int | None) -> int:
    """Return the version by whose rules data is read: the one a run was begun with, or else the newest."""
    return begun_with if is_known(begun_with) else ORDER_VERSION


@dataclass(frozen=True, slots=True)
class Order:
    """Two versions of the order: the rules by which rows are read, and the least version that they have."""

    rules: int
    """The version by whose rules rows are read."""
    least: int
    """A lower bound: rows have the lowest version that gives them, but none below this."""

    @classmethod
    def of(cls, order_version: int | None, newest_order: int | None = None) -> Order:
        """Return the order of a run with this version, or of a new run (None).

        `newest_order`: the newest version when the run was begun, for data it may have gained since. The data it had
        then needs no more than the run's own version, and stays the same.
        """
        if not is_known(order_version):
            return cls(ORDER_VERSION, OLDEST_ORDER)
        return cls(max(order_version, newest_order) if is_known(newest_order) else order_version, order_version)

    def version(self, lowest: int) -> int:
        """Return the version of rows; `lowest` is the lowest that gives them as the rules do."""
        return min(max(lowest, self.least), self.rules)


class Permutation:
    """A permutation of range(n) chosen by `key`, in constant memory."""

    def __init__(self, n: int, *, key: int) -> None:
        assert n >= 0, n
        self._n = n
        self._half_bits = ((n - 1).bit_length() + 1) // 2 if n > 1 else 0
        self._half_mask = (1 << self._half_bits) - 1
        self._round_keys = tuple(mix64(key + (r + 1) * _GOLDEN) for r in range(_ROUNDS))

    def __call__(self, index: int) -> int:
        if not 0 <= index < self._n:
            raise IndexError(f"{index} is not in range({self._n})")
        if self._half_bits == 0:
            return index
        value = self._feistel(index)
        while value >= self._n:
            value = self._feistel(value)
        return value

    # About 9 us a lookup for n = 1,000,000, so 40 ms for the 4096 rows of a default window: little compared with
    # tokenizing. A stored permutation would take 8 bytes a row in every process.
    def _feistel(self, value: int) -> int:
        bits, mask = self._half_bits, self._half_mask
        left, right = value >> bits, value & mask
        for key in self._round_keys:
            left, right = right, left ^ (mix64(key ^ right) & mask)
        return left << bits | right


Shuffle = Literal["rows", "blocks", "none"]

_LENGTHS = 10_000
"""Number of epochs whose lengths are kept in memory."""


class Interleaving:
    """The order of the entries of several datasets; dataset d has `counts[d]` entries."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = tuple(counts)
        self.total = sum(counts)
        # Keys over a common denominator: integers, which compare exactly and faster than fractions.
        common = math.lcm(*(count for count in counts if count))
        self._scales = tuple(common // count if count else 0 for count in counts)

    def walk(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield datasets and entries of the places first <= place < last."""
        return islice(self._merged(self._before(first)), max(0, min(last, self.total) - first))

    def _merged(self, taken: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the datasets and entries that follow, in order; `taken`: how many entries of each come before."""
        heads = [(self._key(d, n), d, n) for d, n in enumerate(taken) if n < self.counts[d]]
        heapq.heapify(heads)
        while heads:
            _, dataset, entry = heads[0]
            yield dataset, entry
            if entry + 1 < self.counts[dataset]:
                heapq.heapreplace(heads, (self._key(dataset, entry + 1), dataset, entry + 1))
            else:
                heapq.heappop(heads)

    def _key(self, dataset: int, entry: int) -> int:
        return (2 * entry + 1) * self._scales[dataset]

    def _before(self, place: int) -> list[int]:
        """Return how many entries of each dataset come before a place."""
        if not self.total:
            return [0] * len(self.counts)
        # An estimate that is off by at most half an entry for each dataset, then single steps to the exact place.
        taken = [min(count, (2 * place * count + self.total) // (2 * self.total)) for count in self.counts]
        excess = sum(taken) - place
        if excess > 0:
            tails = [(-self._key(d, n - 1), -d) for d, n in enumerate(taken) if n]
            heapq.heapify(tails)
            for _ in range(excess):
                dataset = -tails[0][1]
                taken[dataset] -= 1
                if taken[dataset]:
                    heapq.heapreplace(tails, (-self._key(dataset, taken[dataset] - 1), -dataset))
                else:
                    heapq.heappop(tails)
        elif excess < 0:
            for dataset, _ in islice(self._merged(taken), -excess):
                taken[dataset] += 1
        return taken


class StretchOrder:
    """A permutation of rows for `shuffle: blocks`: it permutes stretches of a file, and the rows inside each of them.

    `blocks`: the number of rows of each stretch.
    """

    def __init__(self, blocks: Sequence[int], *, key: int) -> None:
        self._key = key
        order = Permutation(len(blocks), key=derive_key("blocks", key))
        self._blocks = [order(i) for i in range(len(blocks))]
        starts = [0, *accumulate(blocks)]
        self._first_rows = [starts[number] for number in self._blocks]
        self._ends = list(accumulate(blocks[number] for number in self._blocks))
        # A window takes neighbouring places, so consecutive calls ask for the same stretch.
        self._inside = lru_cache(maxsize=4)(self._rows_of)

    def __call__(self, index: int) -> int:
        place = bisect_right(self._ends, index)
        start = self._ends[place - 1] if place else 0
        return self._first_rows[place] + self._inside(place)(index - start)

    def _rows_of(self, place: int) -> Permutation:
        size = self._ends[place] - (self._ends[place - 1] if place else 0)
        return Permutation(size, key=derive_key("block", self._key, self._blocks[place]))


class Mixture:
    """The rows of every epoch. `blocks`: for each dataset, the sizes of what `shuffle: blocks` permutes."""

    def __init__(
        self, blocks: Sequence[Sequence[int]], weights: Sequence[Fraction], *, shuffle: Shuffle, seed: int
    ) -> None:
        self._blocks = blocks
        self._rows = tuple(sum(sizes) for sizes in blocks)
        self.weights = tuple(weights)
        self._shuffle = shuffle
        self._seed = seed
        # How many rows of each dataset an epoch has, as two integers: multiplying fractions takes microseconds each.
        self._ratios = [
            (weight * rows).as_integer_ratio() for weight, rows in zip(self.weights, self._rows, strict=True)
        ]
        self._lengths: dict[int, int] = {}
        self._epoch: tuple[int, list[int], Interleaving] = (-1, [], Interleaving(()))
        self._passes: dict[tuple[int, int], Callable[[int], int]] = {}

    @property
    def repeats(self) -> bool:
        """Return whether every epoch has the same rows, because all weights are whole numbers."""
        return all(weight.denominator == 1 for weight in self.weights)

    def epochs_for_all_rows(self) -> int:
        """Return after how many epochs every row has been seen, except rows of datasets with weight 0."""
        return 1 + math.ceil(max(1 / weight for weight in self.weights if weight))

    def length(self, epoch: int) -> int:
        """Return the number of rows in an epoch. Called for every window, and for each between the cursor and it."""
        found = self._lengths.get(epoch)
        if found is None:
            if len(self._lengths) > _LENGTHS:
                self._lengths.clear()
            found = self._lengths[epoch] = sum(self._starts(epoch + 1)) - sum(self._starts(epoch))
        return found

    def rows(self, epoch: int, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield dataset and row of the places first <= place < last of an epoch."""
        found = self._epoch
        if found[0] != epoch:  # the last one is kept, because windows of an epoch follow one another
            starts = self._starts(epoch)
            counts = [after - before for before, after in zip(starts, self._starts(epoch + 1), strict=True)]
            self._epoch = found = (epoch, starts, Interleaving(counts))
        _, starts, order = found
        for dataset, entry in order.walk(first, last):
            yield dataset, self._row(dataset, starts[dataset] + entry)

    def _starts(self, epoch: int) -> list[int]:
        """Return the first entry of each dataset in an epoch: epoch times its rows per epoch, rounded up."""
        return [-(-epoch * rows // of) for rows, of in self._ratios]

    def _row(self, dataset: int, entry: int) -> int:
        number, index = divmod(entry, self._rows[dataset])
        if self._shuffle == "none":
            return index
        if (dataset, number) not in self._passes:
            if len(self._passes) > 4 * len(self._rows):
                self._passes.clear()  # a window needs one or two passes of each dataset, and no older ones
            key = derive_key(self._shuffle, self._seed, dataset, number)
            self._passes[dataset, number] = (
                StretchOrder(self._blocks[dataset], key=key)
                if self._shuffle == "blocks"
                else Permutation(self._rows[dataset], key=key)
            )
        return self._passes[dataset, number](index)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_passes": {}, "_epoch": (-1, [], Interleaving(()))}


def weights_of(
    weights: Sequence[float | None], shares: Sequence[float | None], rows: Sequence[int]
) -> tuple[Fraction, ...]:
    """Return exact weights from the config. With shares, an epoch has as many rows as all datasets together."""
    # Through str: Fraction(0.1) is the float's binary value, with a denominator of 2**55; Fraction("0.1") is 1/10.
    if all(share is None for share in shares):
        return tuple(Fraction(1) if weight is None else Fraction(str(weight)) for weight in weights)
    parts = [Fraction(str(share or 0.0)) for share in shares]
    return tuple(part / sum(parts) * sum(rows) / count for part, count in zip(parts, rows, strict=True))
