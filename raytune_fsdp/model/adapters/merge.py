"""Merge adapters into their base, weight by weight: each when it is read, by PEFT's own arithmetic."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from raytune_fsdp.model.adapters.attach import adapter_tensors, added_rows_of, base_name, is_adapter_layer
from raytune_fsdp.model.score_head import name_of_head
from raytune_fsdp.model.weights.source import Weights, read_whole


class MergedWeights:
    """The weights of a network without adapters, with what the adapters have learned merged into them.

    A weight with an adapter is at least in fp32, whatever it is stored in: it is rounded once, when it is written.
    """

    def __init__(self, base: Weights, adapter: Weights, network: PreTrainedModel) -> None:
        """Take `network` with the adapters, on the meta device, and in `adapter` the trained tensors by its names."""
        self._base = base
        self._adapter = adapter
        self._trained = adapter_tensors(network)
        self._layers: dict[str, list[tuple[str, nn.Module]]] = {}
        """PEFT's modules, by the name of the weight that they adapt. One weight may have several."""
        for prefix, module in network.named_modules():
            if is_adapter_layer(module):
                for own in _changed(module):
                    self._layers.setdefault(f"{base_name(prefix)}.{own}", []).append((prefix, module))
        head, stored = f"{name_of_head(network)}.weight", base.shapes()
        self._whole = {base_name(name): name for name in self._trained if base_name(name) in stored or name == head}
        """Tensors that are trained whole, by the name of the tensor that they replace."""
        self._alone = {head: tuple(adapter.shapes()[head])} if head in self._whole and head not in stored else {}
        """A head that scores, for which the base has nothing to replace."""
        self._rows = {weight: (name, ids) for name, (weight, ids) in added_rows_of(network).items()}
        """Rows that are trained alone and their ids, by the name of the weight that they go into."""
        self._last: tuple[str, torch.Tensor] | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {**self._base.shapes(), **self._alone}

    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: self._dtype(name, shape) for name, shape in self.shapes().items()}

    def _dtype(self, name: str, shape: Sequence[int]) -> torch.dtype:
        source = self._adapter if name in self._alone else self._base
        stored = source.read(name, 0, 0 if shape else 1).dtype
        changed = name in self._layers or name in self._whole or name in self._rows
        return torch.promote_types(stored, torch.float32) if changed else stored

    def read_all(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: self._read(name) for name in names}

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name in self._rows:
            return self._with_rows(name, start, stop)
        if name in self._whole:
            return self._adapter.read(self._whole[name], start, stop)
        if name not in self._layers:
            return self._base.read(name, start, stop)
        shape = self._base.shapes()[name]
        if start == stop:  # an empty read asks for the type only: do not merge
            return torch.empty((0, *shape[1:]), dtype=self._dtype(name, shape))
        if self._last is None or self._last[0] != name:  # kept, because the other rows are read next
            self._last = None
            self._last = name, self._read(name)
        return self._last[1][start:stop]

    def where(self, name: str) -> str:
        return self._adapter.where(self._whole[name]) if name in self._whole else self._base.where(name)

    @torch.no_grad()
    def _read(self, name: str) -> torch.Tensor:
        if name in self._whole:
            return read_whole(self._adapter, self._whole[name])
        if name in self._rows:
            return self._with_rows(name, 0, self._base.shapes()[name][0])
        tensor = read_whole(self._base, name)
        for prefix, layer in self._layers.get(name, []):
            tensor = self._merged(prefix, layer, name.rpartition(".")[2], tensor)
        return tensor

    def _with_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        rows, ids = self._rows[name]
        tensor = self._base.read(name, start, stop).to(self._dtype(name, self._base.shapes()[name]), copy=True)
        for place, id_ in enumerate(ids):
            if start <= id_ < stop:
                tensor[id_ - start] = self._adapter.read(rows, place, place + 1)[0].to(tensor.dtype)
        return tensor

    def _merged(self, prefix: str, layer: nn.Module, own: str, tensor: torch.Tensor) -> torch.Tensor:
        """Have PEFT merge the adapter into this tensor of a layer. Only these tensors have memory."""
        layer = copy.deepcopy(layer)
        for name in self._trained:
            inner = name.removeprefix(f"{prefix}.")
            if inner != name and not inner.startswith("base_layer."):
                # At least in fp32, as an exported adapter is: products in bf16 would be rounded to bf16.
                found = read_whole(self._adapter, name)
                _set(layer, inner, found.to(torch.promote_types(found.dtype, torch.float32)))
        base = layer.get_base_layer()  # type: ignore[operator]
        for each in _changed(layer):
            of_layer = base._parameters[each]
            # Zeros for the tensor that is not asked for, since PEFT merges both.
            found = tensor if each == own else torch.zeros(of_layer.shape, dtype=of_layer.dtype)
            _set(base, each, found.to(torch.promote_types(found.dtype, torch.float32)))
        layer.merge()  # type: ignore[operator]
        merged: torch.Tensor = base._parameters[own].data
        return merged


def _changed(layer: nn.Module) -> tuple[str, ...]:
    """Return the names of the base layer's parameters that a merge changes."""
    weight = getattr(layer, "parameter_name", "weight")
    base = layer.get_base_layer()  # type: ignore[operator]
    factors = hasattr(layer, "ia3_l") and not layer.is_feedforward and base.bias is not None
    return (weight, "bias") if factors else (weight,)


def _set(module: nn.Module, name: str, value: torch.Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    module.get_submodule(owner)._parameters[attribute] = nn.Parameter(value, requires_grad=False)
