"""Read the values of a network's tensors, always by rows, so that no rank reads more than it keeps."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from raytune_fsdp.base.errors import ModelError, first_line
from raytune_fsdp.base.random import derive_key
from raytune_fsdp.base.untrusted import UnsoundError
from raytune_fsdp.model.directory.bounds import check_header
from raytune_fsdp.model.directory.files import WeightFiles
from raytune_fsdp.model.directory.hub_weights import TensorHeader
from raytune_fsdp.model.directory.tensorfile import DTYPES
from raytune_fsdp.model.layers import layers_of

# Rows of an embedding summed at a time: 512 MiB in float64 at a width of 8192, where a vocabulary of 128k takes 8 GiB.
_MEAN_ROWS = 8192


class Weights(Protocol):
    """Tensors by their names in the network."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor."""

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read rows [start, stop) to the CPU, in the stored type. A tensor without dimensions is read whole."""

    def where(self, name: str) -> str:
        """Say where this tensor is stored, for messages."""


def read_whole(weights: Weights, name: str) -> torch.Tensor:
    """Read all rows of a tensor."""
    shape = weights.shapes()[name]
    return weights.read(name, 0, shape[0] if shape else 1)


def all_finite(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has neither infinities nor NaNs."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.itemsize == 1:  # torch has no minimum of 8-bit types
        tensor = tensor.to(torch.float16)
    low, high = torch.aminmax(tensor)  # reads once and allocates nothing, unlike isfinite; both are NaN if any is
    return math.isfinite(low.item()) and math.isfinite(high.item())


class FileWeights:
    """Weights in safetensors files. One file is open at a time, memory-mapped.

    If the files are not on this machine, only shapes and types are known: what is read lies on the meta device.
    """

    def __init__(self, files: WeightFiles, key_of: Mapping[str, str]) -> None:
        """Take in `key_of` the keys in the files by names in the network."""
        self._files = files
        self._key_of = key_of
        self._open_name: str | None = None
        self._handle: Any = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        if (headers := self._files.headers) is not None:
            return {name: headers[key].shape for name, key in self._key_of.items()}
        # File by file, as only one is open at a time.
        by_file = sorted(self._key_of, key=lambda name: self._files.file_of[self._key_of[name]])
        return {name: tuple(self._slice(name).get_shape()) for name in by_file}

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        if self._files.headers is not None:
            return self._described(self._files.headers[self._key_of[name]], start, stop)
        piece = self._slice(name)
        if not piece.get_shape():  # a tensor without dimensions cannot be sliced
            whole: torch.Tensor = self._handle.get_tensor(self._key_of[name])
            return whole
        rows: torch.Tensor = piece[start:stop]
        return rows

    def _described(self, header: TensorHeader, start: int, stop: int) -> torch.Tensor:
        if header.dtype not in DTYPES:
            raise ModelError(
                f"{self._files.directory} has weights of the type {header.dtype}, which torch does not know"
            )
        shape = (stop - start, *header.shape[1:]) if header.shape else ()
        return torch.empty(shape, dtype=DTYPES[header.dtype], device="meta")

    def where(self, name: str) -> str:
        return self._files.where(self._key_of[name])

    def _slice(self, name: str) -> Any:
        try:
            return self._file(name).get_slice(self._key_of[name])
        except SafetensorError as error:
            raise ModelError(
                f"{self._files.directory / str(self._open_name)} does not hold {self._key_of[name]}, although the "
                "index says so: download the model again"
            ) from error

    def _file(self, name: str) -> Any:
        wanted = self._files.file_of[self._key_of[name]]
        if wanted != self._open_name:
            path = self._files.directory / wanted
            try:
                check_header(path)
                self._handle = safe_open(path, "pt")
            except (SafetensorError, OSError, UnsoundError) as error:
                raise ModelError(
                    f"{path} is not a complete safetensors file ({first_line(error)}): download it again"
                ) from error
            self._open_name = wanted
        return self._handle


class RandomWeights:
    """Weights as transformers would initialise them, the same on every rank and at every world size.

    Units (a layer, or a module outside the layers) are drawn one by one from a twin of the network on the meta device,
    each with a seed of its own, so no more than one is in memory, and the order of reading has no effect.
    """

    def __init__(self, twin: PreTrainedModel, seed: int) -> None:
        self._twin = twin
        self._seed = seed
        self._units = dict(_units(twin))
        self._unit_of = {f"{unit}.{name}": unit for unit, module in self._units.items() for name in module.state_dict()}
        self._current: tuple[str, dict[str, torch.Tensor]] | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(t.shape) for name, t in self._twin.state_dict().items()}

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        unit = self._unit_of[name]
        if self._current is None or self._current[0] != unit:
            self._current = None  # freed first, so that two are never in memory
            # A copy is filled: the twin itself stays without memory.
            self._current = unit, _drawn(self._twin, unit, copy.deepcopy(self._units[unit]), self._seed)
        tensor = self._current[1][name]
        return tensor[start:stop] if tensor.ndim else tensor

    def where(self, name: str) -> str:
        return f"{name}, drawn at random,"


@torch.no_grad()
def _drawn(network: PreTrainedModel, unit: str, module: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Draw the tensors of a unit as its network does; `module` is it, on the meta device, and gets memory."""
    module.to_empty(device="cpu")
    for tensor in module.state_dict().values():
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)  # stays where nothing initialises the tensor
    with torch.random.fork_rng(devices=[]):
        # Seeded by the unit's name, so that neither the rank nor the order of reading matters.
        torch.manual_seed(derive_key("weights", seed, unit))
        for child in reversed(list(module.modules())):  # children before parents, as transformers does
            network._init_weights(child)
    drawn = {f"{unit}.{name}": tensor for name, tensor in module.state_dict().items()}
    unset = [name for name, tensor in drawn.items() if tensor.is_floating_point() and tensor.isnan().any()]
    if unset:
        raise ModelError(
            f"model.init=random: {type(network).__name__} does not initialise {unset[0]} in _init_weights"
            + (f" (and {len(unset) - 1} more)" if len(unset) > 1 else "")
            + "; start from a checkpoint with model.init=pretrained"
        )
    return drawn


