"""Tensors of constants, made once in a process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

P = ParamSpec("P")


def constant_table(make: Callable[P, torch.Tensor]) -> Callable[P, torch.Tensor]:
    """Cache what `make` returns, by its arguments, and make it real.

    If the first caller works on fake tensors (the planner does), later callers in the process would get a fake one.
    """

    @wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
        with _disable_current_modes():
            return make(*args, **kwargs)

    return cast(Callable[P, torch.Tensor], cache(made))
