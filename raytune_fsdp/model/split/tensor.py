"""Have several ranks compute layers together, each with a part of every weight (`parallel.mesh.tensor`).

For an architecture transformers says which linear layers are cut by columns and which by rows (`base_model_tp_plan`): a
rank then has some of the heads and some of the columns of an MLP, and the ranks' results are added up after the
attention and after the MLP (Megatron-LM, arXiv:1909.08053). In a mixture of experts a rank has some experts. Embedding
and head, which transformers' plans leave whole, are cut by tokens of the vocabulary, so no rank has all logits.

A weight is a DTensor that says what is cut, so that sharding, checkpoints and optimizers know where a piece belongs.
The computation uses plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from raytune_fsdp.model.added_rows import EmbeddingWithRows
from raytune_fsdp.model.objective.chunked_head import LossHead
from raytune_fsdp.model.pieces.pieces import range_of
from raytune_fsdp.model.pieces.sums import local_weight, sum_gradients, sum_results
from raytune_fsdp.model.pieces.vocabulary import VocabularyPart
from raytune_fsdp.model.split.cuts import BY_COLUMNS, BY_ROWS, EXPERTS, SUMMED, holders_of, styles_of
from raytune_fsdp.model.split.dropout import DropoutInParts


@torch.no_grad()
def split_layers(network: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Cut every layer to this rank's part. The network is whole, and its loss is chunked."""
    styles = styles_of(network)
    cutter = _Cutter(mesh)
    for module, style in _layers(network, styles):
        cutter.apply(module, style)
    for name in (name for name, style in styles.items() if style == BY_ROWS):
        cutter.dropouts(network.get_submodule(name))
    for module in holders_of(network, styles).values():
        module.register_forward_pre_hook(partial(_sum_gradients_of_input, cutter.group), with_kwargs=True)
    cutter.ends(network)


def _layers(network: PreTrainedModel, styles: Mapping[str, str]) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules with weights, and how these are cut. For PEFT's modules, yield what they wrap and add."""
    for name, style in styles.items():
        module = network.get_submodule(name)
        if style not in (BY_COLUMNS, BY_ROWS) or isinstance(module, nn.Linear):
            yield module, style
            continue
        yield module.get_submodule("base_layer"), style
        for first, second in zip(module.lora_A.values(), module.lora_B.values(), strict=True):  # type: ignore[operator, union-attr]
            if style == BY_COLUMNS:
                # Every rank computes all of A, and gets from B the gradients of its own columns only.
                yield first, SUMMED
                yield second, style
            else:
                yield first, style


