"""Spread a model over the ranks: a mesh, and units of sharding.

What layers do in training (model/layers.py) is set up before, and the weights are filled in afterwards, on the sharded
shapes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, cast

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
)
from transformers import PreTrainedModel

from raytune_fsdp.base.collectives import make_device_mesh
from raytune_fsdp.config import ParallelConfig
from raytune_fsdp.model.attention.choose import Heads
from raytune_fsdp.model.layers import ends_of, layers_of
from raytune_fsdp.model.network import MASTER_DTYPE
from raytune_fsdp.model.pieces.pieces import TENSOR, local_piece
from raytune_fsdp.model.precision.fp8 import layers_in_fp8
from raytune_fsdp.model.split.cuts import sharing_heads
from raytune_fsdp.plan.plan import Layout
from raytune_fsdp.step.gather_fp8 import gather_in_fp8
from raytune_fsdp.step.precision import COMPUTE_DTYPE, compute_dtype, precision_policy
from raytune_fsdp.step.reduce_by_node import reduce_by_node
from raytune_fsdp.step.traffic import Collectives, Traffic, UnitSize, exchanged_by_attention, step_traffic

_STAYS = ("shard_grad_op", "replicate")
"""Strategies that keep weights gathered from forward to backward."""

_FOR_WEIGHTS = 0.7
"""The share of memory that weights and what they need may use, so that activations have room."""


def make_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """Make the mesh: replicas x shards x parts of layers. Collective.

    The first and the last axis are left out if they are 1: an axis of one replica would all-reduce every unit in vain.
    """
    axes = {"shard": layout.shard_size}
    if layout.replicas > 1:
        axes = {"replicate": layout.replicas, **axes}
    if layout.tensor > 1:
        axes[TENSOR] = layout.tensor
    return make_device_mesh(device.type, axes)


@dataclass(frozen=True, slots=True)
class SharingGroups:
    """The ranks that compute this rank's micro-batches with it. None: there are no others."""

    sequence: dist.ProcessGroup | None
    """The ranks that have other parts of the tokens."""
    together: dist.ProcessGroup | None
    """All ranks that share the micro-batches."""


def make_groups(layout: Layout, device: torch.device) -> SharingGroups:
    """Make the groups of ranks that share samples. Collective."""
    if layout.together == 1:
        return SharingGroups(None, None)
    axes = {"data": layout.data_ranks, "sequence": layout.sequence, TENSOR: layout.tensor}
    mesh = make_device_mesh(device.type, axes)
    sequence = mesh.get_group("sequence") if layout.sequence > 1 else None
    if layout.tensor == 1:
        return SharingGroups(sequence, sequence)
    together = make_device_mesh(device.type, {"data": layout.data_ranks, "together": layout.together})
    return SharingGroups(sequence, together.get_group("together"))


