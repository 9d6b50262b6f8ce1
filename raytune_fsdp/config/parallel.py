"""`parallel`: how the model is spread over the ranks and in which precision it computes."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from raytune_fsdp.config.base import Section


class ParallelConfig(Section):
    strategy: Literal["full_shard", "shard_grad_op", "hybrid_shard", "replicate"] = "full_shard"
    """`full_shard` shards weights, gradients and optimizer (ZeRO-3). `shard_grad_op` keeps weights gathered from
    forward to backward (ZeRO-2). `hybrid_shard` shards over `shard_size` ranks and replicates across. `replicate`
    keeps everything everywhere (DDP)."""

    shard_size: int | None = Field(default=None, ge=1)
    """With `hybrid_shard`: ranks that share one copy of the model, usually the GPUs of a node. Must divide the world
    size."""

    precision: Literal["bf16", "fp32", "fp64", "fp16", "bf16_pure"] = "bf16"
    """`bf16`, `fp16`: compute in 16 bits, fp32 master weights and reduction (fp16 with dynamic loss scaling).
    `bf16_pure`: weights and optimizer in bf16 too. `fp32`, `fp64`: throughout."""

    activation_checkpointing: Literal["none", "full"] = "none"
    """`full` keeps only the input of each block and recomputes the rest in backward: less memory, more time."""

    compile: bool = False
    """Compile each block with torch.compile."""

    defer_gradient_sync: bool = False
    """Reduce gradients only after the last micro-batch of a step: less traffic, but every rank holds full gradients
    until then."""

    @model_validator(mode="after")
    def _shard_size(self) -> Self:
        if (self.strategy == "hybrid_shard") != (self.shard_size is not None):
            raise ValueError(
                f"parallel.shard_size={self.shard_size} with parallel.strategy={self.strategy}: "
                "hybrid_shard needs a shard_size, and the other strategies do not take one"
            )
        return self
