"""`parallel`: how the model is spread over the ranks and in which precision it computes."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from raytune_fsdp.config.base import Section


class MeshConfig(Section):
    """The axes along which ranks stand. Their product is the number of ranks."""

    replicate: int | None = Field(default=None, ge=1)
    """Copies of the model, each over ranks of its own. Follows from `strategy` and `shard_size` if it is not given."""

    shard: int | None = Field(default=None, ge=1)
    """Ranks with samples of their own that share one copy of the model. Follows from `strategy` and `shard_size`, too."""

    sequence: int = Field(default=1, ge=1)
    """Ranks that share each sample, every one with as many of its tokens: for documents too long for one GPU. In
    attention each has all tokens and some of the heads, whose number it must divide."""


class ParallelConfig(Section):
    strategy: Literal["full_shard", "shard_grad_op", "hybrid_shard", "replicate"] = "full_shard"
    """`full_shard` shards weights, gradients and optimizer (ZeRO-3). `shard_grad_op` keeps weights gathered from
    forward to backward (ZeRO-2). `hybrid_shard` shards over `shard_size` ranks and replicates across. `replicate`
    keeps everything everywhere (DDP)."""

    shard_size: int | None = Field(default=None, ge=1)
    """With `hybrid_shard`: ranks that share one copy of the model, usually the GPUs of a node. Must divide the world
    size."""

    mesh: MeshConfig = Field(default_factory=MeshConfig)

    precision: Literal["bf16", "fp32", "fp64", "fp16", "bf16_pure"] = "bf16"
    """`bf16`, `fp16`: compute in 16 bits, fp32 master weights and reduction (fp16 with dynamic loss scaling).
    `bf16_pure`: weights and optimizer in bf16 too. `fp32`, `fp64`: throughout."""

    tf32: bool = False
    """On GPUs: compute products of fp32 numbers in TF32, with 10 bits of mantissa instead of 23. Not for networks that
    compute rotary positions as a product, as transformers 5.17 and some models' own code do: TF32 has no whole numbers
    above 2,048."""

    activation_checkpointing: Literal["none", "selective", "every_n", "full"] = "none"
    """What backward computes again instead of finding it in memory. `full`: everything in a block but its input.
    `every_n`: the same, in one block of `recompute_every`. `selective`: in every block what is computed in no time, but
    not attention and large products."""

    recompute_every: int | None = Field(default=None, ge=2)
    """With `activation_checkpointing: every_n`: one block in this many is computed again."""

    activation_offload: bool = False
    """Move what a block keeps for backward to the host's memory, and back in time: with `full` this is each block's
    input, without checkpointing everything."""

    cpu_offload: bool = False
    """Keep weights, gradients and moments in the host's memory, and update the weights there. Makes room on the GPU for a
    model that would not fit, and costs much time."""

    wrap: int = Field(default=1, ge=1)
    """How many blocks are gathered and freed together. More than one: fewer and larger messages, more memory."""

    compile: bool | Literal["auto"] = "auto"
    """Compile each block with torch.compile. `auto`: on GPUs where it works; a run that goes on keeps what it began with."""

    defer_gradient_sync: bool = False
    """Reduce gradients only after the last micro-batch of a step: less traffic, but every rank holds full gradients
    until then."""

    @model_validator(mode="after")
    def _shard_size(self) -> Self:
        mesh = self.mesh
        given = self.shard_size is not None or mesh.shard is not None or mesh.replicate is not None
        if self.strategy == "hybrid_shard" and not given or self.strategy != "hybrid_shard" and self.shard_size:
            raise ValueError(
                f"parallel.shard_size={self.shard_size} with parallel.strategy={self.strategy}: "
                "hybrid_shard needs a shard_size, and the other strategies do not take one"
            )
        if self.shard_size is not None and self.shard_size % mesh.sequence:
            raise ValueError(
                f"parallel.shard_size={self.shard_size} with parallel.mesh.sequence={mesh.sequence}: the ranks that share "
                "a sample share a copy of the model, too, so shard_size must be a multiple of sequence; set it to "
                f"{-(-self.shard_size // mesh.sequence) * mesh.sequence}"
            )
        return self

    @model_validator(mode="after")
    def _recompute_every(self) -> Self:
        if (self.activation_checkpointing == "every_n") != (self.recompute_every is not None):
            raise ValueError(
                f"parallel.recompute_every={self.recompute_every} with "
                f"parallel.activation_checkpointing={self.activation_checkpointing}: every_n needs a recompute_every, "
                "and the other modes do not take one"
            )
        return self