@dataclass(frozen=True, slots=True)
class Unit:
    """Modules whose weights are gathered and freed together."""

    name: str
    modules: tuple[nn.Module, ...]
    stays: bool = False
    """Whether its weights stay gathered from forward to backward, whatever the strategy is."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for module in self.modules for parameter in module.parameters()]


def _nbytes(parameter: torch.Tensor, width: int) -> int:
    """Return the bytes of this rank's part of a layer's parameter, in `width` bytes a number."""
    count = local_piece(parameter).numel()
    return count * (width if parameter.is_floating_point() else parameter.itemsize)


def sharding_units(model: PreTrainedModel, config: ParallelConfig, *, ends: bool) -> list[Unit]:
    """Return a network's units of sharding, in the order of its forward pass; what is in none belongs to the root.

    `ends`: the embedding, and the norm and head after the layers, are units of their own. The root's weights stay
    gathered from the first layer to the last and back: for a 70B these are 4 GiB that most of a step does not use.
    """
    layers, size = layers_of(model), config.wrap
    groups = [tuple(layers[i : i + size]) for i in range(0, len(layers), size)]
    units = [Unit("block" if size == 1 else f"{size} blocks", group) for group in groups]
    if not ends:
        return units
    first, last = ends_of(model)
    # The last unit in forward is the first in backward: freed in between, it would be gathered again at once.
    return [Unit("embedding", first), *units, Unit("norm and head", last, stays=True)]


def reached_by_backward(model: PreTrainedModel, units: Sequence[Unit]) -> list[bool]:
    """Return for each unit whether its results get a gradient: it, or something before it, is trained."""
    known = {id(p) for unit in units for p in unit.parameters}
    behind = {id(p) for module in ends_of(model)[1] if module is not None for p in module.parameters()}
    before = any(p.requires_grad for p in model.parameters() if id(p) not in known | behind)
    found = []
    for unit in units:
        before = before or any(p.requires_grad for p in unit.parameters)
        found.append(before)
    return found


def is_wrapped(config: ParallelConfig, world: int) -> bool:
    """Return whether FSDP has something to do."""
    # With nothing to spread and nothing to cast, FSDP would only copy every weight and gradient in each step.
    # Unwrapped, one rank costs 1.006 times a bare PyTorch loop (docs/results.md).
    return world > 1 or config.precision in COMPUTE_DTYPE or config.cpu_offload


def left_alone(model: nn.Module, config: ParallelConfig, parts: int) -> set[nn.Parameter]:
    """Return the weights that FSDP leaves as they are: frozen ones in the type they are computed in, if a rank has each
    as a whole. `parts`: into how many weights are cut.

    FSDP would copy each of them in every step, and keep the copy: with adapters, all of an 8B (15 GiB) once more.
    """
    if parts > 1 or config.cpu_offload:
        return set()
    as_computed = (compute_dtype(config.precision), torch.uint8)  # quantized rows are widened where they multiply
    return {p for p in model.parameters() if not p.requires_grad and p.dtype in as_computed}


def shard(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    config: ParallelConfig,
    units: Sequence[Unit],
    *,
    per_node: int | None = None,
    exact: bool = False,
) -> None:
    """Wrap the model in place. It must be on the meta device. `per_node`: see `ranks_of_a_node`.

    `exact`: gradients are not summed by the network, and sent as they are.
    """
    if not is_wrapped(config, mesh.size()):
        return
    names = mesh.mesh_dim_names or ()
    copies = mesh.size(names.index("replicate")) if "replicate" in names else 1
    alone = left_alone(model, config, mesh.size() // copies)
    axes = tuple(axis for axis in mesh.mesh_dim_names or () if axis != TENSOR)
    if mesh.mesh_dim_names != axes:
        mesh = mesh[axes]
    policy = precision_policy(config, exact=exact)
    # reshard_after_forward=None frees a unit's weights after its forward, but keeps those of the root module, which
    # backward needs first. False keeps all weights gathered: more memory, no second all-gather in backward.
    free = False if config.strategy in _STAYS else None
    # Pinned, so that a GPU copies while the host goes on; without a GPU pinning is of no use.
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if config.cpu_offload else OffloadPolicy()
    reached = reached_by_backward(model, units)  # before `fully_shard` changes the classes of layers
    wrap = partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload, ignored_params=alone)
    for unit in units:
        wrap(list(unit.modules), reshard_after_forward=False if unit.stays else free)
    wrap(model, reshard_after_forward=free)
    for unit, following in pairwise(units):
        # Gather a unit as soon as the one before it is gathered; by itself FSDP would begin when the host reaches it.
        # In backward FSDP knows the order.
        cast(FSDPModule, unit.modules[0]).set_modules_to_forward_prefetch([cast(FSDPModule, following.modules[0])])
    first = next((unit for unit, is_reached in zip(units, reached, strict=True) if is_reached), None)
    if first is not None:
        # The unit prefetches itself instead of what comes before it, which gets no gradient: FSDP would gather the
        # embedding for nothing in a run with adapters (7 % of an 8B), and after an evaluation the last unit.
        cast(FSDPModule, first.modules[0]).set_modules_to_backward_prefetch([cast(FSDPModule, first.modules[0])])
    reduce_by_sum(model)
    if config.gathers_fp8:
        layers = layers_in_fp8(model)
        for unit in units:
            gather_in_fp8(unit.modules, layers)
    if per_node is not None and not exact:
        reduce_by_node(model, mesh, per_node, torch.bfloat16 if config.reduce_dtype == "bf16" else None)


def for_one_rank(
    config: ParallelConfig, layout: Layout, model: nn.Module, memory: int, *, state: float
) -> ParallelConfig:
    """Return the config, with the strategy that suits one rank alone. The network's frozen weights are as stored.

    `memory` is the device's, and `state` what the optimizer keeps for each trained number, both in bytes.
    """
    alone = layout.world == 1 and config.strategy == "full_shard" and config.precision in COMPUTE_DTYPE
    # A config that names full_shard means it.
    alone = alone and not config.cpu_offload and "strategy" not in config.model_fields_set
    # A 16-bit copy of the weights that stays from forward to backward, and over micro-batches, is made once a step
    # instead of twice a micro-batch. It costs 2 bytes a number on top of the 8 of weights and gradients and those of
    # the optimizer, and nothing for frozen weights, of which there is no copy; activations get most of the other
    # memory.
    needed = sum((10 + state) * p.numel() if p.requires_grad else p.nbytes for p in model.parameters())
    if not alone or needed > _FOR_WEIGHTS * memory:
        return config
    return config.model_copy(update={"strategy": "shard_grad_op"})


def memory_of(device: torch.device) -> int:
    """Return the bytes of memory of a device; for a CPU, those of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