def _sum_gradients_of_input(
    group: ProcessGroup, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (*sum_gradients(group, args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": sum_gradients(group, kwargs["hidden_states"])[0]}


class _Cutter:
    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh, self.group = mesh, mesh.get_group()
        self._rank, self._size = mesh.get_local_rank(), mesh.size()
        self._made: dict[int, nn.Parameter] = {}
        """This rank's parts, by the id of the whole weight: tied weights stay tied."""

    def apply(self, module: nn.Module, style: str) -> None:
        if style == EXPERTS:
            self._experts(module)
        elif style == SUMMED:
            module.forward = partial(_with_parameters, module, self._summed, module.forward)
        else:
            self._linear(module, style)  # type: ignore[arg-type]

    def _linear(self, module: nn.Linear, style: str) -> None:
        by_columns = style == BY_COLUMNS
        self._part(module, "weight", 0 if by_columns else 1)
        if by_columns and module.bias is not None:
            self._part(module, "bias", 0)
        module.forward = partial(_by_columns, module) if by_columns else partial(_by_rows, module, self.group)  # type: ignore[method-assign]

    def dropouts(self, module: nn.Module) -> None:
        """Replace PEFT's dropouts on an input of which this rank has some columns."""
        for key, dropout in getattr(module, "lora_dropout", nn.ModuleDict()).items():
            if type(dropout) is nn.Dropout:
                part = DropoutInParts(dropout.p, columns=(self._rank, self._size))
                module.lora_dropout[key] = part.train(dropout.training)  # type: ignore[operator, index, assignment]

    def _experts(self, module: nn.Module) -> None:
        for name in module._parameters:
            self._part(module, name, 0)
        first, many = self._range(module.num_experts)  # type: ignore[arg-type]
        module.num_experts = many  # type: ignore[assignment]
        if hasattr(module, "_is_expert_parallel"):
            module._is_expert_parallel = True  # type: ignore[assignment]
        module.forward = partial(_some_experts, module, self.group, first, module.forward)

    def ends(self, network: PreTrainedModel) -> None:
        """Cut embedding and head by tokens."""
        embedding, head = network.get_input_embeddings(), network.get_output_embeddings()
        assert isinstance(head, LossHead)
        if isinstance(embedding, EmbeddingWithRows):
            embedding = embedding.base_layer
        rows = [embedding.weight.shape[0], head.weight.shape[0]]
        for module in (embedding, head):
            self._part(module, "weight", 0)
        if head.bias is not None:
            self._part(head, "bias", 0)
        of_embedding, head.vocabulary = (
            VocabularyPart(group=self.group, first=self._range(count)[0], rows=self._range(count)[1], whole=count)
            for count in rows
        )
        embedding.forward = partial(_embed, embedding, of_embedding)

    def _range(self, size: int) -> tuple[int, int]:
        """Return where this rank's part begins, and how long it is."""
        start, stop = range_of(size, self._size, self._rank)
        return start, stop - start

    def _part(self, module: nn.Module, name: str, axis: int) -> None:
        whole = module._parameters[name]
        assert whole is not None
        if id(whole) not in self._made:
            mine = whole.detach().narrow(axis, *self._range(whole.shape[axis])).clone()
            tensor = DTensor.from_local(
                mine, self._mesh, [Shard(axis)], run_check=False, shape=whole.shape, stride=whole.stride()
            )
            self._made[id(whole)] = nn.Parameter(tensor, requires_grad=whole.requires_grad)
            self._made[id(self._made[id(whole)])] = self._made[id(whole)]
        module._parameters[name] = self._made[id(whole)]

    def _summed(self, parameter: torch.Tensor) -> torch.Tensor:
        return sum_gradients(self.group, local_weight(parameter))[0]


def _by_columns(module: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    return F.linear(hidden, local_weight(module.weight), None if module.bias is None else local_weight(module.bias))


def _by_rows(module: nn.Linear, group: ProcessGroup, hidden: torch.Tensor) -> torch.Tensor:
    result = sum_results(group, F.linear(hidden, local_weight(module.weight)))
    return result if module.bias is None else result + module.bias


def _embed(module: nn.Embedding, part: VocabularyPart, tokens: torch.Tensor) -> torch.Tensor:
    own, mine = part.own(tokens)
    padding = module.padding_idx
    if padding is not None:
        padding = padding - part.first if part.first <= padding < part.first + part.rows else None
    found = F.embedding(own, local_weight(module.weight), padding_idx=padding)
    found = sum_results(part.group, torch.where(mine[..., None], found, 0))
    scale = getattr(module, "embed_scale", None)
    if scale is None:
        return found
    return found * (scale.to(found.dtype) if isinstance(scale, torch.Tensor) else scale)


def _some_experts(
    module: nn.Module,
    group: ProcessGroup,
    first: int,
    forward: Callable[..., torch.Tensor],
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Compute the results of this rank's experts, and add those of the other ranks' experts."""
    many: int = module.num_experts  # type: ignore[assignment]
    hidden, weights = sum_gradients(group, hidden, weights)
    own = chosen - first
    mine = (own >= 0) & (own < many)
    # An index of no expert is left out, as in transformers.
    found = _with_parameters(
        module, local_weight, forward, hidden, torch.where(mine, own, many), torch.where(mine, weights, 0)
    )
    return sum_results(group, _Connected.apply(found, hidden, weights))  # type: ignore[no-untyped-call]


class _Connected(torch.autograd.Function):
    """Returns its first argument, and gives the others gradients of zero.

    If no token goes to any of a rank's experts, nothing else gives them gradients, and the sum of their gradients would
    wait for this rank.
    """

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*others)
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradient, *(torch.zeros_like(each) for each in ctx.saved_tensors)


def _with_parameters(
    module: nn.Module, made: Callable[[torch.Tensor], torch.Tensor], forward: Callable[..., torch.Tensor], *args: Any
) -> torch.Tensor:
    """Run a module's own forward pass, with something else in place of its parameters."""
    with _in_place_of_parameters(module, made):
        return forward(*args)


@contextmanager
def _in_place_of_parameters(module: nn.Module, made: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    own = {name: each for name, each in module._parameters.items() if each is not None}
    try:
        for name, each in own.items():
            del module._parameters[name]
            module.__dict__[name] = made(each)
        yield
    finally:
        for name, each in own.items():
            module.__dict__.pop(name, None)
            module._parameters[name] = each
