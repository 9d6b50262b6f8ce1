"""Some of the rows of a source: those that a dataset's `rows` selects, and those held out of it for evaluation.

Rows are chosen by a key made from their file's content and their number in it. So the choice is the same in every
process and at every world size, whatever the files are called and in which order they come, and no list is kept.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from raytune_fsdp.base.errors import RowError
from raytune_fsdp.base.random import mix64
from raytune_fsdp.config.sections.data import RowsConfig
from raytune_fsdp.data.mixture import FOURTH_ORDER, OLDEST_ORDER
from raytune_fsdp.data.sources.source import Columns, Row, Source

if TYPE_CHECKING:
    from raytune_fsdp.base.batch import Int64Array


@dataclass(frozen=True, eq=False)
class Selected:
    """Some rows of a source, in its order: those in `numbers`, or with `others` all but those."""

    base: Source
    numbers: Int64Array | range
    """Numbers of rows in `base`, ascending."""
    selection: Mapping[str, str]
    """A description of what was chosen, for the identity of a run."""
    others: bool = False
    lowest_order: int = OLDEST_ORDER
    """The lowest version of the order that makes this choice."""

    @property
    def label(self) -> str:
        return self.base.label

    @property
    def columnar(self) -> bool:
        return self.base.columnar

    @property
    def order_version(self) -> int:
        return max(self.base.order_version, self.lowest_order)

    @property
    def fingerprints(self) -> Mapping[str, str]:
        return self.base.fingerprints

    @property
    def blocks(self) -> Sequence[int]:
        ends = np.cumsum(np.asarray(self.base.blocks, dtype=np.int64))
        if isinstance(self.numbers, range):
            before = np.clip(ends, self.numbers.start, self.numbers.stop) - self.numbers.start
        else:
            before = np.searchsorted(self.numbers, ends).astype(np.int64)
        kept = np.diff(ends - before if self.others else before, prepend=0)
        return array("Q", kept[kept > 0].tolist())

    def __len__(self) -> int:
        return len(self.base) - len(self.numbers) if self.others else len(self.numbers)

    def where(self, index: int) -> str:
        return self.base.where(self._in_base([index])[0])

    def rows(self, indices: Sequence[int]) -> list[Row | RowError]:
        return self.base.rows(self._in_base(indices))

    def keys(self, what: str) -> Iterator[Any]:
        first = 0
        for keys in self.base.keys(what):
            last = first + len(keys)
            if isinstance(self.numbers, range):
                between = np.arange(
                    max(first, self.numbers.start), max(first, min(last, self.numbers.stop)), dtype=np.int64
                )
            else:
                start, stop = np.searchsorted(self.numbers, [first, last])
                between = self.numbers[start:stop]
            chosen = between - first
            yield np.delete(keys, chosen) if self.others else keys[chosen]
            first = last

    def touch(self) -> None:
        self.base.touch()

    def with_columns(self, columns: Columns) -> Selected:
        return replace(self, base=self.base.with_columns(columns))

    @cached_property
    def _left_before(self) -> Int64Array:
        """How many rows remain before each removed row. Cached: for a million it would take 2 ms for every row."""
        return np.asarray(self.numbers) - np.arange(len(self.numbers))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_left_before"}

    def _in_base(self, indices: Sequence[int]) -> list[int]:
        wanted = np.asarray(indices, dtype=np.int64)
        if isinstance(self.numbers, range):
            found = wanted + self.numbers.start
        elif self.others:
            found = wanted + np.searchsorted(self._left_before, wanted, side="right")
        else:
            found = self.numbers[wanted]
        return [int(number) for number in found]


def some_rows(source: Source, rows: RowsConfig | None) -> Source:
    """Return the rows that a dataset's config asks for. If these are all, the source itself: same data, same run."""
    total = len(source)
    if rows is None or total <= (rows.first or rows.last or rows.limit or 0):
        return source
    if rows.first is not None:
        return Selected(source, range(rows.first), {"rows": f"first {rows.first}"})
    if rows.last is not None:
        return Selected(source, range(total - rows.last, total), {"rows": f"last {rows.last}"})
    assert rows.limit is not None, rows
    return Selected(source, lowest([source], rows.limit, "limit")[0], {"rows": f"limit {rows.limit}"})


