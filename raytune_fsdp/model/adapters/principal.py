"""Adapters that begin as the largest part of their weight (PiSSA, OLoRA), which is taken out of the weight.

Their initial values stay in every checkpoint: the residual of a weight is always the stored weight less these values,
and never the result of another decomposition.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from raytune_fsdp.base.beat import computing
from raytune_fsdp.base.collectives import on_all_ranks
from raytune_fsdp.base.errors import ConfigError, ModelError
from raytune_fsdp.base.random import derive_key
from raytune_fsdp.model.adapters.attach import ADAPTER, base_name, is_adapter_layer
from raytune_fsdp.model.weights.source import Weights, all_finite, read_whole

_AT_ONCE = 1 << 20
"""Numbers of a weight that are computed at a time, in fp64. Each part starts at a fixed row, so that a row has the same
bits whatever rows are read with it: how a product is summed up may depend on its size."""

_ROUNDS, _SPARE = 16, 10
"""Rounds of the subspace iteration that finds the largest singular vectors, and how many more vectors it looks for than
are kept. A whole decomposition of a matrix of 4096 x 14336 would take minutes."""

_AHEAD = 4 << 20
"""Bytes of pairs that each rank has ready, as weights are of many sizes: with one pair at a time, eight ranks would
wait for the largest of every eight weights of a Llama, and take 1.9 times as long. With 16 MiB the allocator kept up to
77 MiB more between pairs, and two ranks that begin with OLoRA of rank 64 held 659 MiB where 645 are allowed; with 4
MiB, 604."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The two matrices of a layer's adapter, by name."""

    a: str
    b: str
    rank: int
    scaling: float
    turned: bool
    """Whether the weight is stored input first."""


def pairs_of(network: PreTrainedModel) -> dict[str, Pair]:
    """Return the pair of every adapter, by the name of the weight that it adapts."""
    return {
        f"{base_name(name)}.weight": Pair(
            a=f"{name}.lora_A.{ADAPTER}.weight",
            b=f"{name}.lora_B.{ADAPTER}.weight",
            rank=module.r[ADAPTER],
            scaling=module.scaling[ADAPTER],
            turned=bool(module.fan_in_fan_out),
        )
        for name, module in network.named_modules()
        if is_adapter_layer(module)
    }


def check_ranks(network: PreTrainedModel, init: str) -> None:
    """Refuse adapters of a higher rank than their weight can have."""
    shapes = {base_name(name): tuple(parameter.shape) for name, parameter in network.named_parameters()}
    for name, pair in pairs_of(network).items():
        if pair.rank > min(shapes[name]):
            raise ConfigError(
                f"method.init={init}: {name} has the shape {shapes[name]}, so no part of it has "
                f"method.rank={pair.rank}: set method.init=zero, a lower rank, or leave that module out of "
                "method.target_modules"
            )


class PrincipalInit:
    """The initial values of adapters, in their own type, for one weight at a time, found when that weight is filled.

    One of the ranks that read decomposes each weight, and the others get the pair from it. No rank has the pairs of all
    weights: for rank 64, in fp32, the pairs of a model of 468 million numbers are 138 MiB.
    """

    def __init__(self, base: Weights | None, network: PreTrainedModel, init: str, seed: int) -> None:
        """Find the ranks that read: `base` is None on the others. Collective."""
        self._base, self._init, self._seed = base, init, seed
        self._readers = [rank for rank, reads in enumerate(on_all_ranks(lambda: base is not None)) if reads]
        self._pairs = pairs_of(network)
        self._empty = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for pair in self._pairs.values()
            for name, tensor in ((each, network.get_parameter(each)) for each in (pair.a, pair.b))
        }
        self._weight_of = {name: weight for weight, pair in self._pairs.items() for name in (pair.a, pair.b)}
        self._owner_of: dict[str, int] = {}
        """The rank that has the pair, by weight, for the weights that are decomposed and not yet needed."""
        self._own: dict[str, dict[str, torch.Tensor]] = {}
        """The pairs, by weight, that this rank has of these."""
        self._now: tuple[str, dict[str, torch.Tensor]] = ("", {})

    def turn_to(self, name: str) -> None:
        """Make the pair ready that this tensor of the network needs, and drop the one before.

        Collective: all ranks name the same tensors in the same order.
        """
        weight = self._weight_of.get(name) or f"{base_name(name).rpartition('.')[0]}.weight"
        if weight not in self._pairs or weight == self._now[0]:
            return
        self._now = "", {}
        if weight not in self._owner_of:
            self._take_apart(self._next(weight))
        owner, pair = self._owner_of.pop(weight), self._pairs[weight]
        held = self._own.pop(weight, None)
        if len(self._readers) > 1:
            held = held or {each: torch.empty_like(self._empty[each], device="cpu") for each in (pair.a, pair.b)}
            for tensor in held.values():
                dist.broadcast(tensor.view(torch.uint8), src=owner)
        self._now = weight, held or {}

    def _next(self, first: str) -> list[str]:
        """Return the weights to decompose together: one for each rank that reads, or more while their pairs are small.

        A rank that reads alone waits for nobody, so it takes one weight at a time.
        """
        names, size = list(self._pairs), 0
        found: list[str] = []
        for name in names[names.index(first) :]:
            size += self._empty[self._pairs[name].a].nbytes + self._empty[self._pairs[name].b].nbytes
            if len(found) >= len(self._readers) and (len(self._readers) == 1 or size > _AHEAD * len(self._readers)):
                break
            found.append(name)
        return found

    def _take_apart(self, names: list[str]) -> None:
        self._owner_of = {name: self._readers[i % len(self._readers)] for i, name in enumerate(names)}
        self._own = {}

        def mine() -> None:
            for name in names:
                if self._base is not None and self._owner_of[name] == dist.get_rank():
                    with computing():
                        found = _parts(self._base, name, self._pairs[name], self._init, self._seed)
                    # In the type that a checkpoint stores: what is taken out of a weight must be the same after a
                    # restart.
                    self._own[name] = {each: tensor.to(self._empty[each].dtype) for each, tensor in found.items()}

        on_all_ranks(mine)  # a rank that finds a weight that cannot be decomposed stops all

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._empty.items()}

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        if start == stop:  # asks for the type only, and may name any tensor
            return torch.empty_like(self._empty[name][:0], device="cpu")
        weight, tensors = self._now
        assert weight == self._weight_of[name], f"{name} is read, and the pair at hand is that of {weight or 'none'}"
        return tensors[name][start:stop]

    def where(self, name: str) -> str:
        return f"{name}, taken from its weight,"


