"""Rows of new tokens that are trained alone, next to an embedding and a head that stay frozen.

The rows are parameters of their own, so that checkpoint, gradient and optimizer state are only as large as the rows.
A head and an embedding that share their weight share the rows, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.model.tables import constant_table

ROWS = "added_rows"
"""The parameter's name in its module."""


@constant_table
def _on(device: torch.device, ids: tuple[int, ...]) -> torch.Tensor:
    """Return the ids on a device. Not a buffer: its owner's class has to compute buffers that no checkpoint holds."""
    return torch.tensor(ids, device=device)


class EmbeddingWithRows(nn.Module):
    """An embedding with rows of their own for some ids, wrapped around the frozen one."""

    def __init__(self, base: nn.Embedding, rows: nn.Parameter, ids: tuple[int, ...]) -> None:
        super().__init__()
        self.base_layer, self.added_rows, self.ids = base, rows, ids

    @property
    def weight(self) -> torch.Tensor:
        """The frozen weight, for callers that ask whether the head shares it."""
        return self.base_layer.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        ids = _on(tokens.device, self.ids)
        place = torch.searchsorted(ids, tokens).clamp(max=len(self.ids) - 1)
        # Looked up for every token, though most are not among these ids: to pick them, the host would have to get
        # their number from the device.
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
    def extending(cls, linear: nn.Linear, rows: nn.Parameter, ids: tuple[int, ...]) -> HeadWithRows:
        """Return a head that has the parameters of `linear`, tied or not, and these rows."""
        head = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        head.weight, head.bias, head.added_rows, head.ids = linear.weight, linear.bias, rows, ids
        return head.train(linear.training)

    @property
    def places(self) -> torch.Tensor:
        """The ids, on the weight's device."""
        return _on(self.weight.device, self.ids)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().forward(hidden)
        if self.added_rows is None:
            return logits
        return with_rows(logits, hidden, self.added_rows, self.bias, self.places)


def with_rows(
    logits: torch.Tensor, hidden: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor
) -> torch.Tensor:
    """Put the rows' logits into `logits`, in place: no gradient needs the logits that they replace."""
    return logits.index_copy_(-1, ids, F.linear(hidden, rows, None if bias is None else bias[ids]))


def train_rows(network: PreTrainedModel, added: Collection[int]) -> None:
    """Give a frozen network on the meta device rows of their own for these ids."""
    if problem := why_rows_not_alone(network):
        raise ConfigError(f"method.train_added_tokens=true: {problem}")
    ids = tuple(sorted(added))
    inputs, outputs = network.get_input_embeddings(), network.get_output_embeddings()
    rows = _empty(inputs.weight, len(ids))
    tied = outputs.weight is inputs.weight
    head = HeadWithRows.extending(outputs, rows if tied else _empty(outputs.weight, len(ids)), ids)
    network.set_submodule(name_in(network, inputs), EmbeddingWithRows(inputs, rows, ids))
    network.set_submodule(name_in(network, outputs), head)


def _empty(weight: nn.Parameter, count: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(count, weight.shape[1], dtype=weight.dtype, device=weight.device))


def name_in(network: nn.Module, wanted: nn.Module) -> str:
    """Return the name of a network's module."""
    found: str = next(name for name, module in network.named_modules() if module is wanted)
    return found


def why_rows_not_alone(network: PreTrainedModel) -> str | None:
    """Return why a network with adapters cannot train rows of new tokens alone, and the way out; None if it can."""
    inputs, outputs = network.get_input_embeddings(), network.get_output_embeddings()
    kind = type(network).__name__
    for module in (inputs, outputs):
        for mark, field in (("modules_to_save", "modules_to_save"), ("base_layer", "target_modules")):
            if hasattr(module, mark):
                return (
                    f"{name_in(network, module)} of a {kind} is trained by method.{field}, its rows of new tokens too: "
                    f"leave it out of method.{field}, or set method.train_added_tokens=false"
                )
    # A subclass may scale what it looks up, which is repeated for the rows, or do more (normalize it), which is not.
    plain = type(inputs) is nn.Embedding or (isinstance(inputs, nn.Embedding) and hasattr(inputs, "embed_scale"))
    wrong = outputs if plain else inputs
    if plain and type(outputs) is nn.Linear:
        return None
    return (
        f"rows are trained alone only next to a plain embedding and a plain linear head, and a {kind} has a "
        f"{type(wrong).__name__}: set it to false, and name both modules in method.modules_to_save"
    )


def weights_with_rows(network: PreTrainedModel) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield, for each module with such rows, the rows' name, the name of the frozen weight next to them, and their ids.

    Rows that two modules share come under both names.
    """
    for name, module in network.named_modules():
        if isinstance(module, EmbeddingWithRows | HeadWithRows) and module.ids:
            yield f"{name}.{ROWS}", f"{name}.weight", module.ids
