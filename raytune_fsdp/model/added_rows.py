"""Rows of new tokens that are trained alone, beside an embedding and a head that stay frozen.

They are parameters of their own, so that a checkpoint, a gradient and an optimizer's state are as large as the rows.
Where head and embedding share their weight they share the rows, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.model.tables import table

ROWS = "added_rows"
"""What the parameter is called in its module."""


@table
def _on(device: torch.device, ids: tuple[int, ...]) -> torch.Tensor:
    """The ids on a device. No buffer: those that no checkpoint holds are computed anew by their owner's class."""
    return torch.tensor(ids, device=device)


class EmbeddingWithRows(nn.Module):
    """Around an embedding: what it returns, with rows of their own for some ids."""

    def __init__(self, base: nn.Embedding, rows: nn.Parameter, ids: tuple[int, ...]) -> None:
        super().__init__()
        self.base_layer, self.added_rows, self.ids = base, rows, ids

    @property
    def weight(self) -> torch.Tensor:
        """The frozen one, for who asks whether the head shares it."""
        return self.base_layer.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        ids = _on(tokens.device, self.ids)
        place = torch.searchsorted(ids, tokens).clamp(max=len(self.ids) - 1)
        # Of every token, of which the most are none of these: their number would have to come from the device.
        rows = F.embedding(place, self.added_rows)
        scale = getattr(self.base_layer, "embed_scale", None)
        if scale is not None:
            rows = rows * (scale.to(rows.dtype) if isinstance(scale, torch.Tensor) else scale)
        return torch.where((ids[place] == tokens)[..., None], rows, self.base_layer(tokens))


class HeadWithRows(nn.Linear):
    """An output embedding with rows of their own for some ids, if it has any."""

    added_rows: nn.Parameter | None
    ids: tuple[int, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_parameter(ROWS, None)

    @classmethod
    def beside(cls, linear: nn.Linear, rows: nn.Parameter, ids: tuple[int, ...]) -> HeadWithRows:
        """With the same parameters, tied or not."""
        head = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        head.weight, head.bias, head.added_rows, head.ids = linear.weight, linear.bias, rows, ids
        return head.train(linear.training)

    @property
    def places(self) -> torch.Tensor:
        """The ids, where the weight is."""
        return _on(self.weight.device, self.ids)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().forward(hidden)
        if self.added_rows is None:
            return logits
        return with_rows(logits, hidden, self.added_rows, self.bias, self.places)


def with_rows(
    logits: torch.Tensor, hidden: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor
) -> torch.Tensor:
    """Logits with those of the rows in their places: in place, since nobody needs the others for a gradient."""
    return logits.index_copy_(-1, ids, F.linear(hidden, rows, None if bias is None else bias[ids]))


def train_rows(network: PreTrainedModel, added: Collection[int]) -> None:
    """Give a frozen network on the meta device rows of their own for these ids."""
    if problem := why_not_alone(network):
        raise ConfigError(f"method.train_added_tokens=true: {problem}")
    ids = tuple(sorted(added))
    inputs, outputs = network.get_input_embeddings(), network.get_output_embeddings()
    rows = _empty(inputs.weight, len(ids))
    tied = outputs.weight is inputs.weight
    head = HeadWithRows.beside(outputs, rows if tied else _empty(outputs.weight, len(ids)), ids)
    _replace(network, inputs, EmbeddingWithRows(inputs, rows, ids))
    _replace(network, outputs, head)


def _empty(weight: nn.Parameter, count: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(count, weight.shape[1], dtype=weight.dtype, device=weight.device))


def _replace(network: PreTrainedModel, old: nn.Module, new: nn.Module) -> None:
    parent, _, attribute = _name(network, old).rpartition(".")
    setattr(network.get_submodule(parent), attribute, new)


def _name(network: nn.Module, wanted: nn.Module) -> str:
    found: str = next(name for name, module in network.named_modules() if module is wanted)
    return found


def why_not_alone(network: PreTrainedModel) -> str | None:
    """Why the rows of new tokens of a network with adapters cannot be trained alone, and the way out."""
    inputs, outputs = network.get_input_embeddings(), network.get_output_embeddings()
    kind = type(network).__name__
    for module in (inputs, outputs):
        for mark, field in (("modules_to_save", "modules_to_save"), ("base_layer", "target_modules")):
            if hasattr(module, mark):
                return (
                    f"{_name(network, module)} of a {kind} is trained by method.{field}, its rows of new tokens too: "
                    f"leave it out of method.{field}, or set method.train_added_tokens=false"
                )
    # A subclass scales what it looks up, or does more (normalizes it): the first is repeated for the rows.
    plain = type(inputs) is nn.Embedding or (isinstance(inputs, nn.Embedding) and hasattr(inputs, "embed_scale"))
    wrong = outputs if plain else inputs
    if plain and type(outputs) is nn.Linear:
        return None
    return (
        f"rows are trained alone beside a plain embedding and a plain linear head only, and a {kind} has a "
        f"{type(wrong).__name__}: set it to false, and name both modules in method.modules_to_save"
    )


def weights_with_rows(network: PreTrainedModel) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Of each module with such rows: the names of the rows, of the weight that they are beside, and the rows' ids.

    Those that two modules share come under both names.
    """
    for name, module in network.named_modules():
        if isinstance(module, EmbeddingWithRows | HeadWithRows) and module.ids:
            yield f"{name}.{ROWS}", f"{name}.weight", module.ids
