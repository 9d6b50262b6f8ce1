"""Find a network's state mixers by trying: modules that mix tokens without attention.

The small network of the trials computes one text. Then each module of a layer computes what it was given once more, in
two halves. What is another result in the second half looks back at earlier tokens. Attention does so, too: it is known
by the mask of pairs that it is given. What is found is only a guess: `needs.py` then compares packed documents with
each alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from raytune_fsdp.model.attention.choose import KernelChoice
from raytune_fsdp.model.attention.mixers import BY_DOCUMENT, split_mixers
from raytune_fsdp.model.layers import layers_of

_LENGTH = 12

_BOUND = 5e-5
"""The largest difference, relative to the largest result, that is rounding in fp32."""

_Call = tuple[tuple[Any, ...], dict[str, Any], Any]
"""What a module was called with, and what it returned."""


def choose_mixers(model: PreTrainedModel, names: tuple[str, ...]) -> KernelChoice:
    """Split a network's mixers of these classes; return what they are called with, and why."""
    split_mixers(model, names)
    return KernelChoice(name=BY_DOCUMENT, why=f"{', '.join(names)} would run on from one document to the next")


@torch.no_grad()
def find_mixers(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of the classes of a small network's state mixers. Leaves it with eager attention."""
    calls: dict[nn.Module, _Call] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        calls.setdefault(module, (args, kwargs, result))

    layers = layers_of(model)
    hooks = [module.register_forward_hook(note, with_kwargs=True) for layer in layers for module in layer.modules()]
    model.set_attn_implementation("eager")
    ids = (torch.arange(_LENGTH) % model.config.get_text_config().vocab_size)[None]
    try:
        model.eval()(input_ids=ids, position_ids=torch.arange(_LENGTH)[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    found = {type(each) for layer in layers for each in _mixers(layer, calls)}
    # A layer of Zamba may be inside of another layer: its mixer is enough.
    around = {
        type(module) for module in model.modules()
        if type(module) in found and any(type(each) in found for each in module.modules() if each is not module)
    }  # fmt: skip
    return tuple(sorted(kind.__name__ for kind in found - around))


def _mixers(module: nn.Module, calls: dict[nn.Module, _Call]) -> Iterator[nn.Module]:
    """Yield the outermost state mixers inside of a module."""
    for child in module.children():
        if child not in calls or any(_attends(calls[each]) for each in child.modules() if each in calls):
            yield from _mixers(child, calls)
        elif _looks_back(child, calls[child]):
            yield child


def _attends(call: _Call) -> bool:
    return any(each.ndim == 4 and each.shape[-2:] == (_LENGTH, _LENGTH) for each in _tensors(call[:2]))


def _looks_back(module: nn.Module, call: _Call) -> bool:
    args, kwargs, result = call
    if not all(each.shape[:2] == (1, _LENGTH) for each in [*_tensors((args, kwargs))[:1], *_tensors(result)]):
        return False
    half = _LENGTH // 2
    args, kwargs = pytree.tree_map(
        lambda each: each[:, half:] if isinstance(each, torch.Tensor) and each.shape[:2] == (1, _LENGTH) else each,
        (args, kwargs),
    )
    alone = type(module).forward(module, *args, **kwargs)
    pairs = zip(_tensors(result), _tensors(alone), strict=True)
    return any(bool((whole[:, half:] - own).abs().max() > _BOUND * whole.abs().max()) for whole, own in pairs)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(values) if isinstance(each, torch.Tensor)]
