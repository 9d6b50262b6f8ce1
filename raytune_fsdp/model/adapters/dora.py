"""PEFT's DoRA, as torch.compile can follow it.

PEFT asks how a weight is quantized by the name of its type's module, which the compiler cannot follow: it made several
graphs of each layer. Here nothing needs to be asked.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn


def make_traceable(network: nn.Module) -> None:
    """Give the DoRA of linear layers a class that computes the same, and that the compiler can follow."""
    from peft.tuners.lora.dora import DoraLinearLayer

    for module in network.modules():
        if type(module) is DoraLinearLayer:
            module.__class__ = _layer_class()  # type: ignore[assignment]


@cache
def _layer_class() -> type[nn.Module]:
    from peft.tuners.lora.dora import DoraLinearLayer

    class TraceableDora(DoraLinearLayer):  # type: ignore[misc]
        def forward(self, x: torch.Tensor, *, base_layer: nn.Module, **others: Any) -> torch.Tensor:
            result: torch.Tensor = super().forward(x, base_layer=_Dequantizable(base_layer), **others)  # type: ignore[no-untyped-call]
            return result

        def _cache_clear(self) -> None:
            if self._dora_cache:  # a layer that is computed again may change nothing else, not even what is empty
                super()._cache_clear()  # type: ignore[no-untyped-call]

    return TraceableDora


class _Dequantizable:
    """A layer that answers PEFT's first question, so that no other is asked."""

    W_q = None

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.bias = layer.bias

    def dequantize(self) -> torch.Tensor:
        weight: torch.Tensor = self._layer.weight
        return weight