def hold_out(
    sources: Sequence[Source], many: int, groups: Sequence[Int64Array] | None = None
) -> list[tuple[Selected, Selected]]:
    """Return, for each source, the rows to train on and those held out: `many` of all sources together.

    `groups`: the group of equal rows of each row (-1: none). The rows of a group are held out together or not at all.
    Without `groups`, equal rows are not kept together.
    """
    chosen, what, order = lowest(sources, many, "held out"), f"{many} rows", OLDEST_ORDER
    if groups is not None and _divides(groups, chosen):
        chosen = _whole_groups(sources, many, groups)
        what, order = f"{what} in whole groups, {digest_of(chosen)}", FOURTH_ORDER
    return [
        (
            Selected(source, numbers, {**source.selection, "held_out": what}, others=True, lowest_order=order),
            Selected(source, numbers, {**source.selection, "only": f"{what} held out"}, lowest_order=order),
        )
        for source, numbers in zip(sources, chosen, strict=True)
    ]


def digest_of(numbers: Sequence[Int64Array]) -> str:
    """Return a digest of these rows of several sources, for the identity of a run."""
    state = xxhash.xxh3_128()
    for each in numbers:
        state.update(np.asarray([len(each), *each], dtype=np.int64).tobytes())
    return state.hexdigest()


def _divides(groups: Sequence[Int64Array], chosen: Sequence[Int64Array]) -> bool:
    """Return whether a row is chosen and an equal one is not."""
    taken = [own[numbers] for own, numbers in zip(groups, chosen, strict=True)]
    left = [np.delete(own, numbers) for own, numbers in zip(groups, chosen, strict=True)]
    both = np.intersect1d(np.concatenate(taken), np.concatenate(left))
    return bool((both >= 0).any())


def _whole_groups(sources: Sequence[Source], many: int, groups: Sequence[Int64Array]) -> list[Int64Array]:
    """Return, for each source, the rows of the groups with the lowest keys: `many` in all, if groups add up to that.

    A row without an equal one is a group of its own, with the row's key. The key of a larger group is derived from the
    lowest key of its rows, but differs from it: otherwise large groups would nearly always be chosen. It does not
    depend on the order of the files.
    """
    of_rows = np.concatenate(list(groups))
    keys = np.concatenate([part for source in sources for part in source.keys("held out")])
    kinds, at, sizes = np.unique(
        np.where(of_rows < 0, -1 - np.arange(len(of_rows)), of_rows), return_inverse=True, return_counts=True
    )
    key_of = np.full(len(kinds), np.iinfo(np.uint64).max, dtype=np.uint64)
    np.minimum.at(key_of, at, keys)
    for kind in np.flatnonzero(sizes > 1).tolist():
        key_of[kind] = mix64(int(key_of[kind]))
    taken: list[int] = []
    held = 0
    for kind in np.lexsort((sizes, key_of)).tolist():
        if held < many and (not taken or held + sizes[kind] <= many):
            taken.append(kind)
            held += int(sizes[kind])
    is_taken = np.zeros(len(kinds), dtype=np.bool_)
    is_taken[taken] = True
    ends = np.cumsum([len(own) for own in groups])
    return [np.flatnonzero(own).astype(np.int64) for own in np.split(is_taken[at], ends[:-1])]


def lowest(sources: Sequence[Source], many: int, what: str) -> list[Int64Array]:
    """Return, for each source, the numbers of the rows with the `many` lowest keys of all sources.

    There are more than `many` if a file occurs twice: its rows have the same keys, and the same rows are chosen in
    both.
    """
    low = np.empty(0, dtype=np.uint64)
    for source in sources:
        for keys in source.keys(what):
            low = np.concatenate([low, keys if len(low) < many else keys[keys <= low.max()]])
            if len(low) > many:
                low = np.partition(low, many - 1)[:many]
    found = []
    for source in sources:
        first, numbers = 0, [np.empty(0, dtype=np.int64)]
        for keys in source.keys(what):
            numbers.append(first + np.flatnonzero(keys <= low.max()))
            first += len(keys)
        found.append(np.concatenate(numbers))
    return found
