"""Build the network that a rank trains: every feature in one order, whoever asks.

A run, a prediction and a calibration differ in their `Site`, in who chooses the kernels, and in where values come from
afterwards. The order:

 1. the base, then frozen weights or adapters, then rows of new tokens (model/network.py)
 2. kernels: the loss head takes over those rows, and cutting needs the loss head
 3. counts of operations and weights, before bytes take the place of numbers
 4. groups and mesh of the ranks, hooks on routers
 5. types: quantized layers, fp8, frozen weights; with them the strategy of one rank alone. From here on `parallel` of
    the build holds, not that of the config
 6. layers cut to this rank's part, after a small network has proved it
 7. units of sharding, and what travels; a prediction then drops layers that others stand for
 8. how layers run in training, and sharding
 9. values, by the caller; then, where ranks share tokens, `split_tokens`
10. the optimizer, and the checkpoint

Three other orders are fixed as well, each in one function: what comes in (run/starting_weights.py:first_weights), what
a checkpoint keeps (checkpoint/contents.py), what goes out (checkpoint/merged.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from raytune_fsdp.base.measured import ParameterCount
from raytune_fsdp.config import FinetuneConfig, ParallelConfig
from raytune_fsdp.config.sections.method import QloraMethod
from raytune_fsdp.config.sections.optimizers import state_bytes
from raytune_fsdp.model.attention.choose import KernelChoice, KernelNeeds
from raytune_fsdp.model.compile_layers import Compiler, compilers_of
from raytune_fsdp.model.layers import layers_of, set_training_forward
from raytune_fsdp.model.network import MASTER_DTYPE, build_network, count_parameters
from raytune_fsdp.model.objective.routers import Routers, watch_routers
from raytune_fsdp.model.offload_activations import Copies, Offload
from raytune_fsdp.model.pieces.pieces import TENSOR
from raytune_fsdp.model.precision.fp8 import compute_in_fp8
from raytune_fsdp.model.precision.quantized import quantize_layers
from raytune_fsdp.model.split.tensor import split_layers
from raytune_fsdp.plan.division import Division
from raytune_fsdp.plan.plan import Layout, Plan
from raytune_fsdp.run.trials.cut import try_split
from raytune_fsdp.step.accumulation import add_gradients
from raytune_fsdp.step.flops import Architecture
from raytune_fsdp.step.in_order import SumsInOrder
from raytune_fsdp.step.operations import count_architecture, count_asleep
from raytune_fsdp.step.optim.build import build_optimizer
from raytune_fsdp.step.optim.execution import BY_OPERATION, AsKernel, Execution
from raytune_fsdp.step.optim.update import Optimizer
from raytune_fsdp.step.parallel import (
    SharingGroups,
    Unit,
    describe,
    for_one_rank,
    is_wrapped,
    make_groups,
    make_mesh,
    memory_of,
    shard,
    sharding_units,
    traffic_of,
)
from raytune_fsdp.step.precision import store_frozen
from raytune_fsdp.step.reduce_by_node import ranks_together
from raytune_fsdp.step.relay import Levels
from raytune_fsdp.step.sums import Sums, SumsByRank
from raytune_fsdp.step.traffic import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a network is built: among which ranks, on which devices."""

    layout: Layout
    division: Division
    """What each rank has of a step."""
    device: torch.device
    """Where its tensors are."""
    kind: str
    """Type of the device that the run computes on."""
    memory: int
    """Bytes of memory of such a device."""
    together: Callable[[], int | None]
    """Returns how many ranks of a node sum gradients first; None: no ranks do. Called with reduce=hierarchical only."""
    real: bool = True
    """Whether tensors will have values: without them nothing can be tried, and no router be watched."""
    copies: Copies | None = None
    """Sends activations to the host; None: as on this device."""

    @classmethod
    def of_rank(cls, plan: Plan, device: torch.device) -> Site:
        """Return the site of a rank that computes on this device."""
        return cls(
            layout=plan.layout, division=plan.division, device=device, kind=device.type,
            memory=memory_of(device), together=partial(ranks_together, plan.layout.shard_size),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Counts:
    """What is counted of a whole network, before it is quantized, cut or sharded."""

    architecture: Architecture
    parameters: ParameterCount
    asleep: int
    """The number of weights that a token is not multiplied with."""
    largest: int
    """Bytes of the largest weight, as it is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """A network that is spread over the ranks. It has no values yet."""

    model: PreTrainedModel
    kernels: Mapping[str, KernelChoice]
    counts: Counts
    parallel: ParallelConfig
    """The config's `parallel`, changed where one rank alone does better otherwise."""
    site: Site
    groups: SharingGroups
    units: Sequence[Unit]
    """The modules that are gathered and computed one after the other."""
    layers: Sequence[nn.Module]
    """The repeated layers, under the names that their classes had before sharding."""
    stands_for: tuple[int, ...]
    """For each layer of the whole network, the one here that is like it."""
    routers: Routers | None
    compiler: Compiler | None
    """Compiles the layers; None: they run as they are."""
    updates: Compiler | None
    """Compiles updates of weights that torch has no kernel for; None: these run operation by operation."""
    traffic: Traffic | None
    """What travels in a step; None: nothing is spread."""
    levels: Levels | None
    """The groups in which an exact run passes sums from node to node; None: it does not."""
    sharding: Mapping[str, Any] | None
    """What is gathered when, and what travels, for people to read; None: nothing is spread."""


def build(
    config: FinetuneConfig,
    hf_config: PretrainedConfig,
    needs: KernelNeeds,
    site: Site,
    choose_kernels: Callable[[PreTrainedModel], Mapping[str, KernelChoice]],
    *,
    added: Collection[int] = (),
    adapted: Collection[str] | None = None,
    keep: Callable[[PreTrainedModel, ParallelConfig], Sequence[int]] | None = None,
) -> Build:
    """Build a network on the meta device and spread it over the ranks. Collective.

    `choose_kernels` gives the network its attention and its loss, and returns all choices. `added`: ids of new tokens.
    `adapted`: the modules that have adapters in a run that goes on. `keep` drops layers, and returns for each layer
    which of those that are left stands for it.
    """
    # A copy of the config, because building writes the attention into it.
    model = build_network(copy.deepcopy(hf_config), config, added, adapted)
    kernels, layout = choose_kernels(model), site.layout
    largest = max(parameter.nbytes for parameter in model.parameters())
    counts = Counts(count_architecture(model), count_parameters(model), count_asleep(model), largest)
    groups, mesh = make_groups(layout, site.device), make_mesh(layout, site.device)
    tokens = config.train.micro_batch * config.data.seq_len
    compiler, updates = compilers_of(kernels, exact=config.run.exact, tokens=tokens)
    # Hooks would break the graphs of layers that are compiled.
    watched = site.real and compiler is None
    routers = watch_routers(model, config.train, groups.sequence) if watched else None
    parallel = _typed(model, config, site)
    if layout.tensor > 1:
        if site.real:
            try_split(config, hf_config, model, mesh[TENSOR], site.device)
        split_layers(model, mesh[TENSOR])
    per_node = site.together() if parallel.reduce == "hierarchical" else None
    traffic, sharding = _moved(model, config, parallel, needs, site, per_node)
    stands_for = tuple(range(len(layers_of(model))) if keep is None else keep(model, parallel))
    units, layers = sharding_units(model, parallel, ends=needs.ends), layers_of(model)
    set_training_forward(
        model, recompute=parallel.activation_checkpointing, every=parallel.recompute_every,
        offload=Offload(site.device, site.copies) if parallel.activation_offload else None, compiler=compiler,
    )  # fmt: skip
    shard(model, mesh, parallel, units, per_node=per_node, exact=config.run.exact)
    return Build(
        model=model,
        kernels=kernels,
        counts=counts,
        parallel=parallel,
        site=site,
        groups=groups,
        units=units,
        layers=layers,
        stands_for=stands_for,
        routers=routers,
        compiler=compiler,
        updates=updates,
        traffic=traffic,
        levels=None if per_node is None or not config.run.exact else Levels.of(mesh, per_node),
        sharding=sharding,
    )


def _typed(model: PreTrainedModel, config: FinetuneConfig, site: Site) -> ParallelConfig:
    """Set the types that weights are kept and computed in; return the parallel config for devices of this size."""
    parallel = config.parallel
    if isinstance(config.method, QloraMethod):
        quantize_layers(model, config.method.quantization)
    if parallel.precision == "fp8":
        compute_in_fp8(model, parallel.fp8_scaling, emulated=site.kind == "cpu")
    store_frozen(model, parallel.precision)
    kept = state_bytes(config.optim.optimizer, MASTER_DTYPE[parallel.precision].itemsize)
    return for_one_rank(parallel, site.layout, model, site.memory, state=kept)


def _moved(
    model: PreTrainedModel,
    config: FinetuneConfig,
    parallel: ParallelConfig,
    needs: KernelNeeds,
    site: Site,
    per_node: int | None,
) -> tuple[Traffic | None, Mapping[str, Any] | None]:
    """Return what travels in a step between ranks that share weights, and the same for people; None: nothing does."""
    if not is_wrapped(parallel, site.layout.world):
        return None, None
    units, count = sharding_units(model, parallel, ends=needs.ends), site.division.full_rounds
    traffic = traffic_of(
        model, units, parallel, site.layout, micro_batches=count, per_node=per_node, exact=config.run.exact,
        hops=None if per_node is None else site.division.hops(per_node),
    )  # fmt: skip
    return traffic, describe(
        model, units, parallel, site.layout, traffic, micro_batches=count, heads=needs.heads,
        tokens=config.train.micro_batch * config.data.seq_len, per_node=per_node,
    )  # fmt: skip


def optimizer_of(
    built: Build, config: FinetuneConfig, micro_batches: int | None = None, execution: Execution | None = None
) -> Optimizer:
    """Build the optimizer of a network that has its memory, and have gradients added as the run began to.

    `micro_batches` of a rank in a step, if they are not those of the run. `execution`: how written-out updates run;
    None: as the kernels say that were chosen.
    """
    count = built.site.division.full_rounds if micro_batches is None else micro_batches
    add_gradients(built.kernels.get("gradients"), built.model, built.units, built.parallel, built.site.layout, count)
    return build_optimizer(
        built.model, config.optim, config.method, seed=config.run.seed, exact=config.run.exact,
        execution=execution or (BY_OPERATION if built.updates is None else AsKernel(built.updates)),
        states_apart="decay" in built.kernels,
    )  # fmt: skip


def sums_of(built: Build, config: FinetuneConfig, plan: Plan) -> Sums:
    """Return how a network that has its memory is summed over micro-batches and ranks."""
    if not config.run.exact:
        return SumsByRank(plan.layout)
    return SumsInOrder(built.model, plan.division, built.levels)
