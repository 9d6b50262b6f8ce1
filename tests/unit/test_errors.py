"""An error as part of another message."""

from __future__ import annotations

import pytest

from raytune_fsdp.base.errors import ConfigError, first_line, in_one_line


@pytest.mark.parametrize(
    ("error", "line", "first"),
    [
        (KeyError("weight_map"), "KeyError: 'weight_map'", "'weight_map'"),
        (ValueError("first\nsecond"), "ValueError: first", "first"),
        (RuntimeError(), "RuntimeError", "RuntimeError"),
        (OSError(28, "No space left", "file"), "[Errno 28] No space left: 'file'", "[Errno 28] No space left: 'file'"),
        (OSError("no route"), "OSError: no route", "no route"),
        (ConfigError("a=1: wrong\nb=2: wrong"), "a=1: wrong b=2: wrong", "a=1: wrong"),
        (ValueError("x" * 600), "ValueError: " + "x" * 500, "x" * 600),
    ],
)
def test_an_error_in_one_line(error: Exception, line: str, first: str) -> None:
    assert in_one_line(error) == line
    assert first_line(error) == first
