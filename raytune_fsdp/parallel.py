"""How a model is spread over the ranks: a mesh, sharding, precision, activation checkpointing, compilation.

The order is fixed and lives in `shard`: adapters (later) -> activation checkpointing -> compile -> fully_shard per
block and root. Filling with weights comes after, on the sharded shapes.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from raytune_fsdp.config import ParallelConfig
from raytune_fsdp.model.skeleton import blocks_of
from raytune_fsdp.plan import Layout

COMPUTE_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Precisions that compute in another type than the weights are kept in."""


def make_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """Replicas x shards, or only shards: over an axis of one, blocks would be all-reduced for nothing. Collective."""
    if layout.replicas == 1:
        return init_device_mesh(device.type, (layout.shard_size,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (layout.replicas, layout.shard_size), mesh_dim_names=("replicate", "shard"))


def shard(model: PreTrainedModel, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Wrap the model, in place. It must be on the meta device."""
    blocks = blocks_of(model)
    if config.activation_checkpointing == "full":
        checkpoint_activations(model)
    if config.compile:
        for block in blocks:
            block.compile()
    if mesh.size() == 1 and config.precision not in COMPUTE_DTYPE:
        return  # nothing to spread and nothing to cast: FSDP would only copy every weight and gradient, several times
    policy = precision_policy(config.precision)
    # None frees a block's weights after its forward and keeps the root's, which backward needs first.
    free = False if config.strategy in ("shard_grad_op", "replicate") else None
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=free)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=free)
    reduce_by_sum(model)


def precision_policy(precision: str) -> MixedPrecisionPolicy:
    """16-bit compute with fp32 reduction, or everything in the type of the weights."""
    compute = COMPUTE_DTYPE.get(precision)
    if compute is not None:
        return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    if precision == "bf16_pure":
        return MixedPrecisionPolicy(reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Keep only each block's input and compute the rest again in backward, with the same random numbers."""
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": True})


def reduce_by_sum(model: nn.Module) -> None:
    """Add gradients up over the ranks instead of averaging them.

    The loss is already divided by the token count of all ranks. Averaging would divide by the world size, and is not
    exact where that is no power of two.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def set_gradient_sync(model: nn.Module, *, last: bool, config: ParallelConfig) -> None:
    """Say which collectives the next backward may leave out because more micro-batches of the step follow.

    By default every micro-batch reduce-scatters, so that no rank keeps gradients of the whole model; only replicas wait
    for the last one. Weights that stay gathered from forward to backward also stay from micro-batch to micro-batch.
    """
    if not isinstance(model, FSDPModule):
        return  # one rank alone
    if config.defer_gradient_sync:
        model.set_requires_gradient_sync(last)
    else:
        model.set_requires_all_reduce(last)
    if config.strategy in ("shard_grad_op", "replicate"):
        model.set_reshard_after_backward(last)


def release_gathered(model: nn.Module) -> None:
    """Free weights that a forward without backward has left gathered: the next one must see the trained ones."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