def describe(
    model: PreTrainedModel,
    units: Sequence[Unit],
    config: ParallelConfig,
    layout: Layout,
    traffic: Traffic,
    *,
    micro_batches: int,
    tokens: int,
    heads: Sequence[Heads],
    per_node: int | None = None,
) -> dict[str, Any]:
    """Describe for people what is gathered when: units by name, how many, and the bytes of the largest.

    It also has what a rank receives in a step of `micro_batches` micro-batches of `tokens` tokens. The network is not
    sharded yet.
    """
    width = compute_dtype(config.precision).itemsize
    alone = left_alone(model, config, layout.shard_size * layout.tensor)
    sizes = [sum(_nbytes(p, width) for p in unit.parameters if p not in alone) for unit in units]
    rest = sum(_nbytes(p, width) for p in model.parameters() if p not in alone) - sum(sizes)
    named: dict[str, list[int]] = {}
    for unit, size in zip(units, sizes, strict=True):
        if size:
            named.setdefault(unit.name, []).append(size)
    if rest:
        named["the rest"] = [rest]
    staying = " and ".join(unit.name for unit in units if unit.stays)
    again = f"in forward, and again in backward{f' ({staying} once for both)' if staying else ''}"
    gathered = "once a step" if config.strategy in _STAYS else again
    exchanged = exchanged_of(model, units, config, layout, heads, tokens=tokens * micro_batches)
    return {
        "units": [{"name": name, "count": len(found), "bytes": max(found)} for name, found in named.items()],
        "gathered": gathered,
        "weights_bytes": int(traffic.bytes_of_weights),
        "gradients_bytes": int(traffic.bytes_of_gradients),
        **({} if layout.sequence == 1 else {"attention_bytes": exchanged and int(exchanged)}),
        **({} if per_node is None else {"reduced": f"inside of each {per_node} ranks of a node, then between nodes"}),
    }


def exchanged_of(
    model: PreTrainedModel,
    units: Sequence[Unit],
    config: ParallelConfig,
    layout: Layout,
    heads: Sequence[Heads],
    *,
    tokens: int,
) -> float | None:
    """Return the bytes that a rank receives in a step because other ranks have tokens that its attention sees.

    None: not known. `tokens`: those of all micro-batches that its group computes.
    """
    if not heads or any(each.layers is None for each in heads):
        return None
    sharing = sharing_heads(model, layout.tensor)
    numbers = sum(
        (each.layers or 0) * exchanged_by_attention(
            tokens=tokens, heads=each.many // sharing, key_heads=each.keys // sharing, width=each.width,
            members=layout.sequence,
        )
        for each in heads
    )  # fmt: skip
    reached = reached_by_backward(model, units)
    backward = {id(m) for unit, is_reached in zip(units, reached, strict=True) if is_reached for m in unit.modules}
    layers, every = layers_of(model), config.recompute_every or 1
    trained = [number for number, layer in enumerate(layers) if id(layer) in backward]
    # What is computed again is exchanged again: only results of attention itself are ever kept.
    again = [number for number in trained if config.activation_checkpointing != "none" and number % every == 0]
    return numbers * (len(layers) + len(trained) + len(again)) / len(layers) * compute_dtype(config.precision).itemsize


