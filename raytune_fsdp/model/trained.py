"""Which weights of a network are trained, by `method`."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from transformers import PreTrainedModel

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config.sections.method import AdapterMethod, FreezeMethod, LoraMethod, Method
from raytune_fsdp.model.adapters.attach import attach
from raytune_fsdp.model.added_rows import train_rows


def choose_trained(network: PreTrainedModel, method: Method, added: Collection[int] = ()) -> None:
    """Freeze what the method does not train, and add what it trains beside. The network is on the meta device.

    `added`: the ids of new tokens.
    """
    if isinstance(method, FreezeMethod):
        freeze(network, method.trained)
    elif isinstance(method, AdapterMethod):
        attach(network, method)
        if added and isinstance(method, LoraMethod) and method.train_added_tokens:
            train_rows(network, added)


def freeze(network: PreTrainedModel, trained: Sequence[str]) -> None:
    """Train only the weights in whose names one of these expressions is found. A tied weight has all of its names."""
    names: dict[int, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    every = [name for found in names.values() for name in found]
    for expression in trained:
        if not any(re.search(expression, name) for name in every):
            # One name of each kind: a network has hundreds that differ in a number.
            kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".0.", name) for name in every)
            raise ConfigError(
                f"method.trained: {expression!r} is found in the name of no weight of a {type(network).__name__}; they "
                f"are called {', '.join(list(kinds)[:12])}"
            )
    for parameter in network.parameters():
        parameter.requires_grad_(any(re.search(each, name) for each in trained for name in names[id(parameter)]))
