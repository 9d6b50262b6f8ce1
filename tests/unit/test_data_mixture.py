"""Every row as often as its weight says, evenly spread, found in microseconds."""

from __future__ import annotations

import pickle
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytune_fsdp.base.batch import Cursor
from raytune_fsdp.config.sections.data import DataConfig
from raytune_fsdp.data.batches import rank_batches
from raytune_fsdp.data.mixture import Interleaving, Mixture, Shuffle, weights_of
from raytune_fsdp.data.sources.opening import open_source
from raytune_fsdp.data.sources.selection import Selected
from raytune_fsdp.data.stream import Stream
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.plan.division import Division
from tests.rows import demo_tokenizer, token_rows

COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any)


@given(COUNTS)
def test_interleaving_has_every_entry_once_in_order_and_evenly(counts: list[int]) -> None:
    order = Interleaving(counts)
    entries = list(order.walk(0, order.total))
    for dataset, count in enumerate(counts):
        assert [entry for d, entry in entries if d == dataset] == list(range(count))
    total = sum(counts)
    for dataset, count in enumerate(counts):
        seen = 0
        for place, (d, _) in enumerate(entries, start=1):
            seen += d == dataset
            # Never further from its even share than one entry for each dataset it waits for.
            assert abs(seen - Fraction(place * count, total)) <= len(counts) / 2 + 0.5


@given(COUNTS, st.data())
def test_interleaving_is_the_same_from_wherever_it_is_entered(counts: list[int], data: st.DataObject) -> None:
    order = Interleaving(counts)
    entries = list(order.walk(0, order.total))
    first = data.draw(st.integers(0, order.total))
    last = data.draw(st.integers(first, order.total + 3))
    assert list(order.walk(first, last)) == entries[first:last]
    assert [next(order.walk(place, place + 1)) for place in range(order.total)] == entries


SIZES = st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=60)
@given(SIZES, st.data(), st.sampled_from(["rows", "blocks", "none"]), st.integers(0, 3))
def test_every_row_is_seen_as_often_as_its_weight_says(
    blocks: list[list[int]], data: st.DataObject, shuffle: str, seed: int
) -> None:
    weights = [data.draw(st.sampled_from([0, 0.25, 0.3, 1, 1.5, 3])) for _ in blocks]
    if not any(weights):
        weights[0] = 1
    exact = weights_of(weights, [None] * len(blocks), [sum(sizes) for sizes in blocks])
    mixture = Mixture(blocks, exact, shuffle=shuffle, seed=seed)  # type: ignore[arg-type]
    epochs = 4
    seen = Counter(pair for epoch in range(epochs) for pair in mixture.rows(epoch, 0, mixture.length(epoch)))
    for dataset, sizes in enumerate(blocks):
        want = exact[dataset] * epochs
        for row in range(sum(sizes)):
            assert seen[dataset, row] in (want.__floor__(), want.__ceil__())
        assert sum(seen[dataset, row] for row in range(sum(sizes))) == (want * sum(sizes)).__ceil__()
    assert sum(seen.values()) == sum(map(mixture.length, range(epochs)))
    if mixture.repeats:
        once = Counter(mixture.rows(0, 0, mixture.length(0)))
        assert once == {(d, r): weights[d] for d, s in enumerate(blocks) for r in range(sum(s)) if weights[d]}


@settings(max_examples=30)
@given(SIZES, st.data())
def test_rows_of_any_part_of_an_epoch(blocks: list[list[int]], data: st.DataObject) -> None:
    weights = [Fraction(3, 2)] * len(blocks)
    mixture = Mixture(blocks, weights, shuffle="rows", seed=1)
    whole = list(mixture.rows(1, 0, mixture.length(1)))
    first = data.draw(st.integers(0, len(whole)))
    again = pickle.loads(pickle.dumps(mixture))
    assert list(again.rows(1, first, first + 5)) == whole[first : first + 5]
    assert [next(again.rows(1, place, place + 1)) for place in range(len(whole))] == whole


def test_blocks_stay_together() -> None:
    mixture = Mixture([[50, 10, 40]], [Fraction(1)], shuffle="blocks", seed=5)
    rows = [row for _, row in mixture.rows(0, 0, 100)]
    block_of = [0 if row < 50 else 1 if row < 60 else 2 for row in rows]
    assert sum(a != b for a, b in zip(block_of, block_of[1:], strict=False)) == 2
    assert rows != sorted(rows)


def test_shares_are_fractions_of_the_rows() -> None:
    weights = weights_of([None, None], [0.25, 0.75], [900, 100])
    assert weights == (Fraction(250, 900), Fraction(750, 100))
    mixture = Mixture([[900], [100]], weights, shuffle="rows", seed=0)
    counts = Counter(dataset for dataset, _ in mixture.rows(0, 0, mixture.length(0)))
    assert counts == {0: 250, 1: 750}
    assert weights_of([None] * 3, [0.3333333333] * 3, [10, 10, 10]) == (Fraction(1),) * 3