def traffic_of(
    model: PreTrainedModel,
    units: Sequence[Unit],
    config: ParallelConfig,
    layout: Layout,
    *,
    micro_batches: int,
    per_node: int | None = None,
    exact: bool = False,
    hops: float | None = None,
) -> Traffic:
    """Compute what a rank's collectives move in a step of this many micro-batches. The network is not sharded yet.

    `exact` and `hops`: see `Collectives`.
    """
    known = {id(p) for unit in units for p in unit.parameters}
    rest = [p for p in model.parameters() if id(p) not in known]
    policy = precision_policy(config, exact=exact)
    stored = MASTER_DTYPE[config.precision]
    width = (policy.param_dtype or stored).itemsize
    reduced = width if exact else (policy.reduce_dtype or stored).itemsize
    narrow = {id(layer.weight) for layer in layers_in_fp8(model)} if config.gathers_fp8 else set()
    size = partial(_size, shards=layout.shard_size, width=width, narrow=narrow)
    # The root's weights, which stay for backward, as that needs them first.
    sizes = [size(rest, stays=True)]
    for unit, reached in zip(units, reached_by_backward(model, units), strict=True):
        sizes.append(size(unit.parameters, stays=unit.stays, reached=reached))
    how = Collectives(
        shard_size=layout.shard_size,
        replicas=layout.replicas,
        micro_batches=micro_batches,
        stay=config.strategy in _STAYS,
        deferred=config.defer_gradient_sync,
        bytes_gathered=width,
        bytes_reduced=reduced,
        nodes=1 if per_node is None else layout.shard_size // per_node,
        bytes_crossing=stored.itemsize if exact else 2 if config.reduce_dtype == "bf16" else reduced,
        exact=exact,
        hops=hops,
    )
    return step_traffic(sizes, how)


def _size(
    parameters: Sequence[nn.Parameter],
    *,
    shards: int,
    width: int,
    narrow: Collection[int],
    stays: bool,
    reached: bool = True,
) -> UnitSize:
    """Return the size of a unit: every rank sends as many rows of a weight as the rank that has most.

    The bytes of quantized rows count as the numbers of this width that they would be. `narrow`: the ids of weights that
    are sent in 8 bits.
    """
    local = [local_piece(p) for p in parameters]
    padded = [-(-p.shape[0] // shards) * shards * _nbytes(p[0], width) / width for p in local]
    trained = sum(count for p, count in zip(parameters, padded, strict=True) if p.requires_grad)
    narrowed = sum(count for p, count in zip(parameters, padded, strict=True) if id(p) in narrow)
    return UnitSize(weights=sum(padded), narrow=narrowed, trained=trained, stays=stays, reached=reached)


def reduce_by_sum(model: nn.Module) -> None:
    """Sum gradients over the ranks instead of averaging them: the loss is already divided by all ranks' token count."""
    # Dividing by the world size is not exact unless that is a power of two: FSDP's average is off by 1e-7 at three
    # ranks, even in float64. With sums all worlds agree to 7e-16. The order matters on gloo: without the forced sum, a
    # divide factor makes FSDP ask for ReduceOp.PREMUL_SUM, which gloo refuses.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            # For one rank it is 1 by itself. Named, it is divided by, into another copy of every gradient.
            if dist.get_world_size() > 1:
                module.set_gradient_divide_factor(1.0)


def set_gradient_sync(model: nn.Module, *, last: bool, config: ParallelConfig) -> None:
    """Choose the collectives that the next backward skips because more micro-batches of the step follow.

    By default every micro-batch reduce-scatters, so that no rank keeps gradients of the whole model; only the
    all-reduce between replicas waits for the last one. Weights that stay gathered from forward to backward also stay
    gathered from one micro-batch to the next.
    """
    if not isinstance(model, FSDPModule):
        return  # one rank alone
    if config.defer_gradient_sync:
        model.set_requires_gradient_sync(last)
    else:
        model.set_requires_all_reduce(last)
    if config.strategy in _STAYS:
        model.set_reshard_after_backward(last)


def release_gathered(model: nn.Module) -> None:
    """Free weights that a forward without backward left gathered: a later forward must gather the updated weights."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Switch to evaluation mode, and back afterwards. Random state needs no restoring: micro-batches set their own."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()
        release_gathered(model)
