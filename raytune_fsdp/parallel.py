"""How a model is spread over the ranks: a mesh, sharding, precision, activation checkpointing, compilation.

The order is fixed and lives in `shard`: activation checkpointing -> compile -> fully_shard per block and root. The
weights are filled in afterwards, on the sharded shapes.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from raytune_fsdp.config import ParallelConfig
from raytune_fsdp.errors import ConfigError
from raytune_fsdp.model.network import blocks_of
from raytune_fsdp.plan import Layout

COMPUTE_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Precisions that compute in another type than that of the weights."""


def check_precision(precision: str, device: torch.device) -> None:
    """Refuse bf16 on a GPU that only imitates it: torch computes it there in fp32, and slower than that."""
    if device.type != "cuda" or not precision.startswith("bf16"):
        return
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(
            f"parallel.precision={precision}: {torch.cuda.get_device_name(device)} has no bf16 (Ampere has): "
            "set parallel.precision=fp16 or fp32"
        )


def make_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """Replicas x shards, or only shards: an axis of one replica would all-reduce every block in vain. Collective."""
    if layout.replicas == 1:
        return init_device_mesh(device.type, (layout.shard_size,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (layout.replicas, layout.shard_size), mesh_dim_names=("replicate", "shard"))


def shard(model: PreTrainedModel, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Wrap the model in place. It must be on the meta device."""
    blocks = blocks_of(model)
    if config.activation_checkpointing == "full":
        checkpoint_activations(model)
    if config.compile:
        for block in blocks:
            block.compile()  # per block: one graph serves all layers, and FSDP's hooks stay outside it
    if mesh.size() == 1 and config.precision not in COMPUTE_DTYPE:
        # Nothing to spread and nothing to cast: FSDP would only copy every weight and gradient in each step. Unwrapped,
        # one rank costs 1.006 times a bare PyTorch loop (docs/results.md).
        return
    policy = precision_policy(config.precision)
    # reshard_after_forward=None frees a block's weights after its forward, but keeps those of the root module, which
    # backward needs first. False keeps all of them gathered: more memory, no second all-gather in backward.
    free = False if config.strategy in ("shard_grad_op", "replicate") else None
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=free)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=free)
    reduce_by_sum(model)


def precision_policy(precision: str) -> MixedPrecisionPolicy:
    """16-bit compute with fp32 reduction; otherwise everything in the type of the weights."""
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
    """Sum gradients over the ranks instead of averaging them: the loss is already divided by all ranks' token count."""
    # Dividing by the world size is not exact unless that is a power of two: FSDP's average is off by 1e-7 at three
    # ranks, even in float64. With sums all worlds agree to 7e-16. The order matters on gloo: without the forced sum, a
    # divide factor makes FSDP ask for ReduceOp.PREMUL_SUM, which gloo refuses.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def set_gradient_sync(model: nn.Module, *, last: bool, config: ParallelConfig) -> None:
    """Choose the collectives that the next backward leaves out because more micro-batches of the step follow.

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
    if config.strategy in ("shard_grad_op", "replicate"):
        model.set_reshard_after_backward(last)


def release_gathered(model: nn.Module) -> None:
    """Free weights that a forward without backward left gathered: a later forward must gather the trained ones."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
