"""What counts of an answer, and which answers are the same."""

from __future__ import annotations

import time

import pytest

from raytune_fsdp.base.answers_alike import TooSlowError, find, same


@pytest.mark.parametrize(
    ("text", "what", "found"),
    [
        ("She has 3 + 4 = 7 apples.\n#### 1,234", "number", "1,234"),
        ("It is -3.5.", "number", "-3.5"),
        ("5-3", "number", "3"),
        ("$.50 or 50%", "number", "50"),
        ("none", "number", None),
        (r"so \boxed{1}, no, \boxed{\frac{1}{2}}.", "boxed", r"\frac{1}{2}"),
        (r"so \boxed 7.", "boxed", "7"),
        (r"so \boxed{\frac{1}{2", "boxed", None),
        ("so 7", "boxed", None),
        ("Answer: 3\nAnswer: (B)", "Answer: (.*)", "(B)"),
        ("3", "Answer: (.*)", None),
        ("Answer: 9" + " and so on" * 10_000, "number", None),  # only its end is looked at
    ],
)
def test_what_counts(text: str, what: str, found: str | None) -> None:
    assert (find(text, "regex", what) if "(" in what else find(text, what)) == found


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        ("1,234.50", "1234.5", True),
        ("-0.5", "-.5", True),
        ("50%", r"50\%", True),
        (r"\dfrac{1}{2}", r"\frac12", False),
        (r"\dfrac {1}{2}", r"$\frac{1}{2}$", True),
        (r"\text{ Paris}", "Paris.", True),
        (r"\left( 1,2 \right)", "(1,2)", True),
        ("Paris", "paris", False),
        ("1e3", "1000", True),
        ("nan", "NaN", False),
        ("12", "13", False),
    ],
)
def test_which_are_the_same(left: str, right: str, equal: bool) -> None:
    assert same(left, right) is equal


def test_an_expression_that_would_take_years_takes_a_second() -> None:
    begin = time.monotonic()
    with pytest.raises(TooSlowError):
        find("a" * 60 + "!", "regex", r"((?:a|aa)+)$")
    assert time.monotonic() - begin < 10
