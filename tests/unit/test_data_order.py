"""The keyed order: a permutation, uniform enough, and the same for ever."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytune_fsdp.base.random import derive_key, mix64
from raytune_fsdp.data.mixture import (
    FIFTH_ORDER,
    FOURTH_ORDER,
    OLDEST_ORDER,
    ORDER_VERSION,
    THIRD_ORDER,
    Order,
    Permutation,
    order_of,
)


@given(n=st.integers(0, 700), key=st.integers(0, 2**64 - 1))
def test_every_index_comes_once(n: int, key: int) -> None:
    permutation = Permutation(n, key=key)
    assert sorted(permutation(i) for i in range(n)) == list(range(n))


def test_golden_values() -> None:
    # Written down once. If this fails the order of every run changes: raise ORDER_VERSION instead.
    assert (OLDEST_ORDER, THIRD_ORDER, FOURTH_ORDER, FIFTH_ORDER, ORDER_VERSION) == (2, 3, 4, 5, 6)
    assert [mix64(i) for i in (0, 1, 2**64 - 1)] == [0, 0x5692161D100B05E5, 0xB4D055FCF2CBBD7B]
    assert derive_key() == 3244421341483603138
    assert derive_key("rows", 0) == 13192612846567815278
    assert derive_key("windows", 7, 3) == 6999572071694971668
    assert derive_key(1, "1") == 1931706918455103589
    small, odd = Permutation(5, key=42), Permutation(17, key=42)
    assert [small(i) for i in range(5)] == [2, 0, 1, 4, 3]
    assert [odd(i) for i in range(8)] == [5, 4, 11, 2, 14, 16, 1, 7]
    huge = Permutation(10**12, key=derive_key("rows", 0))
    assert [huge(i) for i in range(4)] == [771420172054, 340792707305, 997069667028, 34837661191]


def test_all_orders_of_three_are_equally_likely() -> None:
    orders = Counter(tuple(Permutation(3, key=derive_key(k))(i) for i in range(3)) for k in range(3000))
    # 500 each, standard deviation 20; the keys are fixed, so this cannot flake.
    assert len(orders) == 6 and all(abs(count - 500) < 100 for count in orders.values())


def test_parts_of_a_key_do_not_run_together() -> None:
    parts = [(1, 23), (12, 3), ("1", 23), ("12", "3"), ("1", "23"), (123,), ("123",), ("", "123"), (-123,)]
    assert len({derive_key(*p) for p in parts}) == len(parts)


@pytest.mark.parametrize("index", [-1, 10])
def test_outside_of_the_range(index: int) -> None:
    with pytest.raises(IndexError, match=rf"{index} is not in range\(10\)"):
        Permutation(10, key=1)(index)


def test_what_a_run_gains_is_read_by_the_newest_version_of_its_beginning() -> None:
    for begun_with, newest, rules, versions in (
        (None, None, 6, [2, 3, 4]),  # a new run: the lowest that gives its rows
        (2, None, 2, [2, 2, 2]),  # of an older tree, which did not say what it knew
        (2, 3, 3, [2, 3, 3]),
        (2, 4, 4, [2, 3, 4]),
        (3, 4, 4, [3, 3, 4]),  # what it had then may need less than the run as a whole
        (4, 3, 4, [4, 4, 4]),
        (99, 4, 6, [2, 3, 4]),  # one that there is not here: refused by its identity
    ):
        order = Order.of(begun_with, newest)
        assert (order.rules, [order.version(lowest) for lowest in (2, 3, 4)]) == (rules, versions), (begun_with, newest)


@pytest.mark.parametrize("version", ["4", 3.0, True, None, [2], 1, 7, 10**30])
def test_a_version_that_a_checkpoint_may_not_name_is_none(version: Any) -> None:
    assert order_of(version) == ORDER_VERSION
