"""A network's repeated layers: which modules they are, and how their forward pass runs in training.

In training a layer may be computed again in backward instead of being kept (activation checkpointing), what it keeps
may wait in the host's memory, and it may be compiled. All of that is inside the layer's own forward, so FSDP's hooks
are outside of it: nothing is gathered twice, and a graph has no collectives. In evaluation a layer runs as transformers
made it: texts of every length would be compiled one by one, and use up the limit that training needs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from raytune_fsdp.base.errors import ModelError
from raytune_fsdp.model.compile_layers import Compiler, Forward
from raytune_fsdp.model.offload_activations import Offload


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated layers, outermost only: the units of sharding, activation checkpointing and compilation.

    No two of them hold the same weight: FSDP gathers and frees a unit on its own.
    """
    names = set(model._no_split_modules or ())
    found = list(_outermost(model, names))
    if found:
        # Zamba uses one attention module in many layers. The unit is then the rest of such a layer (its Mamba module);
        # what the layers share belongs to the root, and stays gathered from forward to backward.
        shared = _shared(found)
        return list(_outermost(model, names, shared)) if shared else found
    # A model that brings its own code may name none. The list with the most weights is then its decoder.
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        raise ModelError(
            f"model: {type(model).__name__} names no layers (_no_split_modules) and has no list of them: "
            "it cannot be sharded layer by layer; train one that has at least one layer"
        )
    largest = max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()))
    return [layer for layer in largest if not _holds(layer, _shared(list(largest)))]


def ends_of(model: PreTrainedModel) -> tuple[tuple[nn.Module, ...], tuple[nn.Module, ...]]:
    """Return the embedding, and the modules after the layers: the last norm and the head."""
    modules = list(model.modules())
    places = {id(module): place for place, module in enumerate(modules)}
    last = max(places[id(module)] for layer in layers_of(model) for module in layer.modules())
    first, head = model.get_input_embeddings(), model.get_output_embeddings()
    inside = {*first.modules()}  # an embedding may have another one inside, and may come after the layers
    behind = [m for m in modules[last + 1 :] if any(True for _ in m.parameters(recurse=False)) and m not in inside]
    return (first,), (*(m for m in behind if m is not head), head)


def _outermost(module: nn.Module, class_names: set[str], shared: frozenset[int] = frozenset()) -> Iterator[nn.Module]:
    """Yield the outermost modules of these classes that hold none of the `shared` parameters (by their ids)."""
    for child in module.children():
        if type(child).__name__ in class_names and not _holds(child, shared):
            yield child
        else:
            yield from _outermost(child, class_names, shared)


def _shared(layers: Sequence[nn.Module]) -> frozenset[int]:
    """Return the ids of the parameters that more than one of the layers holds."""
    holders = Counter(id(parameter) for layer in layers for parameter in layer.parameters())
    return frozenset(key for key, count in holders.items() if count > 1)


def _holds(layer: nn.Module, parameters: frozenset[int]) -> bool:
    return bool(parameters) and any(id(parameter) in parameters for parameter in layer.parameters())


# --- In training ------------------------------------------------------------------------------------------------------


def set_training_forward(
    model: PreTrainedModel,
    *,
    recompute: str = "none",
    every: int | None = None,
    offload: Offload | None = None,
    compiler: Compiler | None = None,
) -> None:
    """Give the layers of a network the forward pass that they have in training.

    `recompute` is what they compute again in backward, with the same random numbers. `none`: nothing. `full`:
    everything, from their inputs. `every_n`: everything, in one layer out of `every`. `selective`: everything but the
    results of attention and of large products, those of experts included.
    """
    biased = recompute == "selective" and any(_has_biased_experts(module) for module in model.modules())
    again, once = _experts_and_in_part_again if biased else _RECOMPUTE[recompute], _plain
    if compiler is not None:  # around what is computed again, so that the graph can fuse it
        again, once = compiler.compiled(again), compiler.compiled(once)
        compiler.watch(model)
    for number, layer in enumerate(layers_of(model)):
        forward = again if number % (every or 1) == 0 else once
        if compiler is not None and any(parameter.requires_grad for parameter in layer.parameters()):
            forward = partial(_needing_gradient, forward)
        if offload is not None:
            forward = partial(_offloaded, offload, number, forward)
        if forward is not _plain:
            layer.forward = partial(_in_training, forward, layer)


