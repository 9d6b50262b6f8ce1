"""Find random draws in training, apart from dropout that ranks can cut.

Ranks that share samples draw for the whole micro-batch and keep their part, in every `nn.Dropout` (`sequence.py`). A
function that the network's own code calls, `F.dropout` on hidden states or a router's noise, would draw only for the
part.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig

_RATES = re.compile("drop|noise|jitter")

_OF_ATTENTION = re.compile("att")


@contextmanager
def draws_of(model: nn.Module, tokens: int) -> Iterator[list[str]]:
    """Collect the draws in this context that cannot be cut: which operation, in which module.

    All forward passes in the context are over one row of `tokens` tokens.
    """
    seen = _Draws(tokens)
    hooks = [
        hook
        for module in model.modules()
        for hook in (
            module.register_forward_pre_hook(lambda module, given: seen.inside.append((module, given))),
            module.register_forward_hook(lambda *_: seen.leave(), always_call=True),
        )
    ]
    try:
        with seen:
            yield seen.found
    finally:
        for hook in hooks:
            hook.remove()


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tokens = tokens
        self.inside: list[tuple[nn.Module, Sequence[Any]]] = []
        self.found: list[str] = []

    def leave(self) -> None:
        self.inside.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            sizes = [each.numel() for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]
            # All members have the same seed, so a single number (such as whether a layer is skipped) is the same on
            # all of them.
            if max(sizes, default=0) > 1 and not self._can_be_cut():
                where = type(self.inside[-1][0]).__name__ if self.inside else "its code"
                self.found.append(f"{func._schema.name.partition('::')[2].rstrip('_')} in {where}")
        return result

    def _can_be_cut(self) -> bool:
        if not self.inside or type(self.inside[-1][0]) is not nn.Dropout:
            return False
        (given, *_) = self.inside[-1][1] or (None,)
        # Numbers are drawn in the order of memory, so a part of the memory is a part of what is drawn.
        return isinstance(given, torch.Tensor) and given.shape[-2:-1] == (self.tokens,) and given.is_contiguous()


def rates_of(config: PretrainedConfig, *, attention: bool) -> dict[str, float]:
    """Return the rates in a config that are not zero: those of attention dropout, or those of all other draws."""
    return {
        name: value
        for name, value in vars(config.get_text_config()).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        if _RATES.search(name) and bool(_OF_ATTENTION.search(name)) is attention
    }