def test_ten_million_rows_are_looked_up_in_microseconds() -> None:
    mixture = Mixture([[7_000_000], [2_000_000], [1_000_000]], [Fraction(1)] * 3, shuffle="rows", seed=0)
    next(mixture.rows(0, 0, 1))
    start = time.process_time()
    for place in range(0, 10_000_000, 10_000):
        next(mixture.rows(0, place, place + 1))
    # 60 µs on a quiet machine; a list of ten million rows would take seconds.
    assert (time.process_time() - start) / 1000 < 2e-3


def test_thousands_of_datasets_cost_little_at_every_call() -> None:
    """A stream asks for the length of an epoch several times a window, and for the rows of a window once."""
    draw = random.Random(0)
    rows = [draw.randint(50, 4000) for _ in range(2000)]
    weights = weights_of([draw.choice([0.3, 0.5, 1, 1.5, 2]) for _ in rows], [None] * 2000, rows)
    mixture = Mixture([[count] for count in rows], weights, shuffle="rows", seed=0)
    middle = mixture.length(0) // 2
    list(mixture.rows(0, middle, middle + 1))

    def seconds(work: Callable[[int], object], times: int) -> float:
        start = time.process_time()
        for number in range(times):
            work(number)
        return time.process_time() - start

    # 0.01 and 7 ms on a quiet machine; with fractions, and a look at all datasets for each step, 11 and 175.
    assert seconds(lambda i: mixture.length(i % 3), 100) < 0.1
    assert seconds(lambda i: next(mixture.rows(0, middle + i, middle + i + 1)), 10) < 0.5


@pytest.mark.slow
def test_a_step_of_thousands_of_datasets_makes_few_calls_more(tmp_path: Path) -> None:
    """Windows are in the cache; what a rank does for a step, but for what it does with a single dataset."""
    one = token_rows(tmp_path, [8] * 4000, first_id=0).model_copy(update={"name": "d0"})
    data = DataConfig.model_validate({"train": [one], "seq_len": 64, "window": 1024})
    source = open_source(one, cache=tmp_path / "cache", in_place=False)
    division = Division(total_samples=None, global_batch=8, micro_batch=4, data_ranks=1)

    def calls(many: int) -> float:
        """Of functions, for a step: unlike a time, they are the same on a busy machine."""
        named = [one.model_copy(update={"name": f"d{number}", "weight": 1.5}) for number in range(many)]
        each = 4000 // many
        parts = [Selected(source, range(each * number, each * (number + 1)), {}) for number in range(many)]
        windows = Windows(
            named, data, seed=5, tokenizer=demo_tokenizer(), vocab_size=4000, cache=tmp_path / "cache", sources=parts
        )
        for _ in range(2):  # the first one builds the windows
            windows.forget()
            batches = rank_batches(Stream(windows, seed=5), division, range(1, 61), cursor=Cursor(), data_rank=0)
            made = 0

            def count(frame: object, event: str, argument: object) -> None:
                nonlocal made
                made += event in ("call", "c_call")

            sys.setprofile(count)
            try:
                assert len(list(batches)) == 60
            finally:
                sys.setprofile(None)
        return made / 60

    # 2,798 more; 11,661 where an epoch's length adds up fractions of all datasets at every look.
    assert calls(2000) - calls(1) < 5000


@settings(max_examples=40)
@given(SIZES, st.data(), st.integers(0, 5))
def test_an_epoch_begins_where_the_one_before_ends(blocks: list[list[int]], data: st.DataObject, epoch: int) -> None:
    """By exact fractions."""
    weights = [data.draw(st.fractions(0, 3, max_denominator=30)) for _ in blocks]
    mixture = Mixture(blocks, weights, shuffle="none", seed=1)
    starts = [[(e * w * sum(b)).__ceil__() for w, b in zip(weights, blocks, strict=True)] for e in (epoch, epoch + 1)]
    assert mixture.length(epoch) == sum(starts[1]) - sum(starts[0])
    seen: dict[int, list[int]] = {}
    for dataset, row in mixture.rows(epoch, 0, mixture.length(epoch)):
        seen.setdefault(dataset, []).append(row)
    assert seen == {
        d: [entry % sum(sizes) for entry in range(starts[0][d], starts[1][d])]
        for d, sizes in enumerate(blocks)
        if starts[0][d] < starts[1][d]
    }


def test_golden_values() -> None:
    # Written down once. If this fails the order of every run changes: raise ORDER_VERSION instead.
    def rows(shuffle: Shuffle, epoch: int) -> list[tuple[int, int]]:
        return list(Mixture([[3, 4], [5]], [Fraction(3, 2), Fraction(1)], shuffle=shuffle, seed=7).rows(epoch, 0, 6))

    assert rows("rows", 0) == [(0, 2), (1, 1), (0, 1), (0, 4), (1, 3), (0, 6)]
    assert rows("rows", 1) == [(0, 1), (1, 0), (0, 4), (0, 6), (1, 2), (0, 0)]
    assert rows("blocks", 0) == [(0, 4), (1, 4), (0, 6), (0, 3), (1, 3), (0, 5)]
    assert rows("blocks", 1) == [(0, 2), (1, 3), (0, 0), (0, 1), (1, 0), (0, 0)]