def _in_training(forward: Forward, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return (forward if layer.training else _plain)(layer, *args, **kwargs)


def _needing_gradient(forward: Forward, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Have a gradient of the input computed, also where nobody needs it.

    With adapters the first layer gets its input from a frozen embedding. An input without a gradient is of another kind
    to the compiler, which would make graphs for this layer alone. By count the gradient takes 0.2 % of an 8B's step.
    """
    if torch.is_grad_enabled() and args and not args[0].requires_grad:
        # Not a leaf of the graph of gradients: a layer may write to its input, and to a leaf it may not.
        args = args[0].detach().requires_grad_().clone(), *args[1:]
    return forward(layer, *args, **kwargs)


def _offloaded(offload: Offload, number: int, forward: Forward, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with offload.of(number, layer):
        return forward(layer, *args, **kwargs)


def _plain(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward pass of the layer's class."""
    return type(layer).forward(layer, *args, **kwargs)


def _again(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(partial(_plain, layer), *args, use_reentrant=False, **kwargs)


def _in_part_again(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    contexts = partial(create_selective_checkpoint_contexts, _keeps)
    return checkpoint(partial(_plain, layer), *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _experts_and_in_part_again(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    contexts = partial(create_selective_checkpoint_contexts, _keeps_but_experts)
    return checkpoint(partial(_plain, layer), *args, use_reentrant=False, context_fn=contexts, **kwargs)


_RECOMPUTE: dict[str, Forward] = {"none": _plain, "full": _again, "every_n": _again, "selective": _in_part_again}


def _has_biased_experts(module: nn.Module) -> bool:
    own = dict(module.named_parameters(recurse=False))
    return any(weight.dim() == 3 for weight in own.values()) and any("bias" in name for name in own)


_MOST_RANK = 256
"""Largest inner size of a product that counts as an adapter's, if the result is far wider."""

_PRODUCTS = ("aten::mm", "aten::addmm")

_OF_EXPERTS = "aten::_grouped_mm"
"""The operation with which transformers computes the products of all experts, in 16 bits on a GPU."""

_ATTENTION = re.compile("attention|attn|sdpa")


def _keeps(_: object, operation: torch._ops.OpOverload, *args: Any, **__: Any) -> CheckpointPolicy:
    """Keep results that took long for their size: those of attention, of products that do not narrow, and of experts.

    A product that narrows is the last one of a layer, whose result nothing needs in backward: it is neither kept nor
    computed again. An adapter's second product has a result as large as a linear layer's, and costs next to nothing: it
    is not kept. The products of experts are all needed, the last one for the gradient of its share in the sum. Batched
    products are the scores of eager attention, the largest tensors of all: they are not kept.
    """
    name: str = operation.name().partition(".")[0]  # type: ignore[no-untyped-call]
    if name in _PRODUCTS:
        weight = args[2 if name == "aten::addmm" else 1]
        inner, outer = weight.shape[-2], weight.shape[-1]
        kept = inner <= outer and not (inner <= _MOST_RANK and outer >= 8 * inner)
    else:
        kept = name == _OF_EXPERTS or _ATTENTION.search(name) is not None
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _keeps_but_experts(_: object, operation: torch._ops.OpOverload, *args: Any, **__: Any) -> CheckpointPolicy:
    """Keep no products of experts that have a bias (gpt-oss): it is added in place, which a kept tensor forbids."""
    if operation.name().startswith(_OF_EXPERTS):  # type: ignore[no-untyped-call]
        return CheckpointPolicy.PREFER_RECOMPUTE
    return _keeps(_, operation, *args)