@torch.no_grad()
def _parts(base: Weights, name: str, pair: Pair, init: str, seed: int) -> dict[str, torch.Tensor]:
    stored = read_whole(base, name)
    if not all_finite(stored):
        raise ModelError(f"{base.where(name)} has values that are not finite (NaN or infinity): use another model")
    stored = stored.T if pair.turned else stored
    if init == "olora":
        b, a = _triangular(stored, pair.rank)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_key("principal", seed, name))
            weight = stored.float()
            u, s, v = torch.svd_lowrank(weight, q=min(pair.rank + _SPARE, *weight.shape), niter=_ROUNDS)
        root = (s[: pair.rank] / pair.scaling).sqrt()
        b, a = u[:, : pair.rank] * root, root[:, None] * v[:, : pair.rank].T
    return {pair.a: a.contiguous(), pair.b: b.contiguous()}


def _triangular(weight: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first columns of Q and rows of R, bit for bit as torch.linalg.qr, which holds four such matrices.

    Here LAPACK's two steps work in place, in one matrix.
    """
    rows, columns = weight.shape
    matrix = torch.empty(columns, rows).T  # stored by columns as LAPACK wants it, or it would make a copy
    matrix.copy_(weight)
    factors = torch.empty(min(rows, columns))
    torch.geqrf(matrix, out=(matrix, factors))
    r = matrix[:rank].triu()
    q = matrix[:, : len(factors)]
    torch.linalg.householder_product(q, factors, out=q)
    return q[:, :rank], r


class ResidualWeights:
    """Weights less the initial values of their adapters."""

    def __init__(self, inner: Weights, initial: Weights, network: PreTrainedModel) -> None:
        self._inner, self._initial = inner, initial
        self._shapes = inner.shapes()
        self._pairs = pairs_of(network)
        self._last: tuple[Pair, torch.Tensor, torch.Tensor | None] | None = None
        """What all rows of a weight need: the pair's first matrix, and the second if the weight is `turned`."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name not in self._pairs or start == stop:
            rows = self._inner.read(name, start, stop)
            return rows.to(torch.promote_types(rows.dtype, torch.float32)) if name in self._pairs else rows
        (count, numbers), found = self._shapes[name], None
        at_once = max(1, _AT_ONCE // numbers)
        for first in range(start - start % at_once, stop, at_once):
            last = min(count, first + at_once)
            rows = self._rest(name, first, last)[max(0, start - first) : min(last, stop) - first]
            # One tensor from the start: concatenated at the end, all rows would be held twice.
            found = torch.empty(stop - start, numbers, dtype=rows.dtype) if found is None else found
            found[max(first, start) - start : min(last, stop) - start] = rows
        assert found is not None
        return found

    def _rest(self, name: str, start: int, stop: int) -> torch.Tensor:
        rows, pair = self._inner.read(name, start, stop), self._pairs[name]
        if self._last is None or self._last[0] != pair:  # kept, because the other rows are read next
            first = read_whole(self._initial, pair.a).double()
            self._last = pair, first, read_whole(self._initial, pair.b).double() if pair.turned else None
        _, a, b = self._last
        part = self._initial.read(pair.b, start, stop).double() @ a if b is None else a[:, start:stop].T @ b.T
        return rows.double().sub_(part.mul_(pair.scaling)).to(torch.promote_types(rows.dtype, torch.float32))

    def where(self, name: str) -> str:
        return self._inner.where(name)


class PlainAdapter:
    """An adapter of twice the rank, for the weights as they are stored: its trained values less its initial values."""

    def __init__(self, adapter: Weights, initial: Weights, network: PreTrainedModel) -> None:
        self._adapter, self._initial = adapter, initial
        pairs = pairs_of(network).values()
        self._first, self._second = {pair.a for pair in pairs}, {pair.b for pair in pairs}
        peft = network.peft_config[ADAPTER]  # type: ignore[union-attr, index]
        # Doubling both rank and alpha leaves alpha / rank as it was, but not alpha / sqrt(rank).
        self._factor = 2**-0.5 if peft.use_rslora else 1.0
        self.config = {"r": 2 * peft.r, "lora_alpha": 2 * peft.lora_alpha}
        """The fields of PEFT's config that differ."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._doubled(name, tuple(shape)) for name, shape in self._adapter.shapes().items()}

    def _doubled(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if name not in self._first | self._second:
            return shape
        return (2 * shape[0], shape[1]) if name in self._first else (shape[0], 2 * shape[1])

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name not in self._first | self._second:
            return self._adapter.read(name, start, stop)
        rows = self._adapter.shapes()[name][0]
        now, then = (weights.read(name, 0, rows).float() for weights in (self._adapter, self._initial))
        if name in self._first:
            return torch.cat([now, then])[start:stop]
        return (torch.cat([now, -then], 1) * self._factor)[start:stop]

    def where(self, name: str) -> str:
        return self._adapter.where(name)