class WithHead:
    """Weights without a head, and a head that is drawn as `RandomWeights` draws it."""

    def __init__(self, inner: Weights, network: PreTrainedModel, head: str, seed: int) -> None:
        """`head`: the name of its module, a linear layer without a bias. The network may be sharded."""
        self._inner, self._network, self._head, self._seed = inner, network, head, seed
        self._name = f"{head}.weight"
        weight = network.get_parameter(self._name)
        self._shape, self._dtype = tuple(weight.shape), weight.dtype
        self._values: torch.Tensor | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {**self._inner.shapes(), self._name: self._shape}

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name != self._name:
            return self._inner.read(name, start, stop)
        if self._values is None:
            rows, columns = self._shape
            module = nn.Linear(columns, rows, bias=False, device="meta", dtype=self._dtype)
            self._values = _drawn(self._network, self._head, module, self._seed)[name]
        return self._values[start:stop]

    def where(self, name: str) -> str:
        return f"{name}, drawn at random," if name == self._name else self._inner.where(name)


def _units(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers, and every module outside of them that owns tensors."""
    layers = {id(layer) for layer in layers_of(model)}
    inside = {id(child) for layer in layers_of(model) for child in layer.modules()} - layers
    for name, module in model.named_modules():
        owns = bool(module._parameters or module._buffers)
        if id(module) in layers or (owns and id(module) not in inside):
            yield name, module


class GrownWeights:
    """Weights whose embeddings have fewer rows than the network needs, or rows that now stand for other tokens.

    A new row is the mean of all stored rows, or of those of its token's description. Means are summed in a fixed order
    in float64, so every rank has the same means.
    """

    def __init__(
        self,
        inner: Weights,
        rows: Mapping[str, int],
        added: Mapping[str, Mapping[int, Sequence[int]]] | None = None,
    ) -> None:
        """Take in `rows` the number of rows that each grown tensor has in the network.

        `added`: by tensor and row, the rows whose mean the row starts as; an empty sequence means all. They apply even
        if the row is stored, since vocabularies are padded.
        """
        self._inner = inner
        self._rows = rows
        self._added = added or {}
        self._means: dict[str, torch.Tensor] = {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            n: (self._rows[n], *shape[1:]) if n in self._rows else shape for n, shape in self._inner.shapes().items()
        }

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        tensor = self._grown(name, start, stop)
        added = [row for row in self._added.get(name, {}) if start <= row < stop]
        if added:
            tensor = tensor.clone()
            for row in added:
                like = self._added[name][row]
                means = [self._grown(name, each, each + 1)[0].double() for each in like]
                mean = torch.stack(means).mean(0) if means else self._mean(name)
                tensor[row - start] = mean.to(tensor.dtype)
        return tensor

    def _grown(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name not in self._rows:
            return self._inner.read(name, start, stop)
        stored = self._inner.shapes()[name][0]
        old = self._inner.read(name, min(start, stored), min(stop, stored))
        new = max(0, stop - max(start, stored))
        if not new:
            return old
        mean = self._mean(name).to(old.dtype)
        return torch.cat([old, mean.expand(new, *mean.shape)])

    def where(self, name: str) -> str:
        return self._inner.where(name)

    def _mean(self, name: str) -> torch.Tensor:
        if name not in self._means:
            stored = self._inner.shapes()[name][0]
            chunks = range(0, stored, _MEAN_ROWS)
            sums = [self._inner.read(name, s, min(s + _MEAN_ROWS, stored)).double().sum(0) for s in chunks]
            self._means[name] = torch.stack(sums).sum(0) / stored
        return self._means[name]
