"""Tensors of constants, made once in a process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec

import torch
from torch.utils._python_dispatch import _disable_current_modes

P = ParamSpec("P")


def constant_table(make: Callable[P, torch.Tensor]) -> Callable[P, torch.Tensor]:
    """Cache what `make` returns, by its arguments, and make it real. In a compiled graph it is a constant.

    If the first caller works on fake tensors (the planner does), later callers in the process would get a fake one.
    """

    @cache
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        with _disable_current_modes():
            return make(*args, **kwargs)

    @wraps(make)
    def table(*args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
        return made(*args, **kwargs)  # type: ignore[arg-type]

    # The compiler calls it while it makes a graph, and does not follow what it does: that would break the graph.
    return torch.compiler.assume_constant_result(table)  # type: ignore[no-any-return, no-untyped-call]
